# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a service is doing, seen from the service manager and from the process itself.

PRIVATE to the collection. The manager knows the main process of a service; ``/proc`` knows what that
process was really started with. SGLang renames its workers (setproctitle overwrites their arguments and
environment), never its main process, so only the main process is asked.
"""

from __future__ import annotations

import http.client
import os
import socket
import xmlrpc.client

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils.host_command import NoCommand, ServiceError, run

TAG_VARIABLE = "HIDDEN_STATE_BRIDGE_SERVICE"
"""Environment variable in which a unit hands its process the hash of what the unit says."""

START_MARK = "hidden_state_bridge: start as pid "
"""Begins the first line of each start in a log file that holds several; the pid ends that line."""

OUR_MARK = "# Written by hidden_state.bridge"
"""Begins each unit file that the role _service writes."""

DEFAULT_STATE_DIR = "/var/lib/hidden_state_bridge"

_TRANSIENT = "/run/systemd/transient/"

_SYSTEMD_STATES = {
    "active": "running",
    "reloading": "running",
    "activating": "starting",
    "deactivating": "stopping",
    "failed": "failed",
    "inactive": "stopped",
}
_SUPERVISOR_STATES = {
    "RUNNING": "running",
    "STARTING": "starting",
    "BACKOFF": "starting",
    "STOPPING": "stopping",
    "STOPPED": "stopped",
    "EXITED": "stopped",
    "FATAL": "failed",
    "UNKNOWN": "failed",
}


# -- systemd -----------------------------------------------------------------------------------------


def unit_name(name):
    """The systemd unit of a service."""
    return name if name.endswith(".service") else name + ".service"


def unit_file(name):
    """The file of a unit as systemd knows it; "" for no such unit. Raises ServiceError where systemd does not say."""
    return _shown(name, "FragmentPath")


def main_pid(name):
    """The main process of a unit; None for none. Raises ServiceError where systemd does not say."""
    return int(_shown(name, "MainPID") or 0) or None


def _shown(name, key):
    argv = ["systemctl", "show", unit_name(name), "--property=" + key, "--value"]
    try:
        code, out, err = run(argv)
    except NoCommand:
        return ""
    if code != 0:
        raise ServiceError("%s: %s" % (" ".join(argv), err.strip() or out.strip()))
    return out.strip()


def unit_is_ours(name):
    """Whether a unit was written from the inventory; None where there is no such unit."""
    path = unit_file(name)
    return _is_marked(path) if path else None


def _is_marked(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(200).startswith(OUR_MARK)
    except OSError:
        return False


def refuse_foreign_unit(name):
    """Raise ServiceError where a unit of the operator's has the name of one that is to be written."""
    path = unit_file(name)
    if os.path.lexists(path) and not _is_marked(path):
        raise ServiceError(
            "%s is a unit of your own, which this collection never stops, overwrites or hides: set another name"
            " (sglang_server_name, extraction_service_name), or sglang_server_manager to unit if it runs the server" % path
        )


def refuse_passing_unit(name):
    """Raise ServiceError where a running unit has no file that a stop leaves, so that it could not be started again."""
    path = unit_file(name)
    if path and (path.startswith(_TRANSIENT) or not os.path.exists(path)):
        raise ServiceError(
            "%s, which runs the server, is gone once it stops (%s) and could not come back: give it a unit file (systemd-run writes none"
            " that lasts) and restart it, then run again" % (unit_name(name), path)
        )


def _query_systemd(name):
    wanted = (
        "LoadState,ActiveState,SubState,Job,MainPID,ControlPID,ControlGroup,ExecMainStatus,Result,InvocationID,NeedDaemonReload,"
        "ConditionResult,ConditionTimestampMonotonic,AssertResult,AssertTimestampMonotonic"
    )
    try:
        code, out, err = run(["systemctl", "show", unit_name(name), "--property=" + wanted])
    except NoCommand:
        return {"state": "absent", "pid": None, "detail": "no systemctl on this host"}
    if code != 0:
        raise ServiceError("systemctl show %s: %s" % (unit_name(name), err.strip() or out.strip()))
    facts = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    state = _SYSTEMD_STATES.get(facts.get("ActiveState", ""), "failed")
    if facts.get("LoadState") == "not-found" and state in ("stopped", "failed"):
        state = "absent"
    if state in ("stopped", "failed") and int(facts.get("Job") or 0):
        # Its start waits for other units, or has not been begun.
        state = "starting"
    return {
        "state": state,
        "pid": int(facts.get("MainPID") or 0) or None,
        "detail": "" if state == "running" else _end_of(facts),
        # Of ExecStartPre, or of what daemonizes.
        "control": int(facts.get("ControlPID") or 0) or None,
        # Ended, and to be started again after RestartSec.
        "revived": facts.get("SubState", "").startswith("auto-restart"),
        "cgroup": facts.get("ControlGroup") or "",
        "invocation": facts.get("InvocationID") or "",
        "reload_needed": facts.get("NeedDaemonReload") == "yes",
    }


def _end_of(facts):
    """How a unit ended, or why it was not started; "" for no reason that systemd keeps."""
    if facts.get("ExecMainStatus", "0") != "0":
        return "exit status %s" % facts["ExecMainStatus"]
    if facts.get("Result", "success") != "success":
        return "result %s" % facts["Result"]
    for kind in ("Condition", "Assert"):
        if facts.get(kind + "Result") == "no" and facts.get(kind + "TimestampMonotonic", "0") != "0":
            return "%s... of its unit is not met" % kind
    return ""


def _cgroup_pids(cgroup):
    pids = set()
    # Unified hierarchy first; then where hybrid and legacy hosts keep systemd's own.
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
        for directory, _names, files in os.walk(root + cgroup):
            if "cgroup.procs" in files:
                try:
                    with open(os.path.join(directory, "cgroup.procs"), encoding="ascii") as stream:
                        pids.update(int(line) for line in stream.read().split())
                except (OSError, ValueError):
                    continue
    return pids


# -- supervisor --------------------------------------------------------------------------------------


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path, timeout):
        super().__init__()
        self._path = path
        self._timeout = timeout

    def make_connection(self, host):
        return _UnixConnection(self._path, self._timeout)


def supervisor_socket(state_dir):
    """The control socket of the host's supervisord."""
    return os.path.join(state_dir, "supervisor", "supervisor.sock")


def supervisor(state_dir, timeout=30):
    """supervisord's XML-RPC interface (``.supervisor.METHOD()``); None where no supervisord answers."""
    path = supervisor_socket(state_dir)
    proxy = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=_UnixTransport(path, timeout), allow_none=True)
    try:
        proxy.supervisor.getState()
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
        raise ServiceError("%s: supervisord does not answer: %s" % (path, error)) from error
    return proxy


def _query_supervisor(name, state_dir):
    proxy = supervisor(state_dir)
    if proxy is None:
        return {"state": "absent", "pid": None, "detail": "supervisord is not running"}
    try:
        facts = proxy.supervisor.getProcessInfo(name)
    except xmlrpc.client.Fault as fault:
        if "BAD_NAME" in fault.faultString:
            return {"state": "absent", "pid": None, "detail": ""}
        raise ServiceError("supervisord: %s: %s" % (name, fault.faultString)) from fault
    state = _SUPERVISOR_STATES.get(facts["statename"], "failed")
    detail = ""
    if facts["statename"] == "EXITED" and facts["exitstatus"] != 0:
        state = "failed"
        detail = "killed by a signal" if facts["exitstatus"] < 0 else "exit status %d" % facts["exitstatus"]
    elif state == "failed":
        detail = facts["spawnerr"]
    return {"state": state, "pid": facts["pid"] or None, "detail": detail}


def pids_file(state_dir, name):
    """Where each start of a service under supervisor adds its pid."""
    return os.path.join(state_dir, "services", name, "pids")


def leftovers_of(state_dir, name):
    """Processes of a service that its supervisord may have no hand on any more.

    A server's workers outlive a main process that was killed, and everything outlives a supervisord that was. They are in the
    process groups of the pids that the starts wrote down; a pid cannot be given away while its group has members.
    """
    try:
        with open(pids_file(state_dir, name), encoding="ascii") as stream:
            pids, written = [int(line) for line in stream], os.fstat(stream.fileno()).st_mtime
    except (OSError, ValueError):
        return []
    # A container begins with its first process: pids of an earlier life are other processes', or nobody's.
    first = hp.process(1)
    if first and written < first["since"]:
        return []
    found = set()
    for pid in pids:
        leader = hp.process(pid) if hp.is_alive(pid) else None
        if leader is None or TAG_VARIABLE in (leader["environment"] or {}):
            found.update(hp.family_of(pid))
    return sorted(found)


# -- both --------------------------------------------------------------------------------------------


def resolve_manager(manager):
    """``auto`` is systemd where systemd is running this host, supervisor elsewhere."""
    if manager == "auto":
        return "systemd" if os.path.isdir("/run/systemd/system") else "supervisor"
    if manager not in ("systemd", "supervisor", *cq.ENGINES):
        raise ServiceError("unknown service manager %r: systemd or supervisor, podman or docker" % manager)
    return manager


def query(manager, name, state_dir=DEFAULT_STATE_DIR):
    """What a service is doing.

    Returns ``state`` (running, starting, stopping, stopped, failed, absent), ``pid`` of the main process,
    ``since`` (its start, seconds since the epoch), ``argv``, ``environment`` (None where it cannot be read),
    ``processes`` (pids that belong to the service) and ``detail`` (how it ended, for people).
    Raises ServiceError where the manager cannot be asked.
    """
    manager = resolve_manager(manager)
    if manager in cq.ENGINES:
        return cq.query(manager, name)
    found = _query_systemd(name) if manager == "systemd" else _query_supervisor(name, state_dir)
    seen = hp.process(found["pid"]) if found["pid"] else None
    pids = set(hp.family_of(found["pid"])) if seen else set()
    if manager == "supervisor":
        pids |= set(leftovers_of(state_dir, name))
    if found.get("cgroup"):
        pids |= _cgroup_pids(found["cgroup"])
    found.update(
        manager=manager,
        name=name,
        since=seen["since"] if seen else None,
        argv=seen["argv"] if seen else [],
        environment=seen["environment"] if seen else None,
        processes=sorted(pids),
    )
    return found


def service_log(state_dir, name):
    """The log file of a service under supervisor."""
    return os.path.join(state_dir, "supervisor", "log", name + ".log")


def log_tail(manager, name, state_dir=DEFAULT_STATE_DIR, lines=40, pid=None, since=None):
    """Last lines of what one start of a service printed; [] where there is no log.

    That start is told by its main process ``pid`` (supervisor) or its time ``since`` (systemd, seconds since the epoch);
    without them it is the last one.
    """
    if manager in cq.ENGINES:
        return cq.log_tail(manager, name, lines)
    if resolve_manager(manager) == "systemd":
        # Newest first: with --since, --lines counts from there on in older releases of systemd.
        argv = ["journalctl", "--output=cat", "--no-pager", "--reverse", "--lines=%d" % lines]
        if since:
            argv += ["--unit=" + unit_name(name), "--since=@%d" % since]
        else:
            argv += ["_SYSTEMD_INVOCATION_ID=" + query("systemd", name).get("invocation", "")]
        try:
            # On a busy host the last words of a process are still on their way when it has ended.
            run(["journalctl", "--sync"])
            code, out, _err = run(argv)
        except ServiceError:
            return []
        return out.splitlines()[lines - 1 :: -1] if code == 0 else []
    try:
        with open(service_log(state_dir, name), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 512 * 1024))
            text = stream.read().decode("utf-8", "replace")
    except OSError:
        return []
    # The rest of a mark's line is the pid.
    starts = [part.partition("\n") for part in text.split(START_MARK)]
    wanted = [rest for mark, _newline, rest in starts if pid is None or mark == str(pid)]
    return [line for line in (wanted or [""])[-1].splitlines() if line.strip()][-lines:]
