# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All that a process was started with, so that an equal one can be started again.

PRIVATE to the collection. A record holds secrets (arguments and environment): it stays on the host, in files of mode 0600.
roles/_service/files/launch.py starts a process from the part of a record that ``launch_of`` gives.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp

# As /proc/PID/limits names them.
_LIMITS = {
    "Max cpu time": "RLIMIT_CPU",
    "Max file size": "RLIMIT_FSIZE",
    "Max data size": "RLIMIT_DATA",
    "Max stack size": "RLIMIT_STACK",
    "Max core file size": "RLIMIT_CORE",
    "Max resident set": "RLIMIT_RSS",
    "Max processes": "RLIMIT_NPROC",
    "Max open files": "RLIMIT_NOFILE",
    "Max locked memory": "RLIMIT_MEMLOCK",
    "Max address space": "RLIMIT_AS",
    "Max file locks": "RLIMIT_LOCKS",
    "Max pending signals": "RLIMIT_SIGPENDING",
    "Max msgqueue size": "RLIMIT_MSGQUEUE",
    "Max nice priority": "RLIMIT_NICE",
    "Max realtime priority": "RLIMIT_RTPRIO",
    "Max realtime timeout": "RLIMIT_RTTIME",
}


class RecordError(Exception):
    """A process cannot be recorded, or a record cannot be read; the message says what to do."""


def _limits(pid):
    limits = {}
    with open("/proc/%d/limits" % pid, encoding="ascii") as stream:
        for line in stream:
            name = _LIMITS.get(line[:26].strip())
            if name and hasattr(resource, name):
                soft, hard = line[26:].split()[:2]
                limits[name] = [-1 if value == "unlimited" else int(value) for value in (soft, hard)]
    return limits


def executable(argv, environment, directory):
    """The program that argv[0] names, as the shell of that process found it; "" where it is not to be found.

    /proc/PID/exe does not do: it leads through the link that makes a virtual environment of an interpreter.
    """
    if "/" in argv[0]:
        path = os.path.normpath(os.path.join(directory, argv[0]))
        return path if os.access(path, os.X_OK) else ""
    return shutil.which(argv[0], path=environment.get("PATH") or os.defpath) or ""


def record(pid, inside=False):
    """All that a living process was started with; ``inside`` a container its program is not looked for.

    ``argv``, ``executable``, ``environment``, ``directory``, ``user`` (``uid``, ``gid``, ``groups``), ``umask``, ``limits``, ``nice``, ``affinity``.
    Raises RecordError where a part of it cannot be read.
    """
    try:
        status = {}
        with open("/proc/%d/status" % pid, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                key, _colon, value = line.partition(":")
                status[key] = value.split()
        seen = hp.process(pid)
        if not seen or seen["environment"] is None or not seen["argv"]:
            raise PermissionError(13, "its arguments and environment cannot be read")
        directory = os.readlink("/proc/%d/cwd" % pid)
        found = {
            "argv": seen["argv"],
            "environment": seen["environment"],
            "directory": directory,
            # The real ids: what the process was started as.
            "user": {"uid": int(status["Uid"][0]), "gid": int(status["Gid"][0]), "groups": [int(one) for one in status["Groups"]]},
            "umask": int(status["Umask"][0], 8) if "Umask" in status else 0o022,
            "limits": _limits(pid),
            "nice": os.getpriority(os.PRIO_PROCESS, pid),
            # The CPUs that numactl or taskset left to it.
            "affinity": sorted(os.sched_getaffinity(pid)),
        }
    except (OSError, KeyError, ValueError) as error:
        raise RecordError("process %d cannot be recorded (%s): run as root, or as its user" % (pid, error)) from error
    found["executable"] = found["argv"][0] if inside else executable(found["argv"], found["environment"], directory)
    if not found["executable"]:
        raise RecordError("process %d was started as %r, which is not to be found on its PATH any more" % (pid, found["argv"][0]))
    return found


def launch_of(found, arguments=None, environment=None):
    """The part of a record that a start needs; with other arguments (all after the program) and more environment."""
    keys = ("argv", "executable", "environment", "directory", "user", "umask", "limits", "nice")
    launch = {key: found[key] for key in keys}
    # A record of an earlier release has none.
    launch["affinity"] = found.get("affinity") or []
    if arguments is not None:
        launch["argv"] = found["argv"][:1] + list(arguments)
    launch["environment"] = dict(found["environment"], **(environment or {}))
    return launch


def differences(seen, launch):
    """In what a running process (``argv``, ``environment`` as of host_processes.process) is not what a launch starts: names only."""
    if seen["environment"] is None:
        return ["its environment cannot be read"]
    lines = []
    if seen["argv"] != launch["argv"]:
        has, wanted = hp.masked(seen["argv"]), hp.masked(launch["argv"])
        more, less = [word for word in wanted if word not in has], [word for word in has if word not in wanted]
        lines.append("runs with other arguments: lacks [%s], has [%s]" % (" ".join(more), " ".join(less)))
    names = sorted(
        name
        for name in set(seen["environment"]) | set(launch["environment"])
        if seen["environment"].get(name) != launch["environment"].get(name)
    )
    if names:
        lines.append("runs with another environment: " + ", ".join(names))
    return lines


def _data(content):
    text = content if isinstance(content, str) else json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
    return text.encode("utf-8", "surrogateescape")


def differs(path, content, mode=0o600, owner=None):
    """Whether ``write`` would change a file."""
    try:
        with open(path, "rb") as stream:
            about = os.fstat(stream.fileno())
            return stream.read() != _data(content) or about.st_mode & 0o777 != mode or owner not in (None, about.st_uid)
    except OSError:
        return True


def write(path, content, mode=0o600, owner=None):
    """Put a file in place at once: JSON of a dictionary, or text. Returns whether it changed."""
    if not differs(path, content, mode, owner):
        return False
    descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(_data(content))
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        if owner is not None:
            os.chown(temporary, owner, -1)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    return True


def read(path):
    """A record or launch file; None where there is none. Raises RecordError naming the file."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
        if not isinstance(content, dict):
            raise ValueError("no object")
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError("%s: cannot be read (%s). Remove it to forget what was recorded" % (path, error)) from error
