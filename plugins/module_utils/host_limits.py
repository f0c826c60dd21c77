# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host allows a running server: its user's files in /dev/shm, and the memory of its control group.

PRIVATE to the collection.
"""

from __future__ import annotations

import os
import pwd
import re

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils.host_command import ServiceError, run

_LOGIND = ["busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "RemoveIPC"]
LINGER = "/var/lib/systemd/linger"
LOGIN_DEFS = "/etc/login.defs"
# Larger numbers stand for no limit.
NO_LIMIT = 1 << 60


def user_of(pid):
    """``uid``, ``gid``, ``name`` of a process, and ``ipc_at_risk``: why its files in /dev/shm can vanish, "" where they cannot."""
    try:
        about = os.stat("/proc/%d" % pid)
    except OSError:
        return {"uid": None, "gid": None, "name": "", "ipc_at_risk": ""}
    try:
        name = pwd.getpwuid(about.st_uid).pw_name
    except KeyError:
        name = str(about.st_uid)
    return {"uid": about.st_uid, "gid": about.st_gid, "name": name, "ipc_at_risk": ipc_risk(about.st_uid, name)}


def user_named(name):
    """The same for the user that a server is to run as."""
    try:
        about = pwd.getpwnam(name)
    except KeyError:
        return {"uid": None, "gid": None, "name": name, "ipc_at_risk": ""}
    return {"uid": about.pw_uid, "gid": about.pw_gid, "name": name, "ipc_at_risk": ipc_risk(about.pw_uid, name)}


def _last_system_uid():
    try:
        with open(LOGIN_DEFS, encoding="utf-8", errors="replace") as stream:
            match = re.search(r"^\s*SYS_UID_MAX\s+(\d+)", stream.read(), re.MULTILINE)
    except OSError:
        match = None
    return int(match.group(1)) if match else 999


def ipc_risk(uid, name):
    """Why systemd-logind removes this user's files from /dev/shm at a logout; "" where it does not."""
    if uid <= _last_system_uid() or os.path.exists(os.path.join(LINGER, name)):
        return ""
    try:
        code, out, _err = run(_LOGIND)
    except ServiceError:
        return ""
    if code != 0 or out.split() != ["b", "true"]:
        return ""
    return "RemoveIPC is on, and %s is no system user and does not linger: at the logout of %s its files in /dev/shm vanish" % (name, name)


def _number(path):
    try:
        with open(path, encoding="ascii") as stream:
            return int(stream.read())
    except (OSError, ValueError):
        return None


def _kept(path, names):
    """Bytes of a memory.stat that cannot be given back, as the pages of a file can."""
    try:
        with open(path, encoding="ascii") as stream:
            rows = dict(line.split() for line in stream)
    except (OSError, ValueError):
        return 0
    return sum(int(rows.get(name, 0)) for name in names)


def memory_of(pid, root="/sys/fs/cgroup"):
    """``limit`` and ``used`` (bytes) of the tightest control group that a process is in; None where there is no limit.

    The pages of /dev/shm count against the group of the process that writes them.
    """
    tightest = None
    for path in hp.cgroups(pid):
        while True:
            for base, limit_name, names in (
                (root, "memory.max", ("anon", "shmem")),
                (root + "/memory", "memory.limit_in_bytes", ("total_rss", "total_shmem")),
            ):
                group = os.path.join(base, path.lstrip("/"))
                limit = _number(os.path.join(group, limit_name))
                if limit is not None and limit < NO_LIMIT and (tightest is None or limit < tightest["limit"]):
                    tightest = {"limit": limit, "used": _kept(os.path.join(group, "memory.stat"), names)}
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return tightest
