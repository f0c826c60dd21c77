# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server in a container of podman or docker: what it is doing, and how its capture container is run.

PRIVATE to the collection. The operator's container is stopped and kept as it is. Capture is a second container of the same image,
with the options of the first, its own arguments, and the patched file, the capture runtime and the dump directory mounted.
"""

from __future__ import annotations

import json
import os
import re

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils.host_command import NoCommand, ServiceError, run
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import server_below

ENGINES = ("podman", "docker")


class NoRight(ServiceError):
    """The connecting user may not ask the engine."""


_ID = re.compile(r"(?:^|/)(?:libpod|docker)[-/]([0-9a-f]{64})(?:\.scope)?(?:/container)?$")
_STATES = {
    "running": "running",
    "restarting": "starting",
    "paused": "stopping",
    "stopping": "stopping",
    "removing": "stopping",
    "dead": "failed",
}
# Label: who runs such a container. Stopping one by hand is undone by its owner, or breaks what that owner knows of it.
_OWNERS = (
    ("com.docker.compose.project", "compose project", "docker compose stop it, and serve with docker run or a systemd unit"),
    ("io.podman.compose.project", "compose project", "podman-compose stop it, and serve with podman run or a systemd unit"),
    ("io.kubernetes.pod.name", "Kubernetes pod", "run the capture on a host that Kubernetes does not manage"),
    ("com.docker.swarm.service.name", "swarm service", "scale it down, and serve with docker run"),
    ("PODMAN_SYSTEMD_UNIT", "systemd unit", "stop that unit, and serve with podman run"),
)


def capture_name(name):
    """The name of the container that captures in the place of the operator's."""
    return name + "-hsb-capture"


def inspect(engine, reference):
    """What an engine knows of a container; None for no such container, and where there is no such engine.

    Raises ServiceError where it does not answer, NoRight where it does not answer this user.
    """
    try:
        code, out, err = run([engine, "container", "inspect", reference])
    except NoCommand:
        return None
    if code == 0:
        return json.loads(out)[0]
    if "no such" in err.lower() or "no container" in err.lower():
        return None
    # docker as a client without a daemon.
    if "cannot connect" in err.lower() or "connection refused" in err.lower():
        return None
    kind = NoRight if "permission denied" in err.lower() else ServiceError
    raise kind("%s container inspect %s: %s" % (engine, reference, err.strip()[-300:]))


def container_of(pid):
    """The ``manager`` and ``service`` of the container that a process runs in; None for none.

    Raises ServiceError for a container that belongs to something that would not let it stop: compose, Kubernetes, and the like.
    """
    # A host that is a container itself has its own id in every path.
    own = {match.group(1) for match in map(_ID.search, _whole(1)) if match}
    for path in hp.cgroups(pid):
        if "kubepods" in path and not any("kubepods" in one for one in _whole(1)):
            raise ServiceError("process %d is in a Kubernetes pod: run the capture on a host that Kubernetes does not manage" % pid)
        match = _ID.search(path)
        if not match or match.group(1) in own:
            continue
        for engine in ENGINES:
            facts = inspect(engine, match.group(1))
            if facts:
                refuse(engine, facts)
                return {"manager": engine, "service": operators_name(facts)}
    return None


def _whole(pid):
    """Control group paths with everything cut off that comes after a container's id."""
    return [re.sub(r"([0-9a-f]{64}(?:\.scope)?)/.*$", r"\1", path) for path in hp.cgroups(pid)]


def operators_name(facts):
    """The name of the operator's container, also where the one at hand is its capture container."""
    name = facts["Name"].lstrip("/")
    suffix = capture_name("")
    return name[: -len(suffix)] if name.endswith(suffix) else name


def refuse(engine, facts):
    """Raise ServiceError for a container that cannot be stopped and kept."""
    name, labels = facts["Name"].lstrip("/"), facts.get("Config", {}).get("Labels") or {}
    for label, what, remedy in _OWNERS:
        if labels.get(label):
            raise ServiceError("container %s belongs to the %s %s: %s" % (name, what, labels[label], remedy))
    if (facts.get("HostConfig") or {}).get("AutoRemove"):
        raise ServiceError("container %s is removed when it stops (--rm), so it could not come back: run it without --rm" % name)


def query(engine, name):
    """What a server's containers are doing, as of service_query.query; the capture container counts while it is there and runs."""
    original, capture = inspect(engine, name), inspect(engine, capture_name(name))
    facts = capture if capture and capture["State"].get("Status") == "running" else original
    state = facts["State"] if facts else {}
    status = state.get("Status", "")
    main = state.get("Pid") or None
    pid = (server_below(main) or main) if main else None
    seen = hp.process(pid) if pid else None
    failed = status == "exited" and state.get("ExitCode") not in (0, 143, 137)
    return {
        "manager": engine,
        "name": name,
        "state": "absent" if not facts else "failed" if failed else _STATES.get(status, "stopped"),
        "pid": pid if seen else None,
        "since": seen["since"] if seen else None,
        "argv": seen["argv"] if seen else [],
        "environment": seen["environment"] if seen else None,
        "processes": hp.family_of(main) if main else [],
        "detail": "exit status %d" % state["ExitCode"] if failed else "",
        "main": main,
    }


def log_tail(engine, name, lines):
    """Last lines of the container that ran last, as far as the engine keeps them."""
    for one in (capture_name(name), name):
        try:
            code, out, err = run([engine, "logs", "--tail", str(lines), one])
        except ServiceError:
            return []
        if code == 0:
            return (out + err).splitlines()[-lines:]
    return []


# -- the capture container ------------------------------------------------------------------------------

_VARIABLES_OF_ENGINE = ("HOSTNAME", "container")


def _pairs(option, values):
    return [word for value in values or [] for word in (option, str(value))]


def _ports(bindings):
    words = []
    for inside in sorted(bindings or {}):
        for binding in bindings[inside] or []:
            host = binding.get("HostIp") or ""
            words += ["--publish", "%s%s:%s" % (host + ":" if host else "", binding.get("HostPort") or "", inside)]
    return words


def _tmpfs_options(facts, mount):
    """The options of a ``--mount type=tmpfs``, as ``--tmpfs`` takes them."""
    asked = [one for one in (facts.get("HostConfig") or {}).get("Mounts") or [] if one.get("Target") == mount["Destination"]]
    given = (asked[0].get("TmpfsOptions") or {}) if asked else {}
    words = ["size=%d" % given["SizeBytes"]] if given.get("SizeBytes") else []
    words += ["mode=%o" % given["Mode"]] if given.get("Mode") else []
    words += [] if mount.get("RW", True) else ["ro"]
    return ":" + ",".join(words) if words else ""


def _mounts(facts):
    words, tmpfs = [], (facts.get("HostConfig") or {}).get("Tmpfs") or {}
    for mount in facts.get("Mounts") or []:
        if mount.get("Type") == "tmpfs":
            words += [] if mount["Destination"] in tmpfs else ["--tmpfs", mount["Destination"] + _tmpfs_options(facts, mount)]
            continue
        source = mount.get("Name") if mount.get("Type") == "volume" else mount.get("Source")
        words += ["--volume", "%s:%s%s" % (source, mount["Destination"], "" if mount.get("RW", True) else ":ro")]
    return words + [word for path, options in sorted(tmpfs.items()) for word in ("--tmpfs", path + (":" + options if options else ""))]


def _devices(facts):
    """GPUs and other devices. podman keeps devices of CDI only in the command that made the container."""
    words, host = [], facts.get("HostConfig") or {}
    for request in host.get("DeviceRequests") or []:
        if request.get("Driver") == "cdi":
            words += _pairs("--device", request.get("DeviceIDs"))
        elif request.get("DeviceIDs"):
            words += ["--gpus", '"device=%s"' % ",".join(request["DeviceIDs"])]
        elif any("gpu" in group for group in request.get("Capabilities") or []):
            words += ["--gpus", "all" if request.get("Count", -1) < 0 else str(request["Count"])]
    config = facts.get("Config") or {}
    made, command = config.get("CreateCommand") or [], config.get("Cmd") or []
    if command and made[-len(command) :] == command:
        # What comes after the image is the server's: SGLang has a --device too.
        made = made[: -len(command)]
    asked = []
    for index, word in enumerate(made):
        option, equals, value = word.partition("=")
        if option in ("--device", "--gpus"):
            asked += [option, value if equals else made[index + 1]]
    if asked:
        return words + asked
    for device in host.get("Devices") or []:
        words += ["--device", "%s:%s" % (device["PathOnHost"], device["PathInContainer"])]
    return words


def _limits(host):
    words = []
    for limit in host.get("Ulimits") or []:
        name = limit["Name"].lower().replace("rlimit_", "")
        words += ["--ulimit", "%s=%d:%d" % (name, limit["Soft"], limit["Hard"])]
    for option, key in (("--shm-size", "ShmSize"), ("--memory", "Memory")):
        if host.get(key):
            words += [option, str(host[key])]
    if host.get("CpusetCpus"):
        words += ["--cpuset-cpus", host["CpusetCpus"]]
    return words


def capture_command(engine, facts, argv, environment_file, mounts):
    """The command that runs the capture container.

    ``facts`` is what ``inspect`` gives of the operator's container, ``argv`` the whole command of the server, ``mounts`` are
    (path on the host, path in the container, whether read-only).
    """
    host, config = facts.get("HostConfig") or {}, facts.get("Config") or {}
    name = operators_name(facts)
    words = [engine, "run", "--detach", "--name", capture_name(name), "--restart", "no", "--env-file", environment_file]
    network = host.get("NetworkMode") or ""
    if network and network != "default":
        words += ["--network", network]
    if not network.startswith(("host", "container:")):
        words += _ports(host.get("PortBindings")) + (["--hostname", config["Hostname"]] if config.get("Hostname") else [])
        words += _pairs("--add-host", host.get("ExtraHosts"))
    # With the host's or another container's IPC there is no /dev/shm of its own to size.
    ipc = host.get("IpcMode") or ""
    if ipc.startswith(("host", "container:")):
        words += ["--ipc", ipc]
        host = dict(host, ShmSize=0)
    if host.get("PidMode"):
        words += [] if host["PidMode"] == "private" else ["--pid", host["PidMode"]]
    if host.get("Privileged"):
        words.append("--privileged")
    else:
        words += _pairs("--cap-add", host.get("CapAdd")) + _pairs("--cap-drop", host.get("CapDrop"))
    words += _pairs("--security-opt", host.get("SecurityOpt")) + _pairs("--group-add", host.get("GroupAdd"))
    if host.get("Runtime") and engine == "docker":
        words += ["--runtime", host["Runtime"]]
    if host.get("ReadonlyRootfs"):
        words.append("--read-only")
    if host.get("Init"):
        words.append("--init")
    words += _limits(host) + _devices(facts) + _mounts(facts)
    for outside, inside, read_only in mounts:
        words += ["--volume", "%s:%s%s" % (outside, inside, ":ro" if read_only else "")]
    if config.get("User"):
        words += ["--user", config["User"]]
    if config.get("WorkingDir"):
        words += ["--workdir", config["WorkingDir"]]
    return words + ["--entrypoint", argv[0], facts["Image"]] + list(argv[1:])


def environment_text(environment):
    """A container engine's file of variables; ServiceError for a value that such a file cannot hold."""
    lines = []
    for key in sorted(environment):
        if key in _VARIABLES_OF_ENGINE:
            continue
        if "\n" in environment[key]:
            raise ServiceError("the variable %s of the container holds a line break, which no --env-file can carry" % key)
        lines.append("%s=%s\n" % (key, environment[key]))
    return "".join(lines)


def outside_path(facts, path):
    """Where a path of a container lies on the host, by its mounts; None where it is in the image, or in memory."""
    for mount in sorted(facts.get("Mounts") or [], key=lambda mount: -len(mount["Destination"])):
        inside = mount["Destination"].rstrip("/")
        if path == inside or path.startswith(inside + "/"):
            return None if mount.get("Type") == "tmpfs" else mount["Source"] + path[len(inside) :]
    return None


def copy_out(engine, name, inside, outside):
    """Copy one file out of a container, running or not."""
    os.makedirs(os.path.dirname(outside), mode=0o700, exist_ok=True)
    code, _out, err = run([engine, "cp", "%s:%s" % (name, inside), outside], timeout=120)
    if code != 0:
        raise ServiceError("%s cp %s:%s: %s" % (engine, name, inside, err.strip()[-300:]))
