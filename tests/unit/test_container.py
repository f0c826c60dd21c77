# SPDX-License-Identifier: GPL-3.0-or-later
"""Servers in containers: whose they are, how the capture container is run, and what an engine is told."""

from __future__ import annotations

import json
import os
import types
from pathlib import Path

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_ports as cp
from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_place, service_control, service_query, service_worker
from ansible_collections.hidden_state.bridge.plugins.modules import found_server

ID = "0123456789abcdef" * 4
DOCKER = {
    "Name": "/sglang",
    "Image": "sha256:aaaa",
    "State": {"Status": "running", "Pid": 0, "ExitCode": 0},
    "Config": {
        "Env": ["PATH=/usr/bin", "HF_TOKEN=secret"],
        "Entrypoint": ["/opt/nvidia/entrypoint.sh"],
        "Cmd": ["python3", "-m", "sglang.launch_server"],
        "User": "",
        "WorkingDir": "/sgl-workspace",
        "Labels": {},
        "Hostname": "gpu-01",
    },
    "HostConfig": {
        "NetworkMode": "host",
        "PortBindings": {},
        "AutoRemove": False,
        "IpcMode": "host",
        "ShmSize": 67108864,
        "Runtime": "nvidia",
        "CapAdd": ["IPC_LOCK"],
        "SecurityOpt": ["seccomp=unconfined"],
        "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}],
        "DeviceRequests": [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]]}],
    },
    "Mounts": [
        {"Type": "bind", "Source": "/data/models", "Destination": "/models", "RW": False},
        {"Type": "volume", "Name": "cache", "Source": "/var/lib/docker/volumes/cache", "Destination": "/root/.cache", "RW": True},
    ],
}
PODMAN = {
    "Name": "sglang",
    "Image": "bbbb",
    "State": {"Status": "running", "Pid": 0, "ExitCode": 0},
    "Config": {
        "Env": ["container=podman"],
        "Entrypoint": ["python3"],
        "Cmd": ["-m", "sglang.launch_server"],
        "User": "1000:1000",
        "CreateCommand": ["podman", "run", "--device", "nvidia.com/gpu=all", "--name=sglang", "--gpus=all", "image"],
        "Hostname": "abc",
    },
    "HostConfig": {
        "NetworkMode": "bridge",
        "PortBindings": {"30000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "30000"}], "8000/tcp": [{"HostIp": "", "HostPort": "8001"}]},
        "IpcMode": "private",
        "PidMode": "private",
        "ShmSize": 1073741824,
        "Devices": [{"PathOnHost": "/dev/nvidia0", "PathInContainer": "/dev/nvidia0"}],
        "Tmpfs": {"/scratch": "size=1g"},
        "Init": True,
    },
    "Mounts": [],
}
ARGV = ["python3", "-m", "sglang.launch_server", "--model-path", "/models/k", "--disable-radix-cache"]
MOUNTS = [("/run/x/deepseek_v2.py", "/sgl/srt/models/deepseek_v2.py", True), ("/dev/shm/hs", "/dev/shm/hs", False)]


def test_a_container_of_docker_with_gpus():
    words = cq.capture_command("docker", DOCKER, ARGV, "/run/x.env", MOUNTS)
    assert words == [
        *("docker", "run", "--detach", "--name", "sglang-hsb-capture", "--restart", "no", "--env-file", "/run/x.env"),
        *("--network", "host", "--ipc", "host", "--cap-add", "IPC_LOCK", "--security-opt", "seccomp=unconfined", "--runtime", "nvidia"),
        *("--ulimit", "memlock=-1:-1", "--gpus", "all", "--volume", "/data/models:/models:ro", "--volume", "cache:/root/.cache"),
        *("--volume", "/run/x/deepseek_v2.py:/sgl/srt/models/deepseek_v2.py:ro", "--volume", "/dev/shm/hs:/dev/shm/hs"),
        *("--workdir", "/sgl-workspace", "--entrypoint", "python3", "sha256:aaaa", *ARGV[1:]),
    ]


def test_chosen_gpus():
    facts = dict(DOCKER, HostConfig=dict(DOCKER["HostConfig"], DeviceRequests=[{"DeviceIDs": ["0", "3"], "Capabilities": [["gpu"]]}]))
    words = cq.capture_command("docker", facts, ARGV, "/e", [])
    assert words[words.index("--gpus") + 1] == '"device=0,3"'


def test_devices_of_cdi_are_no_gpus_of_docker():
    request = {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=1"], "Capabilities": None, "Options": None}
    facts = dict(DOCKER, HostConfig=dict(DOCKER["HostConfig"], DeviceRequests=[request]))
    words = cq.capture_command("docker", facts, ARGV, "/e", [])
    at = words.index("--device")
    assert words[at : at + 4] == ["--device", "nvidia.com/gpu=0", "--device", "nvidia.com/gpu=1"] and "--gpus" not in words


def test_a_mount_in_memory_is_none_of_the_hosts():
    """As docker shows one that was asked for with --mount."""
    mounts = [{"Type": "tmpfs", "Source": "", "Destination": path, "Mode": "", "RW": path != "/c"} for path in ("/a", "/b", "/c", "/d")]
    options = [{"Type": "tmpfs", "Target": "/a", "TmpfsOptions": {"SizeBytes": 1024, "Mode": 0o1777}}, {"Type": "tmpfs", "Target": "/b"}]
    facts = dict(DOCKER, Mounts=mounts, HostConfig=dict(DOCKER["HostConfig"], Mounts=options, Tmpfs={"/d": "size=1g"}))
    words = cq.capture_command("docker", facts, ARGV, "/e", [])
    at = words.index("--tmpfs")
    assert words[at : at + 8 : 2] == ["--tmpfs"] * 4
    assert words[at + 1 : at + 8 : 2] == ["/a:size=1024,mode=1777", "/b", "/c:ro", "/d:size=1g"]
    assert "--volume" not in words and cq.outside_path(facts, "/a/model") is None


def test_a_container_of_podman():
    words = cq.capture_command("podman", PODMAN, ARGV, "/run/x.env", [])
    assert words == [
        *("podman", "run", "--detach", "--name", "sglang-hsb-capture", "--restart", "no", "--env-file", "/run/x.env"),
        *("--network", "bridge", "--publish", "127.0.0.1:30000:30000/tcp", "--publish", "8001:8000/tcp", "--hostname", "abc"),
        *("--init", "--shm-size", "1073741824", "--device", "nvidia.com/gpu=all", "--gpus", "all", "--tmpfs", "/scratch:size=1g"),
        *("--user", "1000:1000", "--entrypoint", "python3", "bbbb", *ARGV[1:]),
    ]


def test_what_the_server_is_told_is_not_told_to_podman():
    command = ["-m", "sglang.launch_server", "--device", "cuda"]
    created = ["podman", "run", "--device", "nvidia.com/gpu=all", "image", *command]
    facts = dict(PODMAN, Config=dict(PODMAN["Config"], Cmd=command, CreateCommand=created))
    words = cq.capture_command("podman", facts, ["python3", *command], "/run/x.env", [])
    assert words[: words.index("bbbb")].count("--device") == 1 and "nvidia.com/gpu=all" in words


def test_variables_of_a_container():
    assert (
        cq.environment_text({"B": 'with "quotes" and $', "A": "1", "HOSTNAME": "x", "container": "podman"})
        == 'A=1\nB=with "quotes" and $\n'
    )
    with pytest.raises(service_query.ServiceError, match="variable A of the container holds a line break"):
        cq.environment_text({"A": "one\ntwo"})


def test_a_path_in_a_container_is_found_on_the_host():
    assert cq.outside_path(DOCKER, "/models/k/config.json") == "/data/models/k/config.json"
    assert cq.outside_path(DOCKER, "/models") == "/data/models"
    assert cq.outside_path(DOCKER, "/modelsx") is None


@pytest.mark.parametrize(
    "label, named",
    [
        ("com.docker.compose.project", "compose project"),
        ("io.podman.compose.project", "compose project"),
        ("io.kubernetes.pod.name", "Kubernetes pod"),
        ("com.docker.swarm.service.name", "swarm service"),
        ("PODMAN_SYSTEMD_UNIT", "systemd unit"),
    ],
)
def test_owners_that_would_not_let_a_container_stop_are_named(label, named):
    facts = dict(DOCKER, Config=dict(DOCKER["Config"], Labels={label: "prod"}))
    with pytest.raises(service_query.ServiceError, match="container sglang belongs to the %s prod: " % named):
        cq.refuse("docker", facts)


def test_a_container_that_a_stop_would_remove():
    with pytest.raises(service_query.ServiceError, match="--rm"):
        cq.refuse("docker", dict(DOCKER, HostConfig=dict(DOCKER["HostConfig"], AutoRemove=True)))


def test_an_engine_that_does_not_answer_is_not_one_without_the_container(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cq.inspect("podman", "sglang") is None
    (tmp_path / "podman").write_text("not to be run")
    with pytest.raises(service_query.ServiceError, match="Permission denied"):
        cq.inspect("podman", "sglang")


# -- which container a process is in ----------------------------------------------------------------------


def groups(monkeypatch, of_process, of_init=("/init.scope",)):
    monkeypatch.setattr(hp, "cgroups", lambda pid: list(of_init) if pid == 1 else list(of_process))
    monkeypatch.setattr(cq, "inspect", lambda engine, reference: dict(DOCKER) if (engine, reference) == ("docker", ID) else None)


@pytest.mark.parametrize("path", ["/system.slice/docker-%s.scope", "/docker/%s", "/machine.slice/libpod-%s.scope/container"])
def test_a_process_in_a_container(monkeypatch, path):
    groups(monkeypatch, [path % ID])
    assert cq.container_of(7) == {"manager": "docker", "service": "sglang"}


def test_a_process_of_the_host(monkeypatch):
    groups(monkeypatch, ["/system.slice/sglang.service"])
    assert cq.container_of(7) is None


def test_a_host_that_is_a_container_itself(monkeypatch):
    groups(monkeypatch, ["/libpod_parent/libpod-%s/system.slice/sglang.service" % ID], ["/libpod_parent/libpod-%s/init.scope" % ID])
    assert cq.container_of(7) is None
    groups(monkeypatch, ["/libpod_parent/libpod-%s" % ID], ["/libpod_parent/libpod-%s/init.scope" % ID])
    assert cq.container_of(7) is None


def test_a_pod_of_kubernetes_is_named(monkeypatch):
    groups(monkeypatch, ["/kubepods.slice/kubepods-burstable.slice/cri-containerd-%s.scope" % ID])
    with pytest.raises(service_query.ServiceError, match="Kubernetes pod"):
        cq.container_of(7)


# -- what an engine is told -------------------------------------------------------------------------------

ENGINE = """#!/usr/bin/env python3
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
with open(here / "told", "a") as told:
    told.write(json.dumps(sys.argv[1:]) + "\\n")
state = json.loads((here / "state").read_text())
words = sys.argv[1:]
if words[:2] == ["container", "inspect"]:
    if words[2] not in state:
        sys.exit("Error: no such container " + words[2])
    print(json.dumps([state[words[2]]]))
elif words[0] == "stop":
    state[words[-1]]["State"] = {"Status": "exited", "Pid": 0, "ExitCode": 0}
elif words[0] == "start":
    state[words[-1]]["State"] = {"Status": "running", "Pid": 0, "ExitCode": 0}
elif words[0] == "rm":
    del state[words[-1]]
elif words[0] == "run":
    name = words[words.index("--name") + 1]
    state[name] = dict(state["sglang"], Name=name, State={"Status": "running", "Pid": 0, "ExitCode": 0})
elif words[0] == "logs":
    print("line of", words[-1])
(here / "state").write_text(json.dumps(state))
"""


class Engine:
    """A recorded engine of the name `podman`; ``command`` is the file with the capture container's command."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        program = directory / "podman"
        program.write_text(ENGINE)
        program.chmod(0o755)
        (directory / "state").write_text(json.dumps({"sglang": PODMAN}))
        self.command = directory / "command.json"
        self.command.write_text(json.dumps({"command": cq.capture_command("podman", PODMAN, ARGV, "/run/x.env", MOUNTS)}))

    def control(self, capture: bool) -> service_control.Container:
        params = {"name": "sglang", "stop_timeout": 7, "container_command": str(self.command) if capture else None}
        return service_control.of("podman", params)

    def told(self) -> list[list[str]]:
        """What it was told since the last time, questions left out."""
        path = self.directory / "told"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.write_text("")
        return [line for line in lines if line[:2] != ["container", "inspect"]]

    def names(self) -> dict[str, str]:
        return {name: one["State"]["Status"] for name, one in json.loads((self.directory / "state").read_text()).items()}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "%s%s%s" % (tmp_path, os.pathsep, os.environ["PATH"]))
    return Engine(tmp_path)


def test_capture_and_back(engine):
    control = engine.control(capture=True)
    control.stop([])
    assert engine.told() == [["stop", "-t", "7", "sglang"]]
    control.start()
    (told,) = engine.told()
    assert told[:5] == ["run", "--detach", "--name", "sglang-hsb-capture", "--restart"] and "bbbb" in told
    # The operator's container is kept.
    assert engine.names() == {"sglang": "exited", "sglang-hsb-capture": "running"}
    assert cq.query("podman", "sglang")["state"] == "running"

    control.start()
    assert [words[0] for words in engine.told()] == ["rm", "run"]

    back = engine.control(capture=False)
    back.stop([])
    assert engine.told() == [["stop", "-t", "7", "sglang-hsb-capture"], ["stop", "-t", "7", "sglang"]]
    back.start()
    assert engine.told() == [["rm", "--force", "sglang-hsb-capture"], ["start", "sglang"]]
    assert engine.names() == {"sglang": "running"}


def test_a_capture_container_that_ended_is_taken_away(engine):
    control = engine.control(capture=True)
    control.start()
    control.stop([])
    assert service_query.log_tail("podman", "sglang") == ["line of sglang-hsb-capture"]
    engine.told()
    control.take_notice()
    assert engine.told() == [["rm", "--force", "sglang-hsb-capture"]]
    assert cq.query("podman", "sglang")["state"] == "stopped"


# -- who holds the port of a container --------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch):
    """A port's holders as the host shows them, by their command lines."""

    def hold(*commands):
        monkeypatch.setattr(hp, "port_holders", lambda *_asked: [{"pid": 70 + n, "command": one} for n, one in enumerate(commands)])

    return hold


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/docker-proxy -proto tcp -host-ip 0.0.0.0 -host-port 30000 -container-ip 172.17.0.2 -container-port 30000",
        "/usr/bin/conmon --api-version 1 -c %s" % ID,
        "rootlessport",
        "rootlessport-child",
        "/usr/bin/pasta --config-net -t 30000-30000:30000-30000",
    ],
)
def test_the_engine_holds_the_port_that_a_container_publishes(engine, held, command):
    held(command)
    assert cp.strangers(30000, "127.0.0.1", [], "podman", "sglang") == []
    # Another container's.
    assert len(cp.strangers(30001, "127.0.0.1", [], "podman", "sglang")) == 1
    assert len(cp.strangers(30000, "127.0.0.1", [], "podman", "other")) == 1
    assert len(cp.strangers(30000, "127.0.0.1", [], "systemd", "sglang")) == 1
    engine.control(capture=False).stop([])
    assert len(cp.strangers(30000, "127.0.0.1", [], "podman", "sglang")) == 1


def test_the_capture_container_publishes_the_port_too(engine, held):
    control = engine.control(capture=True)
    control.stop([])
    control.start()
    held("/usr/bin/conmon", "nginx: master process")
    assert [one["pid"] for one in cp.strangers(30000, "127.0.0.1", [], "podman", "sglang")] == [71]
    assert cp.strangers(30000, "127.0.0.1", [71], "podman", "sglang") == []


def test_a_running_container_that_publishes_its_port_is_no_reason_not_to_restart_it(engine, held):
    held("/usr/bin/docker-proxy -host-port 30000")
    params = {"manager": "podman", "name": "sglang", "port": 30000, "host": "127.0.0.1", "state_dir": "/nowhere"}
    module = types.SimpleNamespace(params={**params, "stop_timeout": 7, "container_command": None})
    assert service_worker.Worker(module).holders() == []


def test_no_such_container_and_no_such_engine(engine):
    assert cq.query("podman", "other")["state"] == "absent"
    assert cq.inspect("no-engine-of-that-name", "sglang") is None


# -- after a reboot ---------------------------------------------------------------------------------------


def test_a_container_that_was_stopped_for_its_capture_is_known_after_a_reboot(monkeypatch, tmp_path):
    """What lay under /run is gone, and the container, which cannot be asked, waits to be started."""
    place = {"package": "/sgl/sglang", "release": "0.5.9", "image": PODMAN["Image"]}
    facts = dict(PODMAN, State={"Status": "exited", "Pid": 0, "ExitCode": 0})
    copied = []
    monkeypatch.setattr(layer, "RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(cq, "inspect", lambda _engine, name: facts if name == "sglang" else None)
    monkeypatch.setattr(
        cq,
        "copy_out",
        lambda _engine, _name, inside, outside: (os.makedirs(os.path.dirname(outside), exist_ok=True), copied.append(inside)),
    )
    located = {"manager": "podman", "service": "sglang", "pid": None}
    params = {"name": "sglang", "state": "recorded", "state_dir": str(tmp_path / "state"), "python": None, "model": None}
    monkeypatch.setattr(layer, "make_record", lambda *_args: {"argv": ARGV, "manager": "podman", "service": "sglang"})
    serving = {"pid": 7, "environment": {}, "state": "running"}
    stopped = {"pid": None, "environment": None, "state": "stopped"}
    monkeypatch.setattr(found_server.found, "service_of", lambda *_args: serving)
    Path(layer.place_file("sglang")).parent.mkdir(parents=True)
    pr.write(layer.place_file("sglang"), place)
    made, _changed = found_server.record(params, located, check_mode=False)
    assert made["place"] == place

    Path(layer.place_file("sglang")).unlink()
    found = server_place.found_place(located, stopped, params)
    assert (found["package"], found["release"], found["arguments"]) == ("/sgl/sglang", "0.5.9", ARGV[1:])
    assert copied[0] == "/sgl/sglang/srt/models/deepseek_v2.py" and pr.read(layer.place_file("sglang")) == place
    # Of another image, nothing is known.
    facts["Image"] = "cccc"
    with pytest.raises(service_query.ServiceError, match="does not run"):
        server_place.found_place(located, stopped, params)
