#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_service
short_description: Bring one service of a service manager or container engine to a state, judged by its running process
version_added: 0.1.0
description:
  - Starts, restarts or stops a service whose unit or program file already lies on the host.
  - Whether a running service is restarted depends on what its process was started with (a hash in its environment)
    and when, never on what a task changed.
  - A stop ends with proof that the processes and the port are gone.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Reports what would be done, and does nothing.
    support: full
  diff_mode:
    description: Shows the state before and after.
    support: full
options:
  name:
    description: Name of the service, without C(.service).
    type: str
    required: true
  state:
    description:
      - V(query) only looks; V(started), V(restarted) and V(stopped) act.
      - V(reloaded) makes the manager take notice of files that were changed or removed; the service must not be running.
    type: str
    choices: [query, started, restarted, stopped, reloaded]
    default: query
  manager:
    description: Service manager; V(auto) is systemd where systemd runs the host, supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor, podman, docker]
    default: auto
  state_dir:
    description: Directory of the collection's state on the host; supervisord's socket lies under it.
    type: path
    default: /var/lib/hidden_state_bridge
  tag:
    description:
      - Hash of everything the unit says; a process that carries another one is restarted.
      - Empty for a service of the operator's without a layer of ours; a process that carries a hash is restarted then.
    type: str
    default: ''
  launch:
    description: File on the host that says with which arguments and environment the process has to run, in the place of O(tag).
    type: path
  container_command:
    description: File on the host that holds the command of the capture container. Without it the operator's own container is started.
    type: path
  command:
    description: Arguments the process is meant to have; only to say in what a running process differs.
    type: list
    elements: str
    default: []
  newer_than:
    description: A process started before one of these files was written is restarted.
    type: list
    elements: path
    default: []
  host:
    description: Address of O(port).
    type: str
    default: ''
  port:
    description: TCP port that the service listens on; it has to be free before a start and after a stop. 0 for none.
    type: int
    default: 0
  port_timeout:
    description: Seconds that another process is given to leave O(port) before a start is refused.
    type: int
    default: 0
  enabled:
    description: Whether the service starts with the host (systemd only). Left as it is when not given.
    type: bool
  timeout:
    description: Seconds after which a start that the manager has not taken is a failure.
    type: int
    default: 30
  stop_timeout:
    description: Seconds that the manager grants between SIGTERM and SIGKILL.
    type: int
    default: 120
  supervisord:
    description: Command that starts supervisord, for a start where none is running.
    type: list
    elements: str
    default: []
  visible_gpus:
    description: Value of C(CUDA_VISIBLE_DEVICES) of the service; not given means all GPUs.
    type: str
  secrets:
    description: Words that are blotted out of everything this module returns.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Start the server, or restart one that runs with other settings
  hidden_state.bridge.managed_service:
    name: sglang
    state: started
    tag: 5bd1cf
    port: 30000
"""

RETURN = r"""
action:
  description: What was done, or would be in check mode (none, start, restart, stop).
  returned: always
  type: str
reasons:
  description: Why the running process has to be restarted.
  returned: always
  type: list
  elements: str
service:
  description:
    - State afterwards; V(state) (running, starting, stopping, stopped, failed, absent), V(pid), V(since) (seconds since
      the epoch), V(argv), V(manager), V(processes) and V(detail).
  returned: always
  type: dict
port_holders:
  description: Processes that listen on O(port) without belonging to the service.
  returned: always
  type: list
  elements: dict
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import gpu_processes as gpus
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_control
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.service_reasons import restart_reasons

# Orphans of a process group that the manager has ended need a moment to be reaped.
REAP_SECONDS = 10.0


class Worker:
    """One run of the module."""

    def __init__(self, module):
        self.module = module
        self.params = module.params
        self.manager = sq.resolve_manager(self.params["manager"])
        self.control = service_control.of(self.manager, self.params)
        self.result = {"changed": False, "action": "none", "reasons": []}

    def look(self):
        return sq.query(self.manager, self.params["name"], self.params["state_dir"])

    def holders(self, own=()):
        if not self.params["port"]:
            return []
        found = hp.port_holders(self.params["port"], self.params["host"] or None)
        return [holder for holder in found if holder["pid"] not in own]

    def strangers(self, own):
        """Who else holds the port after the time it was given to become free."""
        deadline = time.monotonic() + (0 if self.module.check_mode else self.params["port_timeout"])
        while True:
            found = self.holders(own)
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def fail(self, message, **more):
        self.result.update(more)
        self.result["service"] = self.report(self.look())
        self.module.fail_json(msg="%s: %s" % (self.params["name"], message), **self.result)

    def fail_listing(self, message, holders, remedy):
        lines = ["pid %s: %s" % (holder["pid"], holder["command"]) for holder in holders]
        self.fail("%s: %s. %s" % (message, "; ".join(lines), remedy), port_holders=holders)

    @staticmethod
    def report(service):
        """What of a query leaves the host: never the environment."""
        keep = ("manager", "name", "state", "pid", "since", "argv", "processes", "detail")
        report = {key: service[key] for key in keep}
        report["argv"] = hp.masked(report["argv"])
        return report

    def stop(self, before):
        """Stop, and prove it."""
        members = [one for one in map(hp.identity, before["processes"]) if one]
        environment = before["environment"] or {}
        own = {pid for pid, _start in members}
        at_work = gpus.compute_processes()
        used = {one["gpu"] for one in at_work if one["pid"] in own} or gpus.gpus_of(environment)
        # Who shares a GPU with a running server by the operator's will may go on.
        strangers = {one["pid"] for one in at_work} - own
        self.control.stop(members)
        if not hp.wait_until_gone(members, REAP_SECONDS):
            left = [{"pid": pid, "command": hp.command_of(pid)} for pid, _start in hp.living(members)]
            self.fail_listing("stopped, but not gone", left, "End these processes, then run again")
        if self.holders():
            self.fail_listing(
                "stopped, but port %d is still taken" % self.params["port"],
                self.holders(),
                "End these processes, then run again",
            )
        self.prove_gpus_free(lambda: gpus.left_on(used, strangers), "stopped, but its GPUs are still used")

    def prove_gpus_free(self, ask, message):
        """The driver lets go of a process a moment after its end."""
        deadline = time.monotonic() + REAP_SECONDS
        while True:
            left = ask()
            if not left:
                return
            if time.monotonic() > deadline:
                self.fail_listing(message, left, "End these processes, then run again")
            time.sleep(0.5)

    def start(self):
        holders = self.holders()
        if holders:
            self.fail_listing("port %d is taken" % self.params["port"], holders, "Stop that process or give the service another port")
        visible = self.params["visible_gpus"]
        own_gpus = gpus.gpus_of({"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {})
        self.prove_gpus_free(lambda: gpus.orphans_on(own_gpus), "not started, as workers of an earlier server hold its GPUs")
        try:
            self.control.start()
        except sq.ServiceError as error:
            self.fail_to_start(str(error))
        deadline = time.monotonic() + self.params["timeout"]
        while True:
            service = self.look()
            if service["state"] == "running" and service["pid"]:
                return
            if service["state"] in ("failed", "stopped", "absent") or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.fail_to_start(service["state"] + (", " + service["detail"] if service["detail"] else ""))

    def fail_to_start(self, why):
        tail = sq.log_tail(self.manager, self.params["name"], self.params["state_dir"], lines=20)
        self.fail("did not start (%s). The last lines of its log:\n%s" % (why, "\n".join(tail)))

    def decide(self, before):
        """The action that leads to the wanted state."""
        state, runs = self.params["state"], before["state"] in ("running", "starting", "stopping")
        if state in ("query", "reloaded"):
            return "none"
        if state == "stopped":
            return "stop" if runs or before["processes"] else "none"
        if not runs and before["processes"]:
            self.result["reasons"] = ["processes of an earlier start are left: %s" % before["processes"]]
            return "restart"
        if not runs:
            return "start"
        if state == "restarted":
            return "restart"
        if before["state"] != "running" or before["pid"] is None:
            self.result["reasons"] = ["is %s" % before["state"]]
        else:
            launch = pr.read(self.params["launch"]) if self.params["launch"] else None
            self.result["reasons"] = restart_reasons(before, self.params["tag"], self.params["command"], self.params["newer_than"], launch)
        return "restart" if self.result["reasons"] else "none"

    def set_enabled(self):
        wanted = self.params["enabled"]
        if wanted is None or self.params["state"] in ("query", "reloaded"):
            return False
        has = self.control.is_enabled()
        if has is None or has == wanted:
            return False
        if not self.module.check_mode:
            self.control.enable(wanted)
        return True

    def run(self):
        before = self.look()
        action = self.result["action"] = self.decide(before)
        self.result["changed"] = action != "none"
        if action in ("start", "restart"):
            strangers = self.strangers(own=before["processes"])
            if strangers:
                # Known before anything stops: a running server is not given up for a start that cannot succeed.
                self.result.update(changed=False, action="none")
                waited = " and was not left within %d s" % self.params["port_timeout"] if self.params["port_timeout"] else ""
                self.fail_listing(
                    "port %d is taken%s" % (self.params["port"], waited),
                    strangers,
                    "Stop that process or give the service another port",
                )
        if self.params["state"] == "stopped" and action == "none" and self.holders():
            self.fail_listing(
                "does not run, but port %d is taken" % self.params["port"],
                self.holders(),
                "A process that this service manager did not start has to be stopped by hand",
            )
        if not self.module.check_mode:
            if action in ("stop", "restart"):
                self.stop(before)
            if action in ("start", "restart"):
                self.start()
            if action == "none" and self.params["state"] == "started":
                self.control.refresh()
            if self.params["state"] == "reloaded":
                self.control.take_notice()
        self.result["changed"] = self.set_enabled() or self.result["changed"]
        after = before if self.module.check_mode else self.look()
        self.result["service"] = self.report(after)
        self.result["port_holders"] = self.holders(own=after["processes"])
        if self.module._diff and action != "none":
            becomes = "stopped" if action == "stop" else "running"
            self.result["diff"] = {
                "before": "%s %s\n" % (self.params["name"], before["state"]),
                "after": "%s %s\n" % (self.params["name"], "restarted" if action == "restart" else becomes),
            }
        self.module.exit_json(**self.result)


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {
                "type": "str",
                "choices": ["query", "started", "restarted", "stopped", "reloaded"],
                "default": "query",
            },
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor", "podman", "docker"], "default": "auto"},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "tag": {"type": "str", "default": ""},
            "launch": {"type": "path"},
            "container_command": {"type": "path"},
            "command": {"type": "list", "elements": "str", "default": []},
            "newer_than": {"type": "list", "elements": "path", "default": []},
            "host": {"type": "str", "default": ""},
            "port": {"type": "int", "default": 0},
            "port_timeout": {"type": "int", "default": 0},
            "enabled": {"type": "bool"},
            "timeout": {"type": "int", "default": 30},
            "stop_timeout": {"type": "int", "default": 120},
            "supervisord": {"type": "list", "elements": "str", "default": []},
            "visible_gpus": {"type": "str"},
            "secrets": {"type": "list", "elements": "str", "default": [], "no_log": True},
        },
        supports_check_mode=True,
    )
    try:
        worker = Worker(module)
    except (sq.ServiceError, pr.RecordError) as error:
        module.fail_json(msg=str(error))
    try:
        worker.run()
    except (sq.ServiceError, pr.RecordError) as error:
        # With what was begun, so that a caller knows what to take back.
        module.fail_json(msg="%s: %s" % (module.params["name"], error), **worker.result)


if __name__ == "__main__":
    main()
