# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Brings one service to a state, judged by its running process, and proves it.

PRIVATE to the collection. Whoever calls it is a module, or is used like one: ``params`` (those of managed_service), ``check_mode``,
``_diff``, ``exit_json`` and ``fail_json``.
"""

from __future__ import annotations

import time

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_ports as cp
from ansible_collections.hidden_state.bridge.plugins.module_utils import gpu_processes as gpus
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_control
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.service_reasons import restart_reasons

# Orphans of a process group that the manager has ended need a moment to be reaped.
REAP_SECONDS = 10.0
# A process that its manager still calls starting has been taken for good once it is that old: a program that cannot be run ends at once.
TAKEN_SECONDS = 3.0
# States that neither start nor stop the service.
LOOKING = ("query", "unclaimed", "reloaded", "rejoined")


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
        return cp.strangers(self.params["port"], self.params["host"] or None, own, self.manager, self.params["name"])

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

    def orphans(self, own=()):
        """Workers of a server that is gone, on the service's GPUs."""
        visible = self.params["visible_gpus"]
        return gpus.orphans_on(gpus.gpus_of({"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}), own)

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
        self.prove_gpus_free(self.orphans, "not started, as workers of an earlier server hold its GPUs")
        try:
            self.control.start()
        except sq.ServiceError as error:
            self.fail_to_start(str(error))
        begun = time.monotonic()
        while True:
            service = self.look()
            waited = time.monotonic() - begun
            late = waited > self.params["timeout"]
            # Whether it becomes ready is for others to wait for, who see how it gets on.
            taken = waited > TAKEN_SECONDS if service["pid"] else late and service.get("control")
            if service["pid"] and service["state"] == "running" or taken and service["state"] == "starting":
                return
            if service["state"] in ("failed", "stopped", "absent") or service.get("revived") or late:
                break
            time.sleep(0.1)
        detail = service["detail"] or ("its manager gave the start up" if service["state"] == "stopped" else "")
        self.fail_to_start(service["state"] + (", " + detail if detail else ""))

    def fail_to_start(self, why):
        tail = sq.log_tail(self.manager, self.params["name"], self.params["state_dir"], lines=20)
        self.fail("did not start (%s). The last lines of its log:\n%s" % (why, "\n".join(tail)))

    def decide(self, before):
        """The action that leads to the wanted state."""
        state, runs = self.params["state"], before["state"] in ("running", "starting", "stopping")
        if state in LOOKING:
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
        # A unit that tells when it is ready is starting for as long as its model loads.
        if before["state"] == "stopping" or before["pid"] is None:
            self.result["reasons"] = ["is %s" % before["state"]]
        else:
            launch = pr.read(self.params["launch"]) if self.params["launch"] else None
            self.result["reasons"] = restart_reasons(before, self.params["tag"], self.params["command"], self.params["newer_than"], launch)
        return "restart" if self.result["reasons"] else "none"

    def set_enabled(self):
        wanted = self.params["enabled"]
        if wanted is None or self.params["state"] in LOOKING:
            return False
        has = self.control.is_enabled()
        if has is None or has == wanted:
            return False
        if not self.module.check_mode:
            self.control.enable(wanted)
        return True

    def run(self):
        acts = self.params["state"] not in LOOKING and not self.params["foreign"]
        if self.manager == "systemd" and (acts or self.params["state"] == "unclaimed"):
            sq.refuse_foreign_unit(self.params["name"])
        before = self.look()
        self.result["service"] = self.report(before)
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
        if action == "restart":
            orphans = self.orphans(own=before["processes"])
            if orphans:
                self.result.update(changed=False, action="none")
                self.fail_listing(
                    "not restarted, as workers of an earlier server hold its GPUs", orphans, "End these processes, then run again"
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
        if self.params["state"] == "rejoined":
            self.result["changed"] = bool(self.control.stopped_along() if self.module.check_mode else self.control.rejoin())
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
