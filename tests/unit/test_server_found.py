# SPDX-License-Identifier: GPL-3.0-or-later
"""Who runs the server of a host, and what is laid over a unit of the operator's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_place
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import is_server, server_on
from ansible_collections.hidden_state.bridge.plugins.modules import found_server

STAND_IN = Path(__file__).parents[1] / "stand_in"


@pytest.mark.parametrize(
    "argv, is_one",
    [
        (["python3", "-m", "sglang.launch_server", "--port", "1"], True),
        (["/venv/bin/python", "/venv/bin/sglang", "serve", "--model-path", "/m"], True),
        (["python", "/src/sglang/launch_server.py"], True),
        (["sglang::scheduler_TP0"], False),
        (["bash", "-c", "python3 -m sglang.launch_server"], False),
        (["vim", "sglang.py"], False),
        ([], False),
    ],
)
def test_a_command_line_of_a_server(argv, is_one):
    assert is_server(argv) is is_one


@pytest.fixture
def stand_in(tmp_path):
    """A stand-in server under a wrapper script: (the port, the wrapper's process)."""
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = f"'{sys.executable}' -m sglang.launch_server --model-path '{tmp_path}' --port {port}; true"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STAND_IN)}
    with subprocess.Popen(["sh", "-c", script], env=environment, start_new_session=True) as wrapper:
        deadline = time.monotonic() + 30
        while not hp.port_holders(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield port, wrapper
        with contextlib.suppress(ProcessLookupError):
            os.killpg(wrapper.pid, 9)


def test_the_server_on_a_port_is_found(stand_in):
    port, wrapper = stand_in
    pid = server_on(port)
    assert hp.parent(pid) == wrapper.pid and is_server(hp.process(pid)["argv"])


def params(tmp_path, port, **more):
    return {"manager": "auto", "name": "sglang", "host": "127.0.0.1", "port": port, "state_dir": str(tmp_path / "state"), **more}


def groups(monkeypatch, *paths):
    monkeypatch.setattr(hp, "cgroups", lambda pid: list(paths) if pid != 1 else ["/init.scope"])


def no_more_of_the_unit(monkeypatch):
    """A systemd that answers and knows nothing but the unit's name."""
    monkeypatch.setattr(found.sq, "run", lambda _argv, **_more: (0, "", ""))


def record(tmp_path, **content):
    path = Path(found.record_path(str(tmp_path / "state"), "sglang"))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content))


def test_a_server_in_a_unit_of_the_operators(stand_in, monkeypatch, tmp_path):
    groups(monkeypatch, "/system.slice/operators.service")
    no_more_of_the_unit(monkeypatch)
    located = found.locate(params(tmp_path, stand_in[0]))
    assert (located["manager"], located["service"], located["recorded"]) == ("unit", "operators", False)


def main_of_the_unit(monkeypatch, pid):
    monkeypatch.setattr(found.sq, "run", lambda argv, **_more: (0, "%d\n" % pid if "--property=MainPID" in argv else "", ""))


def test_a_server_that_a_unit_did_not_start_is_not_the_units(stand_in, monkeypatch, tmp_path, child):
    """As what was left running in a session of an agent that gives shells: a stop of its unit would end all of its sessions."""
    groups(monkeypatch, "/system.slice/agent.service")
    with subprocess.Popen(["sh", "-c", "sleep 30; true"], start_new_session=True) as script:
        for main, manager in ((stand_in[1], "unit"), (script, "unit"), (child, "process")):
            main_of_the_unit(monkeypatch, main.pid)
            assert found.locate(params(tmp_path, stand_in[0]))["manager"] == manager
        os.killpg(script.pid, 9)


@pytest.mark.parametrize(
    "shell, manager",
    [
        (["sh"], "process"),
        (["bash", "-l"], "process"),
        (["bash", "--init-file", "/dev/null", "-i"], "process"),
        (["bash", "/dev/stdin"], "unit"),
        (["sh", "-c", ". /dev/stdin"], "unit"),
    ],
)
def test_a_server_that_was_typed_in_a_shell_of_a_unit_is_not_the_units(monkeypatch, shell, manager):
    line = "exec 3>&1; sleep 30 & echo $! >&3; wait\n"
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as typed:
        try:
            typed.stdin.write(line)
            typed.stdin.flush()
            server = int(typed.stdout.readline())
            groups(monkeypatch, "/system.slice/agent.service")
            main_of_the_unit(monkeypatch, os.getpid())
            assert found._owner(server)["manager"] == manager
        finally:
            os.killpg(typed.pid, 9)


@pytest.mark.parametrize("path", ["/run/systemd/transient/operators.service", "/nowhere/operators.service"])
def test_a_unit_that_could_not_come_back_after_a_stop_is_refused(stand_in, monkeypatch, tmp_path, path):
    groups(monkeypatch, "/system.slice/operators.service")
    monkeypatch.setattr(found.sq, "run", lambda argv, **_more: (0, "%s\n" % path if "--property=FragmentPath" in argv else "", ""))
    for manager in ("auto", "unit"):
        with pytest.raises(found.sq.ServiceError, match="operators.service, which runs the server, .* could not come back"):
            found.locate(params(tmp_path, stand_in[0], manager=manager))


@pytest.mark.parametrize(
    "path", ["/user.slice/user-0.slice/session-3.scope", "/system.slice/ssh.service", "/user.slice/user@1000.service/app.slice", "/"]
)
def test_a_server_that_was_started_by_hand(stand_in, monkeypatch, tmp_path, path):
    groups(monkeypatch, path)
    located = found.locate(params(tmp_path, stand_in[0]))
    assert (located["manager"], located["pid"]) == ("process", server_on(stand_in[0]))
    service = found.service_of(located, params(tmp_path, stand_in[0]))
    assert (service["manager"], service["state"], len(service["processes"])) == ("process", "running", 2)


def test_the_server_below_a_wrapper_of_a_unit_is_the_one_that_counts(stand_in, monkeypatch, tmp_path):
    port, wrapper = stand_in
    main = dict(hp.process(wrapper.pid), manager="systemd", name="operators", state="running", pid=wrapper.pid, detail="", processes=[])
    monkeypatch.setattr(found.sq, "query", lambda *_args: main)
    service = found.service_of({"manager": "unit", "service": "operators", "pid": None}, params(tmp_path, port))
    assert service["pid"] == server_on(port) and is_server(service["argv"])


def test_what_is_said_counts(stand_in, monkeypatch, tmp_path):
    assert found.locate(params(tmp_path, stand_in[0], manager="supervisor"))["manager"] == "supervisor"
    assert found.locate(params(tmp_path, stand_in[0], manager="unit", name="other"))["service"] == "other"
    groups(monkeypatch, "/system.slice/operators.service")
    no_more_of_the_unit(monkeypatch)
    located = found.locate(params(tmp_path, stand_in[0], manager="unit", name="other"))
    assert (located["service"], located["pid"]) == ("operators", server_on(stand_in[0]))


def test_a_stopped_server_is_known_by_its_record(monkeypatch, tmp_path, stand_in):
    record(tmp_path, manager="unit", service="operators")
    located = found.locate(params(tmp_path, 1))
    assert (located["manager"], located["service"], located["recorded"]) == ("unit", "operators", True)
    # Another server by now: the record is of no use.
    groups(monkeypatch, "/user.slice/session-1.scope")
    assert found.locate(params(tmp_path, stand_in[0]))["manager"] == "process"


def test_a_server_that_was_started_by_hand_and_does_not_listen_yet(monkeypatch, tmp_path, stand_in):
    """A wrapper has just started it again: it counts, or a second one would be started beside it."""
    pid = server_on(stand_in[0])
    record(tmp_path, manager="process", service="", argv=hp.process(pid)["argv"])
    groups(monkeypatch, "/user.slice/session-1.scope")
    monkeypatch.setattr(found, "server_on", lambda *_args: None)
    for manager in ("auto", "process"):
        located = found.locate(params(tmp_path, stand_in[0], manager=manager))
        assert (located["manager"], located["pid"]) == ("process", pid)


def test_a_loop_around_a_script_that_starts_the_server_again_is_named(tmp_path):
    script = tmp_path / "start"
    # Neither word is of another process of this machine.
    script.write_text(f"sleep 10{os.getpid()}; true\n")
    with subprocess.Popen(["sh", "-c", f"while :; do sh {script}; sleep 0.3; done"], start_new_session=True) as loop:
        try:
            deadline = time.monotonic() + 30
            while not hp.same_command(["sleep", f"10{os.getpid()}"]) and time.monotonic() < deadline:
                time.sleep(0.1)
            (server,) = hp.same_command(["sleep", f"10{os.getpid()}"])
            said = found_server.stop({"stop_timeout": 5, "revive_seconds": 60, "port": 0, "host": ""}, server, False)
        finally:
            os.killpg(loop.pid, 9)
    assert f"process {loop.pid} started the server again" in said and "while :; do" in said


def test_a_worker_that_ends_while_it_is_told_to_ends_no_stop(monkeypatch, child):
    with subprocess.Popen(["true"]) as short:
        gone = (short.pid, 1)
    # Of the wait and of what is told to those that it leaves.
    looks = [[gone], [gone], [hp.identity(child.pid)]]
    # Its end takes a moment.
    monkeypatch.setattr(hp, "living", lambda _members: looks.pop() if looks else child.wait() and [])
    assert found_server.stop({"stop_timeout": -1, "revive_seconds": 1, "port": 0, "host": ""}, child.pid, False) == ""
    assert looks == []


def test_nothing_is_there(tmp_path):
    located = found.locate(params(tmp_path, 1))
    assert located["manager"] in found.OURS and located["pid"] is None


def test_an_engine_that_may_not_be_asked_stands_in_the_way_of_its_containers_alone(monkeypatch, tmp_path):
    said = "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock"
    monkeypatch.setattr(found.cq, "run", lambda argv, **_more: (1, "", said if argv[0] == "docker" else "no such container"))
    located = found.locate(params(tmp_path, 1))
    assert located["manager"] in found.OURS
    with pytest.raises(found.sq.ServiceError, match="permission denied"):
        found.service_of({"manager": "docker", "service": "sglang"}, params(tmp_path, 1))


# -- layers -------------------------------------------------------------------------------------------

RECORD = {
    "manager": "unit",
    "service": "operators",
    "argv": ["python3", "-m", "sglang.launch_server", "--model-path", '/m %i $x "q"', "--enable-mixed-chunk"],
    "executable": "/opt/bin/python3",
    "environment": {"A": "1", "FROM_SCRIPT": "y", "INVOCATION_ID": "abc", "NOTIFY_SOCKET": "/run/systemd/notify"},
    "directory": "/srv/100% sglang",
    "user": {"uid": 1234, "gid": 1235, "groups": [44, 1235]},
    "umask": 0o027,
    "limits": {"RLIMIT_NOFILE": [65535, 1048576], "RLIMIT_MEMLOCK": [-1, -1]},
    "nice": -5,
    "affinity": [0, 1, 8],
    "removed": ["GONE"],
    "switched": False,
}


def test_the_layer_of_a_unit():
    argv = layer.capture_argv(RECORD, ["--disable-radix-cache"])
    assert argv[-2:] == ['/m %i $x "q"', "--disable-radix-cache"]
    files = layer.unit_layer(RECORD, argv, {"SGLANG_HS_DUMP_DIR": "/dumps"}, "tag")
    dropin, variables = layer.unit_files("operators")
    assert dropin == "/run/systemd/system/operators.service.d/50-hidden-state-bridge.conf"
    lines = files[dropin].splitlines()
    assert lines[-2:] == [
        "ExecStart=",
        'ExecStart="/opt/bin/python3" "-m" "sglang.launch_server" "--model-path" "/m %%i $$x \\"q\\"" "--disable-radix-cache"',
    ]
    assert {
        "[Service]",
        "Type=exec",
        "RemainAfterExit=no",
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "UnsetEnvironment=GONE",
        "EnvironmentFile=" + variables,
    } <= set(lines)
    # All of the process's variables but those that systemd gives to each start: which ones a script set is not to be seen once it is gone.
    assert files[variables] == 'A="1"\nFROM_SCRIPT="y"\nHIDDEN_STATE_BRIDGE_SERVICE="tag"\nSGLANG_HS_DUMP_DIR="/dumps"\n'


def test_what_a_capture_could_not_start_with_is_refused_while_the_server_serves(tmp_path, monkeypatch):
    record = dict(RECORD, directory=str(tmp_path), switched=True)
    layer.check_there(record)
    layer.check_there({key: RECORD[key] for key in ("service", "argv", "executable")})
    with pytest.raises(pr.RecordError, match="/gone, is not there.*restart the server"):
        layer.check_there(dict(record, directory=f"{tmp_path}/gone"))
    monkeypatch.setattr(layer, "SETPRIV", f"{tmp_path}/setpriv")
    with pytest.raises(pr.RecordError, match="install util-linux, or set User="):
        layer.check_there(record)


def test_what_a_script_did_before_it_started_the_server_holds_in_capture_too():
    dropin = layer.unit_files("operators")[0]
    lines = layer.unit_layer(RECORD, RECORD["argv"], {}, "tag")[dropin].splitlines()
    assert {
        "WorkingDirectory=/srv/100%% sglang",
        "UMask=0027",
        "Nice=-5",
        "LimitNOFILE=65535:1048576",
        "LimitMEMLOCK=infinity:infinity",
        "CPUAffinity=0 1 8",
    } <= set(lines)
    assert not any(line.startswith(("User=", "Group=")) for line in lines)
    for groups, option in (([44, 1235], "--groups=44,1235"), ([], "--clear-groups")):
        record = dict(RECORD, switched=True, user=dict(RECORD["user"], groups=groups))
        line = layer.unit_layer(record, RECORD["argv"], {}, "tag")[dropin].splitlines()[-1]
        assert line.startswith(f'ExecStart="!/usr/bin/setpriv" "--reuid=1234" "--regid=1235" "{option}" "--" "/opt/bin/python3" "-m"')
    # Of a unit that does not run, only what its file says is known.
    bare = {key: RECORD[key] for key in ("service", "argv", "executable")}
    assert "UMask" not in layer.unit_layer(dict(bare, environment={}), RECORD["argv"], {}, "tag")[dropin]


@pytest.mark.parametrize(
    "user, group, dynamic, switched",
    [("", "", "no", False), ("root", "", "no", False), ("0", "root", "no", False), ("nobody", "", "no", True), ("x", "", "yes", False)],
)
def test_a_user_that_a_script_changed_to_is_told_from_the_units_own(monkeypatch, user, group, dynamic, switched):
    text = "MainPID=0\nUser=%s\nGroup=%s\nDynamicUser=%s\n" % (user, group, dynamic)
    monkeypatch.setattr(layer.sq, "run", lambda argv, **_more: (1, "", "") if argv[0] == "busctl" else (0, text, ""))
    process = {"argv": RECORD["argv"], "environment": {}, "user": {"uid": 0, "gid": 0, "groups": []}}
    monkeypatch.setattr(pr, "record", lambda *_args, **_more: process)
    assert layer.make_record({"manager": "unit", "service": "x"}, {"pid": 1, "argv": RECORD["argv"]})["switched"] is switched


@pytest.mark.parametrize("start, plain", [(RECORD["argv"], True), (["/opt/serve.sh"], False)])
def test_a_unit_that_starts_the_server_itself_keeps_its_own_settings(monkeypatch, start, plain):
    commands = json.dumps({"data": [[start[0], start, False, 0, 0, 0, 0, 0, 0, 0]]})
    monkeypatch.setattr(layer.sq, "run", lambda argv, **_more: (0, commands if argv[0] == "busctl" else "", ""))
    monkeypatch.setattr(pr, "record", lambda *_args, **_more: dict(RECORD))
    record = layer.make_record({"manager": "unit", "service": "operators"}, {"pid": 1, "argv": RECORD["argv"]})
    text = layer.unit_layer(record, RECORD["argv"], {}, "tag")[layer.unit_files("operators")[0]]
    assert ("WorkingDirectory" not in text and "LimitNOFILE" not in text) is plain


def test_what_is_laid_is_private_and_taken_away(tmp_path):
    path = str(tmp_path / "a" / "b")
    assert layer.lay_files({path: "x"}, check_mode=True) and not os.path.exists(path)
    assert layer.lay_files({path: "x"}) and not layer.lay_files({path: "x"})
    assert layer.lay_files({path: "y"}, check_mode=True) and not layer.lay_files({path: "x"}, check_mode=True)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert layer.take_files([path]) and not layer.take_files([path])


def test_interpreter_and_model_of_a_record():
    assert layer.python_of(RECORD) == "/opt/bin/python3"
    assert layer.model_of(RECORD) == '/m %i $x "q"'
    assert layer.python_of(dict(RECORD, executable="/usr/bin/env")) == ""


def test_a_unit_that_does_not_run_is_asked_of_the_bus(monkeypatch):
    words = ["/opt/bin/python3", "-m", "sglang.launch_server", "--model-path", "/a b"]

    def answer(argv, **_more):
        text = {"data": [["/opt/bin/python3", words, False, 0, 0, 0, 0, 0, 0, 0]]}
        return (0, json.dumps(text) if argv[0] == "busctl" else "alice\n", "")

    monkeypatch.setattr(layer.sq, "run", answer)
    made = layer.make_record({"manager": "unit", "service": "my-sglang@1"}, {"pid": None})
    assert (made["argv"], made["user"], made["service"]) == (words, {"name": "alice"}, "my-sglang@1")
    words[:] = ["/usr/local/bin/start"]
    with pytest.raises(pr.RecordError, match="start it, then run again"):
        layer.make_record({"manager": "unit", "service": "x"}, {"pid": None})


@pytest.mark.parametrize("unit, label", [("1sglang.service", "_31sglang_2eservice"), ("a1-b@2.service", "a1_2db_402_2eservice")])
def test_the_name_of_a_unit_on_the_bus(unit, label):
    assert layer._bus_label(unit) == label


def test_a_script_that_has_not_started_the_server_yet_is_not_recorded_for_it(monkeypatch, tmp_path, child):
    located, argv = {"manager": "unit", "service": "operators", "pid": None}, ["/bin/sh", "/opt/serve.sh"]
    service = {"pid": child.pid, "argv": argv, "environment": {}}
    with pytest.raises(pr.RecordError, match="operators runs, but has not started the SGLang server yet .process %d" % child.pid):
        layer.make_record(located, service)
    # A way back goes by what is recorded.
    record(tmp_path, **RECORD)
    monkeypatch.setattr(found, "service_of", lambda *_args: service)
    asked = {"name": "sglang", "state_dir": str(tmp_path / "state"), "model": None, "python": None}
    assert found_server.record(dict(asked, state="serving"), located, False) == (RECORD, False)
    with pytest.raises(pr.RecordError, match="has not started the SGLang server yet"):
        found_server.record(dict(asked, state="capture"), located, False)
    monkeypatch.setattr(server_place.sr, "installation", lambda *_args: {"release": "0.5.20"})
    assert server_place.found_place(located, service, asked)["arguments"] == RECORD["argv"][1:]


def test_nothing_runs_and_nothing_is_recorded():
    with pytest.raises(pr.RecordError, match="none was recorded"):
        layer.make_record({"manager": "process", "service": ""}, {"pid": None})
