# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which SGLang server a host has, and who started it.

PRIVATE to the collection. A server is **ours** (manager systemd or supervisor: its unit or program is made from the inventory),
or it was **found**: the operator's own systemd unit (manager ``unit``), a process started by hand (``process``), or a container
(``podman``, ``docker``). What a found server was started with is recorded before it is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import SHELLS, is_typed_in, server_below, server_on

OURS = ("systemd", "supervisor")
FOUND = ("unit", "process", *cq.ENGINES)
MANAGERS = ("auto", *OURS, *FOUND)

# Units that processes started by hand end up in.
_LOGINS = re.compile(
    r"^(ssh|sshd|ssh@.*|sshd@.*|cron|crond|atd|user@\d+|getty@.*|.*-getty@.*|console-getty|slurmd|supervisor|supervisord)\.service$"
)
_UNIT = re.compile(r"(?:^|/)([^/]+\.service)(?:/|$)")


def unit_of(pid):
    """The systemd unit that runs a process as its own; "" for none, and for units that only hold logins."""
    for path in hp.cgroups(pid):
        names = _UNIT.findall(path)
        if names:
            return "" if _LOGINS.match(names[-1]) else names[-1]
    return ""


def record_path(state_dir, name):
    """Where the record of a found server lies; ``name`` is the one of the inventory."""
    return os.path.join(state_dir, "server", name, "found.json")


def before_path(state_dir, name):
    """Where the state lies that a server had before it was first changed."""
    return os.path.join(state_dir, "server", name, "before.json")


def state_before(state_dir, name):
    """The state that the role sglang_server recorded, or None."""
    path = before_path(state_dir, name)
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)["state"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise sq.ServiceError("%s: cannot be read (%s). Remove it to forget the state before" % (path, error)) from error


def _default():
    return sq.resolve_manager("auto")


def locate(params):
    """Who runs the server that ``params`` (manager, name, host, port, state_dir) describe.

    Returns ``manager``, ``service`` (the name that this manager has for it), ``pid`` (of the server; None where it does not run or
    is ours) and ``recorded`` (whether the answer is from a record). Raises ServiceError for a server that cannot be handled.
    """
    located = _locate(params)
    if located["manager"] == "systemd" or (located["manager"] == "process" and _default() == "systemd"):
        # A unit is or will be made for it, which one of the operator's in /etc would hide.
        sq.refuse_foreign_unit(params["name"])
    return located


def _locate(params):
    manager, name, state_dir = params["manager"], params["name"], params["state_dir"]
    recorded = pr.read(record_path(state_dir, name))
    if manager in OURS:
        return {"manager": manager, "service": name, "pid": None, "recorded": False}
    if manager in FOUND:
        return _locate_as(manager, params, recorded)
    return _locate_by_facts(params, recorded)


def _server_of(params, recorded):
    """The pid of the server on the port, or of one that was started by hand and does not listen yet; None for neither."""
    pid = server_on(params["port"], params["host"])
    if pid is None and recorded and recorded["manager"] == "process":
        managed = sq.query(_default(), params["name"], params["state_dir"])["processes"]
        pid = next((one for one in hp.same_command(recorded["argv"]) if one not in managed), None)
    return pid


def _locate_as(manager, params, recorded):
    """A found server of which it is known who runs it, but not under which name."""
    pid = _server_of(params, recorded)
    owner = _owner(pid) if pid is not None and manager != "process" else None
    if owner and owner["manager"] == manager:
        return dict(owner, pid=pid, recorded=False)
    service = recorded["service"] if recorded and recorded["manager"] == manager else params["name"]
    return {"manager": manager, "service": service, "pid": pid if owner is None else None, "recorded": bool(recorded)}


def _locate_by_facts(params, recorded):
    name, state_dir = params["name"], params["state_dir"]
    pid = _server_of(params, recorded)
    ours = sq.query(_default(), name, state_dir)
    is_ours = ours["state"] != "absent" and (_default() == "supervisor" or sq.unit_is_ours(name) is not False)
    if recorded and recorded["manager"] == "process" and is_ours and (pid is None or pid in ours["processes"]):
        return {"manager": "process", "service": name, "pid": pid, "recorded": True}
    if recorded and recorded["manager"] != "process" and (pid is None or _belongs(pid, recorded)):
        return {"manager": recorded["manager"], "service": recorded["service"], "pid": pid, "recorded": True}
    if is_ours and (ours["processes"] or pid is None):
        return {"manager": _default(), "service": name, "pid": None, "recorded": False}
    if pid is not None:
        return dict(_owner(pid), pid=pid, recorded=False)
    if recorded:
        return {"manager": recorded["manager"], "service": recorded["service"], "pid": None, "recorded": True}
    if _default() == "systemd" and sq.unit_is_ours(name) is False:
        return {"manager": "unit", "service": name, "pid": None, "recorded": False}
    for engine in cq.ENGINES:
        # Nothing speaks for a container, so a client that is only installed stands in nobody's way.
        with contextlib.suppress(cq.NoRight):
            if cq.inspect(engine, name):
                return {"manager": engine, "service": name, "pid": None, "recorded": False}
    return {"manager": _default(), "service": name, "pid": None, "recorded": False}


def _belongs(pid, recorded):
    """Whether a server's process is that of a recorded unit or container."""
    owner = _owner(pid)
    return owner["manager"] == recorded["manager"] and owner["service"] in (recorded["service"], cq.capture_name(recorded["service"]))


def _is_started_by(unit, pid):
    """Whether a unit started a process, and not somebody in a shell of it: agents give them inside of their own unit."""
    main, line = sq.main_pid(unit), [pid, *hp.ancestors(pid)]
    if main is None:
        # What it ran has ended and left the server behind.
        return True
    if main not in line:
        # A script may have let go of the server that it started. Anything else holds what a session left running.
        return os.path.basename((_argv(main) or [""])[0]) in SHELLS
    between = line[1 : line.index(main)] if main != pid else []
    return not any(map(is_typed_in, map(_argv, between)))


def _argv(pid):
    return (hp.process(pid) or {"argv": []})["argv"]


def _pipes(pid, *handles):
    """The pipes behind a process's file descriptors."""
    links = []
    for handle in handles:
        with contextlib.suppress(OSError):
            links.append(os.readlink("/proc/%d/fd/%d" % (pid, handle)))
    return {link for link in links if link.startswith("pipe:")}


def others_in_unit(located, service):
    """What a stop of the server's unit would end that is not the server's: a list of {pid, command}; [] where it is no unit's.

    The server's own are what the unit started it through, its descendants, and what a script of the unit needs beside it: its subshells
    and sleeps, and whoever reads what the server prints.
    """
    pid = located["pid"] or service["pid"]
    if located["manager"] != "unit" or pid is None:
        return []
    own = {pid, *hp.ancestors(pid), *hp.family_of(pid), sq.main_pid(located["service"])}
    # Of an ExecStartPost that goes on.
    own.update(hp.family_of(service["control"]) if service.get("control") else [])
    own.discard(None)
    scripts = [argv for argv in map(_argv, own) if argv and os.path.basename(argv[0]) in SHELLS]
    left = {one for one in service["processes"] if hp.is_alive(one)} - own
    while True:
        printed = set().union(*(_pipes(one, 1, 2) for one in own))
        helpers = {one for one in left if _argv(one) in scripts or _pipes(one, 0) & printed or _is_idle(one, own)}
        if not helpers:
            return [{"pid": one, "command": hp.command_of(one)} for one in sorted(left)]
        own |= helpers
        left -= helpers


def _is_idle(pid, own):
    """Whether a process is the sleep of a script, or what systemd holds a session of PAM with."""
    name = os.path.basename((_argv(pid) or [""])[0])
    return name in ("sleep", "(sd-pam)") and hp.parent(pid) in own


def _owner(pid):
    """Manager and service of a running server's process. Raises ServiceError where it could not be started again."""
    container = cq.container_of(pid)
    if container:
        return container
    unit = unit_of(pid)
    if unit and _is_started_by(unit, pid):
        sq.refuse_passing_unit(unit)
        return {"manager": "unit", "service": unit[: -len(".service")]}
    return {"manager": "process", "service": ""}


def _server_in(service):
    """The same service, with its server in the place of a wrapper that is its main process."""
    server = server_below(service["pid"]) if service["pid"] else None
    if server is None or server == service["pid"]:
        return service
    seen = hp.process(server)
    return dict(service, pid=server, **seen) if seen else service


def service_of(located, params):
    """What a located server's service is doing, as of service_query.query."""
    name, state_dir = params["name"], params["state_dir"]
    if located["manager"] in cq.ENGINES:
        return cq.query(located["manager"], located["service"])
    if located["manager"] == "unit":
        return _server_in(sq.query("systemd", located["service"], state_dir))
    if located["manager"] in OURS:
        return sq.query(located["manager"], name, state_dir)
    managed = sq.query(_default(), name, state_dir)
    if located["pid"] is None or located["pid"] in managed["processes"]:
        return managed
    seen = hp.process(located["pid"])
    return {
        "manager": "process",
        "name": name,
        "state": "running" if seen else "stopped",
        "pid": located["pid"] if seen else None,
        "since": seen["since"] if seen else None,
        "argv": seen["argv"] if seen else [],
        "environment": seen["environment"] if seen else None,
        "processes": hp.family_of(located["pid"]) if seen else [],
        "detail": "",
    }
