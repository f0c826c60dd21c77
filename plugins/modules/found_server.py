#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: found_server
short_description: Record a server that the collection did not start, and lay or take away what makes it capture
version_added: 0.1.0
description:
  - For a server in a systemd unit of the operator's, in a container, or started by hand.
  - What it was started with stays on the host, in files of mode 0600.
  - Starts nothing. M(hidden_state.bridge.managed_service) does, with what this module returns.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Reports what would be done, and does nothing.
    support: full
  diff_mode:
    description: Shows nothing, as the files hold secrets.
    support: none
options:
  name:
    description: Name of the server in the inventory.
    type: str
    required: true
  manager:
    description: Who runs the server; V(auto) finds out by the port and by what was recorded.
    type: str
    choices: [auto, systemd, supervisor, unit, process, podman, docker]
    default: auto
  state:
    description:
      - V(recorded) records what the server was started with, unless it captures.
      - V(capture) also lays the layer of the capture, V(serving) takes it away.
      - V(stopped) ends a server that was started by hand, with proof; one that a manager runs is left to it.
    type: str
    choices: [recorded, capture, serving, stopped]
    default: recorded
  host:
    description: Address that the server listens on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server listens on.
    type: int
    default: 30000
  state_dir:
    description: Directory of the collection's state on the host.
    type: path
    default: /var/lib/hidden_state_bridge
  arguments:
    description: Arguments of capture mode.
    type: list
    elements: str
    default: []
  environment:
    description: Environment of capture mode.
    type: dict
    default: {}
  package:
    description: SGLang's directory in the container.
    type: path
  stop_timeout:
    description: Seconds between SIGTERM and SIGKILL.
    type: int
    default: 120
  revive_seconds:
    description: Seconds for which a wrapper that is still there is watched after the stop, lest it starts the server again.
    type: int
    default: 15
"""

EXAMPLES = r"""
- name: Record the server on port 30000
  hidden_state.bridge.found_server:
    name: sglang
    port: 30000
"""

RETURN = r"""
manager:
  description: Who runs the server.
  returned: always
  type: str
service:
  description: Name of its unit or container; empty for a server that was started by hand.
  returned: always
  type: str
tag:
  description: Hash that the process carries in capture mode; empty for other modes, and for a server with O(state) launch files.
  returned: always
  type: str
launch:
  description: File with arguments and environment of a server that was started by hand, in the mode asked for.
  returned: always
  type: str
container_command:
  description: File with the command of the capture container.
  returned: always
  type: str
changed_files:
  description: Whether files were written or removed.
  returned: always
  type: bool
"""

import os
import signal
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import gpu_processes as gpus
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import is_typed_in

REAP_SECONDS = 10.0
# A shell in which somebody typed the command starts nothing again, nor does what holds that shell.
HOLDERS = ("tmux", "screen", "sshd", "login", "su", "sudo", "systemd", "conmon")


def record(params, located, check_mode):
    """Write the record of a server that serves; returns (record, whether it changed)."""
    service = found.service_of(located, params)
    path = found.record_path(params["state_dir"], params["name"])
    known = pr.read(path)
    capturing = layer.captures(service["environment"])
    # A script of its unit may not have started it yet, which a way back does not wait for.
    loading = params["state"] == "serving" and not layer.is_up(service)
    if capturing or (known and (service["pid"] is None or loading)):
        return layer.read_record(params["state_dir"], params["name"]), False
    made = layer.make_record(located, service)
    if located["manager"] in cq.ENGINES:
        made["place"] = pr.read(layer.place_file(located["service"]))
    if known == made:
        return made, False
    if not check_mode:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        pr.write(path, made)
    return made, True


def lay(params, made, check_mode):
    """Lay the files of a mode; returns what the service has to be run with."""
    capture = params["state"] == "capture"
    result = {"tag": "", "launch": "", "container_command": ""}
    manager, service = made["manager"], made["service"]
    argv = layer.capture_argv(made, params["arguments"])
    environment = {key: str(value) for key, value in params["environment"].items()}
    tag = layer.tag_of(argv, environment, made["environment"])
    if manager == "process":
        serving, capturing = layer.process_files(params["state_dir"], params["name"])
        files = {serving: pr.launch_of(made), capturing: pr.launch_of(made, argv[1:], environment)}
        result["launch"] = capturing if capture else serving
        changed = layer.lay_files(files, check_mode)
    elif manager == "unit":
        if capture:
            layer.check_there(made)
        files = layer.unit_layer(made, argv, environment, tag)
        changed = layer.lay_files(files, check_mode) if capture else layer.take_files(files, check_mode)
        result["tag"] = tag if capture else ""
    elif capture:
        files = layer.container_layer(made, argv, environment, tag, params["package"])
        if not check_mode:
            os.makedirs(environment[layer.GATE], mode=0o700, exist_ok=True)
        changed = layer.lay_files(files, check_mode)
        result.update(tag=tag, container_command=layer.container_files(service)[0])
    else:
        changed = layer.take_files(layer.container_files(service), check_mode)
    return dict(result, changed_files=changed)


def describe(pids):
    return "; ".join("pid %s: %s" % (pid, hp.command_of(pid)) for pid in pids)


def stop(params, pid, check_mode):
    """End a server that was started by hand; returns a message where that cannot be proved, else ""."""
    if check_mode:
        return ""
    argv = hp.process(pid)["argv"]
    members = [one for one in map(hp.identity, hp.family_of(pid)) if one]
    wrappers = wrappers_of(pid)
    at_work = gpus.compute_processes()
    own = {one for one, _start in members}
    used, strangers = {one["gpu"] for one in at_work if one["pid"] in own}, {one["pid"] for one in at_work} - own
    hp.tell([one for one in members if one[0] == pid], signal.SIGTERM)
    if not hp.wait_until_gone(members, params["stop_timeout"]):
        hp.tell(members, signal.SIGKILL)
    if not hp.wait_until_gone(members, REAP_SECONDS):
        return "stopped, but not gone: %s. End these processes, then run again" % describe(one for one, _start in hp.living(members))
    revived = watch_wrappers(params, argv, wrappers)
    if revived:
        return revived
    holders = hp.port_holders(params["port"], params["host"] or None)
    if holders:
        return "stopped, but port %d is still taken: %s. End these processes, then run again" % (
            params["port"],
            describe(holder["pid"] for holder in holders),
        )
    left = gpus.left_on(used, strangers) if used else []
    if left:
        return "stopped, but its GPUs are still used: %s. End these processes, then run again" % describe(one["pid"] for one in left)
    return ""


def wrappers_of(pid):
    """The processes above a server that may start it again, nearest first: a script, and the loop that calls the script."""
    found = []
    for above in hp.ancestors(pid):
        argv = (hp.process(above) or {"argv": []})["argv"]
        name = os.path.basename(hp.command_of(above).split(" ")[0].lstrip("-").rstrip(":"))
        typed = name in HOLDERS or is_typed_in(argv)
        identity = None if typed else hp.identity(above)
        if identity:
            found.append(identity)
    return found


def watch_wrappers(params, argv, wrappers):
    """A message where something starts the server again, else ""."""
    deadline = time.monotonic() + (params["revive_seconds"] if wrappers else 1.0)
    while time.monotonic() < deadline:
        left = [pid for pid, _start in hp.living(wrappers)]
        for one in hp.same_command(argv):
            above = next((pid for pid in hp.ancestors(one) if pid in left), hp.parent(one))
            return "process %d started the server again (pid %d): %s. Stop it, or run the server as a systemd unit" % (
                above,
                one,
                hp.command_of(above),
            )
        if wrappers and not left:
            return ""
        time.sleep(0.25)
    return ""


def work(module):
    """Everything that the module returns."""
    params = module.params
    located = found.locate(params)
    result = {"changed": False, "manager": located["manager"], "service": located["service"], "changed_files": False}
    result.update(tag="", launch="", container_command="")
    if located["manager"] in found.OURS:
        return result
    if params["state"] == "stopped":
        managed = sq.query("auto", params["name"], params["state_dir"])["processes"]
        if located["manager"] == "process" and located["pid"] is not None and located["pid"] not in managed:
            trouble = stop(params, located["pid"], module.check_mode)
            if trouble:
                module.fail_json(msg="%s: %s" % (params["name"], trouble), **result)
            result["changed"] = True
        return result
    made, changed = record(params, located, module.check_mode)
    # The record is a copy of what is there: it changes nothing of the server.
    result["recorded"] = changed
    if params["state"] in ("capture", "serving"):
        result.update(lay(params, made, module.check_mode))
        result["changed"] = result["changed_files"]
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "manager": {"type": "str", "choices": list(found.MANAGERS), "default": "auto"},
            "state": {"type": "str", "choices": ["recorded", "capture", "serving", "stopped"], "default": "recorded"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 30000},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "environment": {"type": "dict", "default": {}},
            "package": {"type": "path"},
            "stop_timeout": {"type": "int", "default": 120},
            "revive_seconds": {"type": "int", "default": 15},
        },
        supports_check_mode=True,
    )
    if module.params["manager"] in cq.ENGINES and module.params["state"] == "capture" and not module.params["package"]:
        module.fail_json(msg="package: the directory of SGLang in the container is needed")
    try:
        module.exit_json(**work(module))
    except (sq.ServiceError, pr.RecordError) as error:
        module.fail_json(msg="%s: %s" % (module.params["name"], error))
    except OSError as error:
        module.fail_json(msg="%s: %s" % (module.params["name"], error))


if __name__ == "__main__":
    main()
