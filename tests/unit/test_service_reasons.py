# SPDX-License-Identifier: GPL-3.0-or-later
"""When a running process is replaced."""

from __future__ import annotations

import os

from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.service_reasons import restart_reasons


def running(**changed):
    service = {"pid": 7, "since": 1000.0, "argv": ["python", "--a"], "environment": {sq.TAG_VARIABLE: "right"}}
    return dict(service, **changed)


def test_a_right_process_is_left_alone(tmp_path):
    old = tmp_path / "model.py"
    old.write_text("")
    os.utime(old, (999, 999))
    assert restart_reasons(running(), "right", ["python", "--a"], [str(old), str(tmp_path / "none")]) == []


def test_other_arguments_are_told():
    (reason,) = restart_reasons(running(), "wrong", ["python", "--b"], [])
    assert "lacks [--b], has [--a]" in reason


def test_other_settings_are_told():
    (reason,) = restart_reasons(running(), "wrong", ["python", "--a"], [])
    assert reason == "runs with other settings than wanted"


def test_a_process_of_someone_else_is_not_taken_for_ours():
    assert restart_reasons(running(environment={}), "right", [], [])
    (reason,) = restart_reasons(running(environment=None), "right", [], [])
    assert "cannot be read" in reason


def test_a_file_written_after_the_start(tmp_path):
    patched = tmp_path / "model.py"
    patched.write_text("")
    os.utime(patched, (1001, 1001))
    assert restart_reasons(running(), "right", [], [str(patched)]) == []
    os.utime(patched, (1010, 1010))
    (reason,) = restart_reasons(running(), "right", [], [str(patched)])
    assert str(patched) in reason


def test_a_server_of_the_operator_carries_no_hash():
    assert restart_reasons(running(environment={}), "", [], []) == []
    assert restart_reasons(running(), "", [], []) == ["runs with a layer of ours"]


def test_a_process_is_compared_with_its_record():
    launch = {"argv": ["python", "--a"], "environment": {sq.TAG_VARIABLE: "right"}}
    assert restart_reasons(running(), "", [], [], launch) == []
    (arguments,) = restart_reasons(running(argv=["python", "--api-key", "x"]), "", [], [], launch)
    assert arguments == "runs with other arguments: lacks [--a], has [--api-key ********]"
    (environment,) = restart_reasons(running(environment={"SECRET": "x"}), "", [], [], launch)
    assert environment == "runs with another environment: %s, SECRET" % sq.TAG_VARIABLE
