# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The service that brings a capturing server back once its extraction has ended and no play looks on.

PRIVATE to the collection. It runs on the host without Ansible: ``return.pyz STATE_DIR NAME``. It goes by what is there (the order, the
record of the state before, the running process), so that after a crash it goes on from wherever that was. Exit status: 0 nothing is left
to do, 1 the server cannot be brought back (the journal and the log say why), 2 usage.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_return as sr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import api_key_of
from ansible_collections.hidden_state.bridge.plugins.module_utils.service_worker import Worker

# Between the end of a process and its next start by the manager, an extractor looks ended.
LOOKS = 2
TRIES = 3
PROBE_SECONDS = 10


def say(text):
    """A line for the service's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Done(Exception):
    """How the worker ended."""


class _Call:
    """What the worker takes for its module."""

    check_mode = _diff = False

    def __init__(self, order, state, enabled=None):
        unused = {"tag": "", "launch": None, "container_command": None, "command": [], "newer_than": [], "supervisord": []}
        self.params = dict(unused, state=state, enabled=enabled, timeout=180)
        self.params.update({key: order[key] for key in ("manager", "foreign", "state_dir", "host", "port", "port_timeout", "stop_timeout")})
        self.params.update(name=order["service"], visible_gpus=order["visible_gpus"] or None)

    def exit_json(self, **_result):
        raise _Done

    def fail_json(self, msg, **_result):
        raise sr.ReturnError(msg)


def tell(order, state, enabled=None):
    """Bring the server's service to a state, with the proofs of the module managed_service. Raises ReturnError, ServiceError."""
    try:
        Worker(_Call(order, state, enabled)).run()
    except _Done:
        return


def at_work(extraction):
    """Whether the extractor has something left to do: it lives, or its manager is about to start it again."""
    if os.path.isdir(extraction["output_dir"]) and hs_manifest.is_locked(extraction["output_dir"]):
        return True
    asked = [extraction[key] for key in ("manager", "name", "state_dir")]
    return sq.query(*asked)["state"] in ("running", "starting", "stopping")


def decide(before, phase, service):
    """What is to be done of: restart, start, stop, wait, leave, forget, look, fail.

    before: the state to return to, None where a play has returned to it. phase: state of the journal. service: as of service_query.query.
    """
    runs = service["pid"] is not None
    capturing = runs and layer.captures(service["environment"])
    if before is None:
        return "forget"
    if service["state"] == "stopping":
        return "look"
    if runs and service["environment"] is None:
        return "fail"
    if before != "serving":
        return "leave" if runs and not capturing else "stop"
    if capturing:
        return "restart"
    ours = phase in ("returning", "started")
    if runs:
        return "wait" if ours else "leave"
    if phase == "started" and service["state"] == "starting":
        return "wait"
    if service["state"] == "starting":
        return "restart"
    # It does not run. Only where that is of our own doing is it started.
    return {"returning": "start", "started": "fail"}.get(phase, "leave")


class Service:
    """One server's return. ``turn`` is one look, and what follows from it."""

    def __init__(self, state_dir, name):
        self.returning = sr.Return(state_dir, name)

    def is_due(self, order):
        """Whether no play looks on, and the extractor has ended."""
        if time.time() < self.returning.attended() + order["after"]:
            return False
        return not at_work(order["extraction"])

    def turn(self):
        """Do what is to be done; returns whether that was all. Raises ReturnError, ServiceError, RecordError, OSError."""
        returning = self.returning
        try:
            with returning.lock():
                # A play may have come between the look and the lock.
                order = returning.order()
                return order is None or (self.is_due(order) and self._act(order))
        except sr.Taken:
            return False

    def _act(self, order):
        before = found.state_before(order["state_dir"], self.returning.name)
        phase = self.returning.journal().get("state")
        service = sq.query(order["manager"], order["service"], order["state_dir"])
        action = decide(before, phase, service)
        if action == "look":
            return False
        if action == "wait":
            if phase == "returning":
                self.returning.note("started")
            return self._wait(order, service)
        if action == "fail":
            if service["pid"]:
                raise sr.ReturnError("the environment of process %d cannot be read" % service["pid"])
            raise sr.ReturnError("started in serving mode, it ended%s" % self._log(order, service))
        if action in ("restart", "start"):
            return self._restart(order, phase, action)
        if action == "stop":
            return self._stop(order, before)
        if action == "leave":
            # supervisord takes a program in only while it does not run.
            self._take_layer(order, reload=service["pid"] is None or order["manager"] == "systemd")
            what = "the server serves already" if service["pid"] else "the server was stopped meanwhile. It serves once it is started"
            self.returning.note("left", what)
        self.returning.drop()
        return True

    def _take_layer(self, order, reload=False):
        layer.take_files(order["layer"])
        if reload:
            tell(order, "reloaded")

    def _restart(self, order, phase, action):
        if phase != "returning":
            self.returning.note("returning")
        say("%s: nobody looks on and the extraction has ended: back to serving" % order["service"])
        self._take_layer(order)
        tell(order, "restarted" if action == "restart" else "started")
        self.returning.note("started")
        return False

    def _stop(self, order, before):
        self.returning.note("returning", to=before)
        say("%s: nobody looks on and the extraction has ended: back to %s" % (order["service"], before))
        own = before == "absent" and not order["foreign"]
        tell(order, "stopped", enabled=False if own else None)
        self._take_layer(order)
        for path in order["own"] if own else []:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        tell(order, "reloaded")
        return self._finish(order, before)

    def _wait(self, order, service):
        """Whether the server that runs in serving mode is ready, which ends it all."""
        key = order["api_key"] or api_key_of(service["pid"])
        health, detail = probe.health(order["url"], key, PROBE_SECONDS)
        try:
            trouble = probe.generate_once(order["url"], key, PROBE_SECONDS) if health == "ok" else "/health: %s" % detail
        except probe.Refused as error:
            raise sr.ReturnError("started in serving mode, but it cannot be asked whether it is ready: %s" % error) from error
        if not trouble:
            return self._finish(order, "serving")
        since = self.returning.journal().get("since", time.time())
        if time.time() > since + order["health_timeout"]:
            raise sr.ReturnError("not ready %d s after its start (%s)%s" % (order["health_timeout"], trouble, self._log(order, service)))
        return False

    def _finish(self, order, before):
        if before == "serving":
            tell(order, "rejoined")
        # What is recorded has a play run those tasks.
        tasks_left = order["after_start"] and before == "serving"
        why = "; the tasks of sglang_server_tasks_after_start wait for extract.yml or serve.yml" if tasks_left else ""
        self.returning.note("returned", why, before)
        if not tasks_left:
            try:
                os.unlink(found.before_path(order["state_dir"], self.returning.name))
            except FileNotFoundError:
                pass
        self.returning.drop()
        say("%s: done%s" % (order["service"], why))
        return True

    @staticmethod
    def _log(order, service):
        tail = probe.telling(sq.log_tail(order["manager"], order["service"], order["state_dir"], lines=20, pid=service["pid"]))
        hint = probe.hint(tail)
        return "; hint: %s" % hint if hint else ""


def run(state_dir, name):
    """Look until nothing is left to do; returns the exit status."""
    service, looks, failures = Service(state_dir, name), 0, 0
    say("hidden_state_bridge: brings %s back once nobody looks on" % name)
    while True:
        order = service.returning.order()
        if order is None:
            say("a play has brought %s back, or asks for no return by itself" % name)
            return 0
        try:
            looks = looks + 1 if service.is_due(order) else 0
        except (sq.ServiceError, OSError) as error:
            say("whether the extraction has ended cannot be seen: %s" % error)
            looks = 0
        try:
            if looks >= LOOKS and service.turn():
                return 0
        except (sq.ServiceError, sr.ReturnError, pr.RecordError, OSError) as error:
            failures += 1
            say("try %d of %d: %s" % (failures, TRIES, error))
            if failures == TRIES:
                service.returning.note("failed", str(error), service.returning.journal().get("to", "serving"))
                return 1
        time.sleep(order["interval"])


def main():
    """The exit status."""
    if len(sys.argv) != 3:
        sys.stderr.write("usage: return.pyz STATE_DIR NAME\n")
        return 2
    try:
        return run(*sys.argv[1:])
    except pr.RecordError as error:
        say(str(error))
        return 1
