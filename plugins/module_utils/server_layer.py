# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Records of found servers, and what is laid so that such a server captures.

PRIVATE to the collection. Everything that is laid lies under /run, so that a reboot takes it away, and is readable by root only: it
repeats the operator's arguments and environment.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_flags as sf
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import is_server

RUN_DIR = "/run/hidden_state_bridge"
UNITS_DIR = "/run/systemd/system"
DROPIN = "50-hidden-state-bridge.conf"
GATE = "SGLANG_HS_DUMP_DIR"
SETPRIV = "/usr/bin/setpriv"

# What systemd gives to each start of a unit by itself.
_OF_SYSTEMD = (
    *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MAINPID", "MANAGERPID", "CREDENTIALS_DIRECTORY"),
    *("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE"),
    *("MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE"),
)


def captures(environment):
    """Whether a process with that environment captures; not where the environment could not be read (None)."""
    return bool(environment and environment.get(GATE))


# -- records --------------------------------------------------------------------------------------------


def make_record(located, service):
    """What a found server is started with, as it runs or, where it does not run, as its manager says."""
    manager = located["manager"]
    if service["pid"] is not None and not is_up(service):
        raise pr.RecordError(
            "%s runs, but has not started the SGLang server yet (process %d: %s): wait until the server is ready, then run again"
            % (located["service"] or "process", service["pid"], hp.command_of(service["pid"]))
        )
    if service["pid"] is not None:
        record = pr.record(service["pid"], inside=manager in cq.ENGINES)
        if manager == "unit":
            record.update(_done_by_wrapper(located["service"], record))
    elif manager == "unit":
        record = _unit_as_written(located["service"])
    elif manager in cq.ENGINES:
        record = _container_as_made(manager, located["service"])
    else:
        raise pr.RecordError("no SGLang server runs there, and none was recorded: start it as you do, then run again")
    return dict(record, manager=manager, service=located["service"])


def _done_by_wrapper(service, record):
    """What a unit's script did before it started the server that the unit's other settings do not say.

    ``removed`` variables, known where the script still runs, whether it ``switched`` the user, and whether the unit starts the
    server without any script (``plain``).
    """
    code, out, _err = sq.run(["systemctl", "show", sq.unit_name(service), "--property=MainPID,User,Group,DynamicUser"])
    unit = dict(line.split("=", 1) for line in out.splitlines() if "=" in line) if code == 0 else {}
    main = hp.process(int(unit.get("MainPID") or 0))
    outside = (main or {"environment": None})["environment"] or {}
    own = record["user"]["uid"], record["user"]["gid"]
    switched = bool(unit) and unit.get("DynamicUser") != "yes" and _ids(unit.get("User"), unit.get("Group"), own) != own
    try:
        plain = [words for _program, words in _commands(service)] == [record["argv"]]
    except pr.RecordError:
        plain = False
    return {"removed": sorted(set(outside) - set(record["environment"])), "switched": switched, "plain": plain}


def _ids(user, group, unknown):
    """(user id, group id) of a unit's User= and Group=; ``unknown`` where this host has no such names."""
    try:
        entry = pwd.getpwuid(int(user or 0)) if (user or "0").isdigit() else pwd.getpwnam(user)
        if not group:
            return entry.pw_uid, entry.pw_gid
        return entry.pw_uid, int(group) if group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        return unknown


def _bus_label(unit):
    """The name of a unit as the bus has it, which begins with no digit."""
    return "".join(one if one.isalpha() or (one.isdigit() and place) else "_%02x" % ord(one) for place, one in enumerate(unit))


def _commands(name):
    """Program and words of each command in a unit's ExecStart; systemctl shows them without saying where a word ends, so the bus is asked.

    Raises RecordError where it does not answer.
    """
    unit = sq.unit_name(name)
    path = "/org/freedesktop/systemd1/unit/" + _bus_label(unit)
    # systemd answers for a unit that it has loaded.
    sq.run(["systemctl", "show", unit, "--property=LoadState"])
    argv = ["busctl", "get-property", "--json=short", "org.freedesktop.systemd1", path, "org.freedesktop.systemd1.Service", "ExecStart"]
    code, out, err = sq.run(argv)
    if code != 0:
        raise pr.RecordError("%s: its ExecStart cannot be read (%s)" % (unit, err.strip()[-200:]))
    return [(command[0], command[1]) for command in json.loads(out)["data"]]


def _unit_as_written(name):
    """The command of a unit that does not run."""
    unit = sq.unit_name(name)
    commands = _commands(name)
    words = commands[0][1] if len(commands) == 1 else []
    if not is_server(words) or any("$" in word for word in words):
        raise pr.RecordError(
            "%s does not run, and its ExecStart does not say all of the server's arguments: start it, then run again" % unit
        )
    code, out, _err = sq.run(["systemctl", "show", unit, "--property=User", "--value"])
    return {"argv": words, "executable": commands[0][0], "environment": {}, "user": {"name": out.strip() or "root"}}


def _container_as_made(engine, name):
    facts = cq.inspect(engine, name)
    if not facts:
        raise pr.RecordError("%s has no container %s" % (engine, name))
    cq.refuse(engine, facts)
    config = facts["Config"]
    entry = config.get("Entrypoint") or []
    words = ([entry] if isinstance(entry, str) else list(entry)) + list(config.get("Cmd") or [])
    if not is_server(words):
        raise pr.RecordError(
            "container %s does not run, and its command does not say the server's arguments: start it, then run again" % name
        )
    environment = dict(pair.split("=", 1) for pair in config.get("Env") or [] if "=" in pair)
    return {"argv": words, "executable": words[0], "environment": environment, "user": {}}


def is_up(service):
    """Whether the server itself runs, and not only a script that is about to start it."""
    return service["pid"] is not None and is_server(service["argv"])


def python_of(record):
    """The interpreter of a recorded server; "" where its program is none."""
    return record["executable"] if "python" in os.path.basename(record["executable"]) else ""


def model_of(record):
    """The model path among the arguments of a recorded server; "" for none."""
    return sf.last_value(record["argv"], "--model-path", "--model") or ""


# -- layers ---------------------------------------------------------------------------------------------


def capture_argv(record, arguments):
    """The whole command in capture mode: the operator's without what capture takes away, then ``arguments``."""
    return record["argv"][:1] + sf.without_taken(record["argv"][1:])[0] + list(arguments)


def tag_of(*parts):
    """A hash that a process carries in its environment; equal hashes, equal process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _systemd_word(word):
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("$", "$$"), ("%", "%%"), ("\n", "\\n"), ("\t", "\\t")):
        word = word.replace(plain, escaped)
    return '"%s"' % word


def _environment_line(key, value):
    for plain in ("\\", '"', "$", "`"):
        value = value.replace(plain, "\\" + plain)
    return '%s="%s"\n' % (key, value)


def unit_files(service):
    """Drop-in and environment file of a unit's layer."""
    return os.path.join(UNITS_DIR, sq.unit_name(service) + ".d", DROPIN), os.path.join(RUN_DIR, service + ".environment")


def unit_layer(record, argv, environment, tag):
    """Paths and contents of the files that make a unit of the operator's capture."""
    dropin, variables = unit_files(record["service"])
    layer = {key: value for key, value in record["environment"].items() if key not in _OF_SYSTEMD}
    layer.update(environment)
    layer[sq.TAG_VARIABLE] = tag
    lines = [
        "# capture: written by hidden_state.bridge on top of the unit; gone after a reboot.",
        "[Service]",
        "Type=exec",
        # Of a Type=oneshot: a capture that has ended would count as running.
        "RemainAfterExit=no",
        "PIDFile=",
        "WatchdogSec=0",
        # As a unit of ours: a wrong argument ends the wait at once, and is the last thing in the log.
        "Restart=on-failure",
        "RestartSec=10",
        "RestartPreventExitStatus=2",
        "EnvironmentFile=" + variables,
    ]
    lines += ["UnsetEnvironment=" + name for name in record.get("removed") or []]
    words = [record["executable"]] + argv[1:]
    # These hold for what the unit runs before and after the server too, so they are there only where a script gave them.
    if "directory" in record and not record.get("plain"):
        lines += _as_it_ran(record)
    if record.get("switched"):
        # User= would hold for what the unit runs before and after the server too.
        user = record["user"]
        groups = "--groups=" + ",".join(map(str, user["groups"])) if user["groups"] else "--clear-groups"
        words = ["!" + SETPRIV, "--reuid=%d" % user["uid"], "--regid=%d" % user["gid"], groups, "--", *words]
    lines += ["ExecStart=", "ExecStart=" + " ".join(map(_systemd_word, words))]
    text = "".join(_environment_line(key, layer[key]) for key in sorted(layer))
    return {dropin: "\n".join(lines) + "\n", variables: text}


def check_there(record):
    """Raise RecordError where a unit could not start its capture on this host as its server ran: known while that still serves."""
    directory = "" if record.get("plain") else record.get("directory")
    if directory and not os.path.isdir(directory):
        raise pr.RecordError(
            "the working directory of the running server, %s, is not there, and its capture could not start in it:"
            " restart the server as you do, then run again" % directory
        )
    if record.get("switched") and not os.access(SETPRIV, os.X_OK):
        raise pr.RecordError(
            "a script of %s runs the server as user %s, which its capture needs %s for: install util-linux, or set User= in the unit"
            % (record["service"], record["user"]["uid"], SETPRIV)
        )


def _as_it_ran(record):
    """Settings of a unit that give what a script (cd, umask, ulimit, nice, taskset) gave to the recorded process."""
    lines = ["WorkingDirectory=" + record["directory"].replace("%", "%%"), "UMask=%04o" % record["umask"], "Nice=%d" % record["nice"]]
    for name, pair in sorted(record["limits"].items()):
        values = ":".join("infinity" if value == -1 else str(value) for value in pair)
        lines.append("Limit%s=%s" % (name[len("RLIMIT_") :], values))
    if record.get("affinity"):
        lines += ["CPUAffinity=", "CPUAffinity=" + " ".join(map(str, record["affinity"]))]
    return lines


def lay_files(files, check_mode=False):
    """Write files for root alone; returns whether one changed."""
    changed = False
    for path, content in files.items():
        if not check_mode:
            os.makedirs(os.path.dirname(path), mode=0o755 if path.startswith(UNITS_DIR) else 0o700, exist_ok=True)
            changed = pr.write(path, content) or changed
        else:
            changed = pr.differs(path, content) or changed
    return changed


def take_files(paths, check_mode=False):
    """Remove files; returns whether one was there."""
    there = [path for path in paths if os.path.exists(path)]
    for path in [] if check_mode else there:
        os.unlink(path)
    return bool(there)


def container_files(service):
    """Command and environment file of a capture container."""
    return os.path.join(RUN_DIR, service + ".container.json"), os.path.join(RUN_DIR, service + ".container.env")


def source_copy(service):
    """Where the model source of a container's image lies on the host, to be patched and mounted."""
    return os.path.join(RUN_DIR, "containers", service, "sglang")


def place_file(service):
    """Where it is kept where SGLang lies in a container's image."""
    return os.path.join(RUN_DIR, "containers", service, "place.json")


def container_layer(record, argv, environment, tag, package):
    """Paths and contents of the files that make a server in a container capture. ``package`` is SGLang's directory inside."""
    engine, service = record["manager"], record["service"]
    facts = cq.inspect(engine, service)
    if not facts:
        raise pr.RecordError("%s has no container %s" % (engine, service))
    cq.refuse(engine, facts)
    command_file, variables = container_files(service)
    copy = source_copy(service)
    model_file = "srt/models/deepseek_v2.py"
    dumps = environment[GATE]
    # The patcher lays the runtime beside the file that it patches.
    parts = [part for part in (model_file, "srt/hs_capture") if os.path.exists(os.path.join(copy, part))]
    mounts = [(os.path.join(copy, part), os.path.join(package, part), True) for part in parts] + [(dumps, dumps, False)]
    layer = dict(record["environment"], **environment)
    layer[sq.TAG_VARIABLE] = tag
    command = cq.capture_command(engine, facts, argv, variables, mounts)
    return {command_file: {"command": command}, variables: cq.environment_text(layer)}


def process_files(state_dir, name):
    """Launch files of a server that was started by hand: as it was, and in capture mode."""
    home = os.path.join(state_dir, "services", name)
    return os.path.join(home, "serving.json"), os.path.join(home, "capture.json")


def read_record(state_dir, name):
    """The record of a found server; RecordError where there is none."""
    record = pr.read(found.record_path(state_dir, name))
    if record is None:
        raise pr.RecordError("%s: nothing is recorded there" % found.record_path(state_dir, name))
    return record
