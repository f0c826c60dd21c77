# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Poll a module on the host until it reports a state, showing its line of progress when that changes."""

from __future__ import annotations

import os
import time

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

# A wait that shows no progress still says that it is alive.
HEARTBEAT_SECONDS = 30

LOG_LINES = 20


class ActionModule(ActionBase):
    """See the documentation of the module of the same name."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _result, args = self.validate_argument_spec(
            argument_spec={
                "module": {"type": "str", "required": True},
                "arguments": {"type": "dict", "default": {}},
                "message": {"type": "str", "default": ""},
                "until": {"type": "list", "elements": "str", "required": True},
                "fail_on": {"type": "list", "elements": "str", "default": []},
                "tolerate": {"type": "dict", "default": {"unreachable": 3}},
                "interval": {"type": "float", "default": 5},
                "timeout": {"type": "float", "default": 0},
            }
        )
        if self._task.check_mode:
            return {"changed": False, "skipped": True, "msg": "nothing to wait for in check mode"}
        host = (task_vars or {}).get("inventory_hostname", "")
        return self._watch(args, host, task_vars)

    def _poll(self, args, task_vars):
        """The module's result, or one with the state ``unreachable``."""
        try:
            return self._execute_module(module_name=args["module"], module_args=dict(args["arguments"]), task_vars=task_vars)
        except AnsibleConnectionFailure as error:
            try:
                self._connection.reset()
            except (AnsibleError, AttributeError):
                display.vvv("the connection has nothing to reset")
            return {"state": "unreachable", "line": "cannot be reached: %s" % error}

    @staticmethod
    def _failure(result, head, detail):
        """The result as a failure whose message says everything once."""
        tail = result.pop("log_tail", None) or []
        result.pop("message", None)
        message = head + (": " + detail if detail else "")
        if tail:
            message += "\nThe last lines of its log:\n" + "\n".join(tail[-LOG_LINES:])
        return dict(result, failed=True, msg=message)

    def _watch(self, args, host, task_vars):
        begun, playbook = time.monotonic(), os.getppid()
        what = args["message"] or args["module"]
        tolerate = {state: int(number) for state, number in args["tolerate"].items()}
        fail_on = set(args["fail_on"]) | {"unreachable"}
        shown, shown_at, polls, repeated, bad = None, 0.0, 0, 0, None
        while True:
            # A playbook that is killed leaves its workers behind. Looks of theirs would be taken for those of a play.
            if os.getppid() != playbook:
                return self._failure({"changed": False, "polls": polls}, what, "the playbook is gone")
            found = self._poll(args, task_vars)
            polls += 1
            found.pop("invocation", None)
            waited = round(time.monotonic() - begun, 1)
            result = dict(found, changed=False, polls=polls, waited=waited)
            state, line = found.get("state"), found.get("line") or ""
            if found.get("failed"):
                # A service manager under load does not answer at times, or a file system.
                state, line = "error", "cannot be looked at: %s" % (found.get("msg") or "no message").splitlines()[0]
            if line and (line != shown or waited - shown_at >= HEARTBEAT_SECONDS):
                display.display("%s: %s (%d s)" % (host, line, waited))
                shown, shown_at = line, waited
            if state in args["until"]:
                return result
            repeated = repeated + 1 if state == bad else 1
            bad = state
            if state == "error" and repeated > tolerate.get(state, 0):
                return result
            if state in fail_on and repeated > tolerate.get(state, 0):
                return self._failure(result, "%s: %s" % (what, state), found.get("message") or line)
            if args["timeout"] and waited + args["interval"] > args["timeout"]:
                late = "%s: not %s within %d s" % (what, " or ".join(args["until"]), args["timeout"])
                return self._failure(result, late, "last %s (%s)" % (line or "no progress", state))
            time.sleep(args["interval"])
