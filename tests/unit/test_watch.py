# SPDX-License-Identifier: GPL-3.0-or-later
"""The polling action: what ends it, what it tolerates, what it shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.hidden_state.bridge.plugins.action import watch

NOW = [0.0]


@pytest.fixture
def shown(monkeypatch):
    """Lines shown; time passes only by sleeping."""
    lines = []
    NOW[0] = 0.0
    monkeypatch.setattr(watch.display, "display", lambda text, **_more: lines.append(text))
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: NOW[0], sleep=lambda s: NOW.__setitem__(0, NOW[0] + s)))
    return lines


def run(answers, check_mode=False, **args):
    """Run the action over a list of answers (the last is repeated); exceptions are raised."""
    action = watch.ActionModule.__new__(watch.ActionModule)
    action._task = SimpleNamespace(
        check_mode=check_mode,
        async_val=0,
        action="hidden_state.bridge.watch",
        args={"module": "hidden_state.bridge.sglang_health", "until": ["ready"], "fail_on": ["failed", "dead"], **args},
    )
    action._connection = SimpleNamespace(reset=lambda: None, _shell=SimpleNamespace(tmpdir=None))
    action._templar = action._loader = action._play_context = None
    answers = list(answers)

    def poll(**_more):
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    action._execute_module = poll
    return action.run(task_vars={"inventory_hostname": "gpu1"})


WAITING = {"state": "waiting", "line": "loading"}
READY = {"state": "ready", "line": "ready", "server": {"version": "0.5.20"}, "invocation": {"module_args": {}}}
DEAD = {"state": "dead", "line": "gone"}


def test_until(shown):
    result = run([WAITING, WAITING, READY], interval=5)
    assert (result["state"], result["polls"], result["waited"], result["changed"]) == ("ready", 3, 10, False)
    assert result["server"] == {"version": "0.5.20"} and "invocation" not in result and not result.get("failed")


def test_a_line_is_shown_when_it_changes_and_now_and_then(shown):
    run([*[WAITING] * 8, READY], interval=5)
    assert shown == ["gpu1: loading (0 s)", "gpu1: loading (30 s)", "gpu1: ready (40 s)"]


def test_a_bad_state_ends_it_at_once_with_its_message(shown):
    result = run([WAITING, {"state": "failed", "line": "died", "message": "exit status 1. Hint: x"}], message="the server")
    assert result["failed"] and result["polls"] == 2
    assert result["msg"] == "the server: failed: exit status 1. Hint: x"


def test_the_log_is_told_once(shown):
    log = ["line %d" % number for number in range(40)]
    result = run([{"state": "failed", "line": "died", "message": "it died", "log_tail": log}], message="the server")
    assert result["msg"].startswith("the server: failed: it died\nThe last lines of its log:\nline 20\n")
    assert result["msg"].endswith("line 39") and "log_tail" not in result and "message" not in result


def test_timeout_names_the_last_line(shown):
    result = run([WAITING], interval=5, timeout=20, message="the server")
    assert result["failed"] and result["waited"] <= 20
    assert result["msg"] == "the server: not ready within 20 s: last loading (waiting)"


def test_tolerated_states_count_in_a_row_only(shown):
    tolerate = {"dead": 2}
    assert run([DEAD, DEAD, WAITING, DEAD, DEAD, READY], tolerate=tolerate)["state"] == "ready"
    result = run([DEAD, DEAD, DEAD], tolerate=tolerate)
    assert result["failed"] and result["polls"] == 3


def test_a_host_that_is_out_of_reach_for_a_while(shown):
    gone = AnsibleConnectionFailure("no route")
    assert run([WAITING, gone, gone, READY])["state"] == "ready"
    result = run([WAITING, gone], tolerate={"unreachable": 1})
    assert result["failed"] and "no route" in result["msg"] and result["polls"] == 3


def test_a_module_that_fails_ends_it(shown):
    result = run([WAITING, {"failed": True, "msg": "no such unit"}])
    assert result["failed"] and result["msg"] == "no such unit"


def test_a_module_that_fails_at_times(shown):
    failed = {"failed": True, "msg": "systemctl show x: timed out\nmore"}
    result = run([WAITING, failed, failed, WAITING, failed, failed, READY], interval=5, tolerate={"error": 2})
    assert (result["state"], result["polls"]) == ("ready", 7) and "failed" not in result
    assert "gpu1: cannot be looked at: systemctl show x: timed out (5 s)" in shown
    result = run([WAITING, failed], interval=5, tolerate={"error": 2})
    assert result["failed"] and result["polls"] == 4 and result["msg"] == failed["msg"]


def test_a_worker_whose_playbook_was_killed_looks_no_more(shown, monkeypatch):
    parents = iter([7, 7, 7, 1])
    monkeypatch.setattr(watch.os, "getppid", lambda: next(parents))
    result = run([WAITING], message="the server")
    assert (result["polls"], result["msg"]) == (2, "the server: the playbook is gone")


def test_check_mode_waits_for_nothing(shown):
    result = run([WAITING], check_mode=True)
    assert result["skipped"] and not result["changed"]
