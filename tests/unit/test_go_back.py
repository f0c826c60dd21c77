# SPDX-License-Identifier: GPL-3.0-or-later
"""What the playbooks do where a server does not come to its state, with stand-ins for the roles: whose patch goes, and what is said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plays import PLAYED

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: sglang
  gather_facts: false
  tasks:
    - ansible.builtin.fail: {msg: given up before}
      when: given_up | default(false)
    - ansible.builtin.include_tasks: tasks/%s.yml
      when: play_on
"""
# Roles that say what they are asked for.
PATCH = """
- ansible.builtin.debug: {msg: "{{ inventory_hostname }} patch {{ hs_patch_state }} on {{ hs_patch_nodes | join(' ') }}"}
- hidden_state.bridge.patcher: {fails: "{{ patcher_fails | default(false) }}"}
  register: hs_patch_result
"""
SERVER = """
- ansible.builtin.debug: {msg: "{{ inventory_hostname }} server {{ sglang_server_state }} {{ sglang_server_remember | default('') }}"}
- ansible.builtin.fail: {msg: not ready within 5 s}
  when: server_fails
"""
END = """
- ansible.builtin.debug: {msg: "{{ inventory_hostname }} server without extractor on {{ ansible_facts['system'] }}"}
- ansible.builtin.fail: {msg: no answer}
  when: end_fails | default(false)
"""
SURVEY = """
- ansible.builtin.set_fact: {sglang_server_python: /found/python}
"""
WORKS = """
- ansible.builtin.debug: {msg: "{{ inventory_hostname }} server read with {{ sglang_server_python }}"}
- ansible.builtin.set_fact: {extraction_verified: {ok: true}}
"""
SITUATION = """
- ansible.builtin.set_fact: {sglang_server_situation: "the commands"}
"""
PATCHER = """
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"fails": {"type": "bool"}})
if module.params["fails"]:
    module.fail_json(msg="read-only")
module.exit_json(checksum_before="b", checksum_after="a", model_file="/m")
"""
PATCHED = {"checksum_before": "a", "checksum_after": "b", "model_file": "/m"}
THERE = {"checksum_before": "b", "checksum_after": "b", "model_file": "/m"}


@pytest.fixture
def play(tmp_path):
    """Runs a playbook or a task file of the playbooks; returns what it printed."""
    home = tmp_path / "collections" / "ansible_collections" / "hidden_state" / "bridge"
    for name, text in {
        "roles/hs_patch/tasks/main.yml": PATCH,
        "roles/hs_patch/tasks/others.yml": PATCH.replace("patch {{", "patch others {{"),
        "roles/sglang_server/tasks/main.yml": SERVER,
        "roles/sglang_server/tasks/situation.yml": SITUATION,
        "roles/sglang_server/tasks/survey.yml": SURVEY,
        "roles/extraction/tasks/end.yml": END,
        "roles/extraction/tasks/verify.yml": WORKS,
        "roles/extraction/tasks/convert.yml": WORKS,
        "roles/_bridge/tasks/main.yml": "[]",
        "plugins/modules/patcher.py": PATCHER,
    }.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    shutil.copytree(ROOT / "playbooks" / "tasks", tmp_path / "tasks")
    for playbook in (ROOT / "playbooks").glob("*.yml"):
        shutil.copy(playbook, tmp_path)
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")

    def run(what, *arguments, **hosts):
        common = {
            "ansible_connection": "local",
            "ansible_host": "gpu-01",
            "ansible_python_interpreter": sys.executable,
            "sglang_server_info": {"patched": False, "before": "serving"},
            "server_fails": False,
            "play_on": True,
        }
        (tmp_path / "hosts.json").write_text(json.dumps({"sglang": {"hosts": {name: {**common, **own} for name, own in hosts.items()}}}))
        name = what + ".yml"
        if not (tmp_path / name).exists():
            name = "play.yml"
            (tmp_path / name).write_text(PLAY % what)
        command = [str(Path(sys.executable).parent / "ansible-playbook"), name, "-i", "hosts.json", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    return run


def asked(output: str) -> list[str]:
    """What the roles were asked for."""
    return [one.strip() for one in re.findall(r'"msg": "(\w+ (?:patch|server) [\w/ ]+)"', output)]


@pytest.mark.parametrize(
    "own, unpatched, said",
    [
        ({"hs_patch_result": PATCHED}, True, "patch out"),
        ({"hs_patch_result": PATCHED, "patcher_fails": True}, True, "the patch is still in (read-only) and inert"),
        ({"hs_patch_result": THERE}, False, "the patch of an earlier run is still in and inert"),
        ({"sglang_server_info": {"patched": True, "before": "serving"}}, False, "the patch of an earlier run is still in and inert"),
        # Refused, or the stop before it failed.
        pytest.param({"hs_patch_result": {"failed": True, "msg": "refused"}}, False, "patch out", marks=PLAYED),
        ({}, False, "patch out"),
    ],
)
def test_only_the_patch_of_this_run_is_taken_out(play, own, unpatched, said):
    output = play("go_back", one={"bridge_failure": "it died", **own})
    assert asked(output) == ["one patch absent on"] * unpatched + ["one server restored"], output
    assert "it died" in output and f"This host is as it was before: {said}, server serving" in output


@pytest.mark.parametrize(
    "other, unpatched",
    [
        ({"hs_patch_result": THERE}, False),
        ({"hs_patch_result": THERE, "bridge_failure": "it died too"}, True),
        pytest.param({"hs_patch_result": THERE, "ansible_host": "gpu-02"}, True, marks=PLAYED),
        pytest.param({"hs_patch_result": {**THERE, "model_file": "/other"}}, True, marks=PLAYED),
        pytest.param({}, True, marks=PLAYED),
    ],
)
def test_a_patch_with_which_another_host_of_the_machine_captures_stays(play, other, unpatched):
    output = play("go_back", one={"bridge_failure": "it died", "hs_patch_result": PATCHED}, two={"play_on": False, **other})
    assert asked(output) == ["one patch absent on"] * unpatched + ["one server restored"], output
    assert ("the patch is still in, as two captures with it" in output) is not unpatched


def nodes(**after):
    return {"results": [{"item": name, **PATCHED, "checksum_after": one} for name, one in after.items()]}


def test_the_last_of_a_machine_to_fail_takes_out_what_another_one_put_in(play):
    """Which has been given up by then, and left it for this one."""
    first = {"hs_patch_result": PATCHED, "hs_patch_others": nodes(three="b"), "bridge_failure": "it died first", "given_up": True}
    output = play("go_back", one={"bridge_failure": "it died", "hs_patch_result": THERE, "hs_patch_others": nodes(three="a")}, two=first)
    assert asked(output) == ["one patch absent on three", "one server restored"], output
    assert "This host is as it was before: patch out, server serving" in output


def test_a_patch_that_was_put_in_on_another_host_of_the_server_alone_goes_there_alone(play):
    own = {"hs_patch_result": THERE, "hs_patch_others": nodes(two="b", three="a")}
    own["hs_patch_others"]["results"].append({"item": "four", "msg": "read-only"})
    output = play("go_back", one={"bridge_failure": "it died", **own})
    assert asked(output) == ["one patch others absent on two", "one server restored"], output
    assert "the patch of an earlier run is still in and inert, and out on two again, server serving" in output


def in_a_message(output: str, *lines: str) -> bool:
    return "\\n".join(lines) in output


def test_a_server_that_does_not_come_back_after_a_failure(play):
    output = play("go_back", one={"bridge_failure": "it died", "server_fails": True})
    lines = ("it died", "The server did not come back: not ready within 5 s", "THIS HOST IS NOT AS IT WAS BEFORE.", "the commands")
    assert in_a_message(output, *lines), output


@pytest.mark.parametrize("asked_for, state", [("restore", "restored True"), ("stop", "stopped False")])
@pytest.mark.parametrize("fails", [pytest.param(False, marks=PLAYED), True])
def test_a_server_that_is_to_be_left_as_asked(play, asked_for, state, fails):
    output = play("afterwards", one={"extraction_plan": {"afterwards": asked_for}, "server_fails": fails})
    assert asked(output) == [f"one server {state}"], output
    said = "stop" if asked_for == "stop" else "come back"
    lines = (f"The server did not {said}: not ready within 5 s", "THIS HOST IS NOT AS IT WAS BEFORE.", "the commands")
    assert in_a_message(output, *lines) is fails, output


@pytest.mark.parametrize("before", ["serving", pytest.param(None, marks=PLAYED)])
def test_a_server_that_does_not_come_to_serve(play, before):
    output = play("serve", one={"server_fails": True, "sglang_server_info": {"before": before}})
    assert asked(output) == ["one server serving"]
    assert ("THIS HOST IS NOT AS IT WAS BEFORE." in output) is (before is not None) and "the commands" in output, output


@pytest.mark.parametrize("fails", [pytest.param(False, marks=PLAYED), True])
def test_a_stop_that_the_inventory_asks_for_brings_the_server_back(play, fails):
    """Also where the extractor cannot be ended, which is said then. Its roles need facts."""
    output = play("extract", one={"extraction_state": "stopped", "end_fails": fails})
    assert asked(output) == ["one server without extractor on Linux", "one server restored"], output
    assert ("The extractor did not end: no answer" in output) is fails and ("failed=1" in output) is fails, output


def test_to_watch_where_no_host_is_fails(play):
    output = play("extract", "--tags", "watch")
    assert "No host to work on" in output and "failed=1" in output, output


@pytest.mark.parametrize("playbook", ["verify", pytest.param("convert", marks=PLAYED)])
def test_files_are_read_with_the_interpreter_of_a_server_that_is_found(play, playbook):
    output = play(playbook, one={}, two={"sglang_server_python": "/own/python"})
    assert sorted(asked(output)) == ["one server read with /found/python", "two server read with /own/python"], output
