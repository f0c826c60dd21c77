# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role sglang_server takes a server for, and which API keys it refuses before anything stops, with a stand-in for the look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What is seen of the server, and of the arguments nothing that is a key.
LOOK = """
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        assert self._task.args["arguments"] == []
        return task_vars["seen"]
"""


@pytest.fixture
def play(tmp_path):
    """Runs tasks as of the role; returns the exit status and what was printed."""
    home = tmp_path / "collections" / "ansible_collections" / "hidden_state" / "bridge"
    for part in ("tasks", "vars", "defaults"):
        shutil.copytree(ROOT / "roles" / "sglang_server" / part, home / "roles" / "sglang_server" / part)
    (home / "plugins" / "action").mkdir(parents=True)
    (home / "plugins" / "action" / "sglang_info.py").write_text(LOOK)
    shutil.copytree(ROOT / "plugins" / "modules", home / "plugins" / "modules")
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")

    def run(*tasks, **variables):
        (home / "roles" / "sglang_server" / "tasks" / "asked.yml").write_text(json.dumps(tasks))
        role = {"ansible.builtin.include_role": {"name": "hidden_state.bridge.sglang_server", "tasks_from": "asked"}}
        own = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "sglang_server_user": "root", **variables}
        (tmp_path / "play.json").write_text(json.dumps([{"hosts": "one", "gather_facts": False, "tasks": [role]}]))
        (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": {"one": own}}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.json", "-i", "hosts.json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_server_is_taken_for_what_it_does(play):
    servers = {
        "serving": [("running", 7, "serving"), ("running", 7, "unknown"), ("starting", 7, "serving"), ("starting", None, "unknown")],
        "capture": [("running", 7, "capture"), ("starting", 7, "capture")],
        "stopped": [("stopped", None, "unknown"), ("failed", None, "unknown"), ("stopping", None, "unknown")],
        "absent": [("absent", None, "unknown")],
    }
    looks = [
        {"taken_for": state, "service": {"state": is_, "pid": pid, "mode": mode}}
        for state, all_ in servers.items()
        for is_, pid, mode in all_
    ]
    asked = {
        "ansible.builtin.assert": {"that": "__sglang_server_current == sglang_server_info.taken_for"},
        "loop": looks,
        "loop_control": {"loop_var": "sglang_server_info"},
    }
    status, said = play(asked)
    assert status == 0, said


def test_a_server_that_was_started_since_a_run_left_its_record_is_recorded_anew(play):
    serving, capturing = {"state": "running", "pid": 7, "mode": "serving"}, {"state": "running", "pid": 7, "mode": "capture"}
    # Its manager starts a capture that died.
    starting, stopped = {"state": "starting", "pid": None, "mode": "unknown"}, {"state": "stopped", "pid": None, "mode": "unknown"}
    rows = [
        ("capture", None, serving, True),
        ("capture", None, capturing, False),
        ("capture", None, stopped, True),
        ("stopped", None, stopped, False),
        ("serving", None, stopped, False),
        ("capture", "stopped", serving, True),
        ("capture", "absent", serving, True),
        ("capture", "serving", serving, False),
        ("capture", "stopped", capturing, False),
        ("capture", "stopped", starting, False),
        ("capture", "absent", stopped, False),
        ("stopped", "absent", serving, False),
        ("restored", "stopped", serving, False),
    ]
    looks = [{"asked": state, "before": before, "service": service, "records": records} for state, before, service, records in rows]
    asked = {
        "ansible.builtin.assert": {"that": "__sglang_server_to_record == sglang_server_info.records"},
        "loop": looks,
        "loop_control": {"loop_var": "sglang_server_info"},
        "vars": {"sglang_server_state": "{{ sglang_server_info.asked }}"},
    }
    status, said = play(asked)
    assert status == 0, said


@pytest.mark.parametrize("found", [True, False])
def test_a_key_that_has_to_be_handed_over_needs_a_release_that_takes_it_by_file(play, found):
    seen = {"found": found, "manager": "unit" if found else "systemd", "before": None, "config_file": False, "release": "0.5.2"}
    status, said = play({"ansible.builtin.include_tasks": "preflight.yml"}, sglang_server_info=seen, sglang_server_api_key="k")
    assert (status == 0) is found and ("takes an API key on the command line only" in said) is not found, said


@pytest.mark.parametrize(
    "state, found, refused", [("capture", True, True), ("serving", True, False), ("restored", True, False), ("serving", False, True)]
)
def test_a_key_among_arguments_that_are_not_used_stands_in_nobodys_way(play, state, found, refused):
    seen = {"found": found, "before": "serving", "python": "/bin/python", "model_path": "/model"}
    asked = {"ansible.builtin.include_tasks": "look.yml", "vars": {"__sglang_server_survey": False}}
    status, said = play(asked, seen=seen, sglang_server_state=state, sglang_server_args=["--api-key", "tell-nobody"])
    assert (status != 0) is refused and ("the server would be started with --api-key in sglang_server_args" in said) is refused, said
    assert "tell-nobody" not in said
