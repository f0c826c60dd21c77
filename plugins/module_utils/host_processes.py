# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes and ports of a Linux host, as /proc shows them.

PRIVATE to the collection.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time

from ansible_collections.hidden_state.bridge.plugins.module_utils.sglang_flags import means

_SECRET_OPTIONS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")


def _stat_fields(pid):
    """Fields of /proc/PID/stat from the state on (index 0 is field 3), or None once the process is gone."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            # The command name may hold spaces and brackets: the last bracket ends it.
            return stream.read().rpartition(b")")[2].split()
    except OSError:
        return None


def identity(pid):
    """What tells a process from a later one of the same pid: (pid, start in clock ticks); None once it is gone."""
    fields = _stat_fields(pid)
    return (pid, int(fields[19])) if fields and fields[0] not in (b"Z", b"X") else None


def is_alive(pid):
    """Whether the process exists and is more than a zombie."""
    return identity(pid) is not None


def living(identities):
    """Those of the identities whose process still is the same one."""
    return [one for one in identities if identity(one[0]) == one]


def tell(identities, sign):
    """Send a signal to those of the identities that live. Each of them may end at any moment."""
    for pid, _start in living(identities):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def wait_until_gone(identities, seconds):
    """Whether all of the processes are gone within that time."""
    deadline = time.monotonic() + seconds
    while living(identities):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _read_list(path):
    try:
        with open(path, "rb") as stream:
            data = stream.read()
    except OSError:
        return None
    # Each part ends with a zero byte; an argument may be empty.
    return [os.fsdecode(part) for part in data.split(b"\0")[:-1]] if data.endswith(b"\0") else [os.fsdecode(data)] if data else []


def masked(argv):
    """Arguments with the values of key options blotted out, fit for a report."""
    shown, key_follows = [], False
    for word in argv:
        option, equals, _value = word.partition("=")
        is_key = any(means(option, one) for one in _SECRET_OPTIONS)
        shown.append("********" if key_follows else option + "=********" if equals and is_key else word)
        key_follows = is_key and not equals
    return shown


def masked_line(line):
    """A line of text with the values of key options blotted out."""
    return " ".join(masked(line.split(" ")))


def command_of(pid):
    """The command line of a process as one line for people; its short name where that is all there is."""
    argv = _read_list("/proc/%d/cmdline" % pid)
    if argv:
        return " ".join(" ".join(masked(argv)).split())[:300]
    try:
        with open("/proc/%d/comm" % pid, encoding="utf-8", errors="replace") as stream:
            return "[%s]" % stream.read().strip()
    except OSError:
        return "(gone)"


def process(pid):
    """Arguments, environment and start time (seconds since the epoch) of a process, or None.

    ``environment`` is None where this user may not read it.
    """
    fields = _stat_fields(pid)
    if not fields:
        return None
    with open("/proc/uptime", encoding="ascii") as stream:
        uptime = float(stream.read().split()[0])
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    environment = _read_list("/proc/%d/environ" % pid)
    if environment is not None:
        environment = dict(entry.split("=", 1) for entry in environment if "=" in entry)
    return {
        "argv": _read_list("/proc/%d/cmdline" % pid) or [],
        "environment": environment,
        "since": round(time.time() - uptime + started, 2),
    }


def parent(pid):
    """The pid of the parent; None once the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def ancestors(pid):
    """The pids above a process, its parent first, without the host's first process."""
    found, above = [], parent(pid)
    while above and above > 1:
        found.append(above)
        above = parent(above)
    return found


def cgroups(pid):
    """The control group paths of a process, systemd's own or the unified one first; [] once it is gone."""
    try:
        with open("/proc/%d/cgroup" % pid, encoding="utf-8", errors="replace") as stream:
            rows = [line.rstrip("\n").split(":", 2) for line in stream]
    except OSError:
        return []
    rows = [row for row in rows if len(row) == 3]
    return [path for _number, names, path in sorted(rows, key=lambda row: row[1] not in ("", "name=systemd"))]


def same_command(argv):
    """Processes that run with exactly these arguments."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if is_alive(pid) and _read_list("/proc/%d/cmdline" % pid) == argv]


def family_of(pid):
    """The process, its descendants and everything in its process group: what has to be gone after a stop."""
    parents, group = {}, {pid}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _stat_fields(int(name))
            if fields:
                parents[int(name)] = int(fields[1])
                if int(fields[2]) == pid:
                    group.add(int(name))
    grown = True
    while grown:
        children = {child for child, parent in parents.items() if parent in group}
        grown = not children <= group
        group |= children
    return sorted(one for one in group if is_alive(one))


def _addresses(host):
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}


def _listening_inodes(port, host):
    wanted = {"0.0.0.0", "::"} | _addresses(host) if host else None
    inodes = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open("/proc/net/" + table, encoding="ascii") as stream:
                rows = stream.read().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            address, _colon, number = fields[1].rpartition(":")
            if fields[3] != "0A" or int(number, 16) != port:
                continue
            # Each 32-bit word of the address is printed in host byte order.
            raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
            text = socket.inet_ntop(family, raw)
            if wanted is None or host in ("0.0.0.0", "::") or text in wanted:
                inodes.add(fields[9])
    return inodes


def port_holders(port, host=None):
    """Who listens on a TCP port, where it would collide with ``host``: a list of {pid, command}.

    ``pid`` is None where the listener belongs to a user whose processes cannot be looked into.
    """
    inodes = _listening_inodes(port, host)
    if not inodes:
        return []
    links = {"socket:[%s]" % inode for inode in inodes}
    holders = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            held = {os.readlink(entry.path) for entry in os.scandir("/proc/%s/fd" % name)}
        except OSError:
            continue
        if held & links:
            holders.append({"pid": int(name), "command": command_of(int(name))})
    return holders or [{"pid": None, "command": "a process of another user"}]
