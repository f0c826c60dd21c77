# SPDX-License-Identifier: GPL-3.0-or-later
"""The patch and its trial on all hosts of a server, with a stand-in for the module: what is wrong, and whether extract.yml stops the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
# Answers for the host that it is told of.
ANSWER = """
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        assert self._task.check_mode == task_vars["trial"] and self._task.args["model_file"] == "/m"
        answer = task_vars["answers"][self._task.delegate_to or "one"]
        if answer == "away":
            raise AnsibleConnectionFailure("no route to it")
        return answer
"""
RIGHT = {"family": "D", "model_file": "/m", "checksum_before": "a", "checksum_after": "a", "runtime_changed": []}
UNPATCHED = {**RIGHT, "checksum_after": "b"}
STALE = {**RIGHT, "runtime_changed": ["writer.py"]}
REFUSED = {"failed": True, "msg": "/m was edited\n- a diff"}


def stop_first() -> str:
    """What extract.yml says of a stop before the patch."""
    text = (ROOT / "playbooks" / "extract.yml").read_text()
    found = []

    def look(node) -> None:
        if isinstance(node, dict):
            found.extend(value for key, value in node.items() if key == "sglang_server_stop_first")
        for one in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
            look(one)

    look(yaml.safe_load(text))
    return found[0]


@pytest.fixture
def play(tmp_path):
    """Runs tasks on the head of a server whose hosts answer so."""
    home = tmp_path / "collections" / "ansible_collections" / "hidden_state" / "bridge"
    shutil.copytree(ROOT / "roles" / "hs_patch", home / "roles" / "hs_patch")
    (home / "plugins" / "action").mkdir(parents=True)
    (home / "plugins" / "action" / "hs_patch.py").write_text(ANSWER)
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")

    def run(tasks, answers, mode="capture", trial=True):
        (tmp_path / "play.json").write_text(json.dumps([{"hosts": "one", "gather_facts": False, "tasks": tasks}]))
        common = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "answers": answers,
            "trial": trial,
            "sglang_server_nodes": list(answers),
            "sglang_server_info": {"models_dir": "", "service": {"mode": mode}},
            "hs_patch_model_file": "/m",
        }
        (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": dict.fromkeys(answers, common)}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.json", "-i", "hosts.json"]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def trial(play, tmp_path):
    """Runs the trial; returns the problems, and whether a server in capture mode is stopped for the patch."""
    found = tmp_path / "found.json"
    tasks = [
        {"ansible.builtin.include_role": {"name": "hidden_state.bridge.hs_patch", "tasks_from": "preflight"}},
        {
            "ansible.builtin.copy": {
                "content": "{{ [hs_patch_problems, stop_first | bool] | to_json }}",
                "dest": str(found),
                "mode": "0600",
            },
            "vars": {"stop_first": stop_first()},
        },
    ]

    def run(answers, mode="capture"):
        done = play(tasks, answers, mode)
        assert done.returncode == 0 and found.exists(), done.stdout + done.stderr
        problems, stops = json.loads(found.read_text())
        return [problem["what"] for problem in problems], stops

    return run


@pytest.mark.parametrize(
    "answers, stops",
    [
        ({"one": RIGHT}, False),
        ({"one": UNPATCHED}, True),
        ({"one": STALE}, True),
        ({"one": RIGHT, "two": RIGHT, "three": UNPATCHED}, True),
        ({"one": RIGHT, "two": STALE}, True),
    ],
)
def test_a_server_in_capture_mode_stops_for_what_it_has_loaded(trial, answers, stops):
    assert trial(answers) == ([], stops)


def test_one_that_serves_stops_anyhow(trial):
    assert trial({"one": RIGHT}, "serving") == ([], True)


def test_what_is_wrong_on_another_host_is_named_before_the_stop(trial):
    problems, _stops = trial({"one": RIGHT, "two": REFUSED, "three": "away"})
    assert problems[0] == "two, of its server: /m was edited"
    assert len(problems) == 2 and problems[1].startswith("three, of its server: ") and "no route to it" in problems[1]


def test_what_is_wrong_on_the_head_is_said_alone(trial):
    assert trial({"one": REFUSED, "two": REFUSED})[0] == ["/m was edited"]


def test_a_patch_that_is_not_made_on_another_host_fails_the_head_by_name(play):
    role = {"ansible.builtin.include_role": {"name": "hidden_state.bridge.hs_patch"}}
    tasks = [{"block": [role], "rescue": [{"ansible.builtin.fail": {"msg": "rescued {{ ansible_failed_result.msg }}"}}]}]
    done = play(tasks, {"one": RIGHT, "two": "away", "three": REFUSED, "four": RIGHT}, trial=False)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and re.search("rescued two, of the server of one: .*no route to it", said), said
    assert "three, of the server of one: /m was edited" in said and "four, of" not in said, said
    assert re.search("one +: .*unreachable=0 +failed=1", said), said
    assert play(tasks, {"one": RIGHT, "two": RIGHT}, trial=False).returncode == 0
