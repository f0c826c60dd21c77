# SPDX-License-Identifier: GPL-3.0-or-later
"""A server over three hosts, with a stand-in for the role that tells a service manager: who is started, and who is waited for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: one
  gather_facts: false
  tasks:
    - ansible.builtin.setup:
      when: gather | default(false)
    - block:
        - ansible.builtin.include_role: {name: hidden_state.bridge.sglang_server, tasks_from: "{{ part }}"}
      rescue:
        - ansible.builtin.fail: {msg: "rescued {{ ansible_failed_result.msg }}"}
    - ansible.builtin.debug: {msg: "changed {{ sglang_server_nodes_changed | default('') }}"}
"""
SERVICE = """
- ansible.builtin.set_fact:
    _service_result:
      action: "{{ 'start' if _service_state not in ['started', 'launched'] or __sglang_server_node | default('one') in dead else 'none' }}"
      service: {pid: 1, since: 1}
- ansible.builtin.debug: {msg: "told {{ __sglang_server_node | default('one') }} {{ _service_state }} {{ __rank | default([]) | join(' ') }}"}
- ansible.builtin.debug: {msg: "newer than {{ _service_newer_than | join(' ') }}"}
"""
# A look at a process on another host.
HEALTH = """
from ansible.module_utils.basic import AnsibleModule
names = ("url", "name", "manager", "state_dir", "pid", "since", "api_key", "generate", "request_timeout")
module = AnsibleModule({name: {"type": "raw", "no_log": False} for name in names})
module.exit_json(state="failed", message="died", log_tail=["Killed"])
"""
# What ends the copy of the real one: a round of looks at the head is as long on any machine.
WATCH = """

class ActionModule(ActionModule):
    def _watch(self, args, host, task_vars):
        return {**HEAD, "changed": False, "waited": 2.5}
"""


# Answers for the host that it is told of.
NAMES = """
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        assert self._task.args == {"name": "sglang", "state": "unclaimed", "manager": "systemd", "state_dir": "/var/lib/hidden_state_bridge"}
        answer = task_vars["names"].get(self._task.delegate_to)
        if answer == "away":
            raise AnsibleConnectionFailure("no route to it")
        return {"failed": True, "msg": answer} if answer else {"action": "none", "service": {}}
"""


@pytest.fixture
def play(tmp_path):
    """Runs a task file of the role on the head; returns its exit status and what it printed."""
    home = tmp_path / "collections" / "ansible_collections" / "hidden_state" / "bridge"
    (home / "roles" / "_service" / "tasks").mkdir(parents=True)
    (home / "roles" / "_service" / "tasks" / "main.yml").write_text(SERVICE)
    for part in ("roles/sglang_server/tasks", "roles/sglang_server/vars", "roles/sglang_server/defaults", "plugins/action"):
        shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "plugins" / "modules").mkdir()
    shutil.copy(ROOT / "plugins" / "modules" / "watch.py", home / "plugins" / "modules")
    (home / "plugins" / "action" / "managed_service.py").write_text(NAMES)
    (home / "plugins" / "modules" / "sglang_health.py").write_text(HEALTH)
    watch = (ROOT / "plugins" / "action" / "watch.py").read_text()
    (tmp_path / "ansible.cfg").touch()
    (tmp_path / "play.yml").write_text(PLAY)
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(tmp_path / "collections")

    def run(part, head=None, own=None, **variables):
        round_of = WATCH.replace("HEAD", repr(head or {"state": "waiting", "line": "loading"}))
        (home / "plugins" / "action" / "watch.py").write_text(watch + round_of)
        common = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "ansible_facts": {"user_id": "root", "python": {"executable": sys.executable}},
            "sglang_server_nodes": ["one", "two", "three"],
            "sglang_server_model": "/model",
            "sglang_server_user": "root",
            "sglang_server_info": {
                "found": False,
                "manager": "systemd",
                "service": {"pid": 1, "manager": "systemd", "name": "sglang"},
                "model_file": "/srt/models/m.py",
                "runtime_file": "/srt/hs_capture/mark",
            },
            "part": part,
            "dead": [],
            **variables,
        }
        hosts = {name: {**common, **(own or {}).get(name, {})} for name in ("one", "two", "three")}
        (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "hosts.json"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.mark.parametrize(
    "dead, again",
    [([], []), (["two"], ["three restarted --node-rank 2"]), (["three"], ["two restarted --node-rank 1"]), (["two", "three"], [])],
)
def test_where_one_starts_anew_so_do_all(play, dead, again):
    status, said = play("nodes", dead=dead)
    assert status == 0, said
    assert re.findall(r"told (.*)\"", said) == ["two started --node-rank 1", "three started --node-rank 2", *again]
    assert f"changed {bool(dead)}" in said


def test_they_start_anew_with_their_head(play):
    status, said = play("nodes", sglang_server_info={"found": False, "manager": "systemd", "service": {"pid": None}})
    assert status == 0 and re.findall(r"told (\w+ \w+)", said) == ["two restarted", "three restarted"], said
    status, said = play("nodes", dead=["two"], sglang_server_state="stopped")
    assert status == 0 and re.findall(r"told (\w+ \w+)", said) == ["two stopped", "three stopped"], said


WAITED = {
    "_service_result": {"service": {"pid": 1, "since": 1}},
    "__sglang_server_waited": 0,
    "sglang_server_health_timeout": 4,
    "sglang_server_health_interval": 1,
}


def test_the_head_is_not_waited_for_once_another_process_has_ended(play):
    others = {name: {"service": {"pid": 1, "since": 1}} for name in ("two", "three")}
    status, said = play("nodes_wait", __sglang_server_others=others, **WAITED)
    assert status != 0 and "two, of the server of one: died" in said and "Killed" in said, said
    assert said.count("TASK [hidden_state.bridge.sglang_server : Wait a round for the head]") == 1


@pytest.mark.parametrize(
    "head, rounds", [({"state": "waiting", "line": "loading"}, 2), ({"state": "ready"}, 1), ({"state": "failed", "message": "no"}, 1)]
)
def test_the_wait_goes_round_until_the_head_is_done_or_time_is_up(play, head, rounds):
    status, said = play("nodes_wait", head=head, __sglang_server_others={}, **WAITED)
    assert status == 0, said
    assert said.count("TASK [hidden_state.bridge.sglang_server : Wait a round for the head]") == rounds


@pytest.mark.parametrize(
    "dead, state, target, done",
    [
        (["one"], "launched", "capture", True),
        ([], "restarted", "capture", True),
        ([], "launched", "capture", False),
        (["one"], "launched", "serving", False),
        (["one"], "present", "capture", False),
    ],
)
def test_what_is_to_be_done_while_a_capture_server_loads_is_done_before_it_is_waited_for(play, tmp_path, dead, state, target, done):
    """Whatever decided that it starts anew, and not beside one that was left as it was."""
    (tmp_path / "loading.yml").write_text('- ansible.builtin.debug: {msg: "told while loading"}')
    how = {
        "__sglang_server_service_state": state,
        "sglang_server_state": target,
        "sglang_server_tasks_while_loading": f"{tmp_path}/loading.yml",
    }
    status, said = play("service", dead=dead, __sglang_server_others={}, head={"state": "ready"}, **how, **WAITED)
    assert status == 0, said
    assert re.findall(r"told ([\w ]+?) *\"", said) == [f"one {state}", *["while loading"] * done]
    waits = said.find("TASK [hidden_state.bridge.sglang_server : Wait a round")
    assert not done or 0 < said.find("told while loading") < waits


RIGHT = {
    "sglang_server_state": "capture",
    "sglang_server_capture_environment": {"SGLANG_HS_DUMP_DIR": "/dumps"},
    "sglang_server_info": {
        "found": False,
        "manager": "systemd",
        "contradictions": [],
        "before": None,
        "config_file": True,
        "unit_others": [],
        "gpu_orphans": [],
    },
}


def test_a_host_whose_name_is_taken_or_that_is_away_is_refused_before_anything_stops(play):
    status, said = play("preflight", names={"two": "it is your own", "three": "away"}, **RIGHT)
    assert status != 0 and "two, of the server of one: it is your own" in said, said
    assert re.search("three, of the server of one: .*no route to it", said) and "unreachable=0" in said, said
    status, said = play("preflight", names={}, **RIGHT)
    assert status == 0, said


def test_a_server_that_stays_as_it_is_asks_nobody(play):
    status, said = play("preflight", names={"two": "it is your own"}, **{**RIGHT, "sglang_server_state": "restored"})
    assert status == 0, said


AWAY = {"two": {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}}


@pytest.mark.parametrize("state", ["restored", "serving"])
def test_a_host_that_is_away_fails_its_head_instead_of_dropping_it(play, tmp_path, state):
    home = tmp_path / "collections/ansible_collections/hidden_state/bridge"
    (home / "plugins/action/managed_service.py").unlink()
    shutil.rmtree(home / "roles/_service")
    for part in ("roles/_service", "plugins/modules", "plugins/module_utils"):
        shutil.copytree(ROOT / part, home / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    # Of `restored` with nothing recorded before: its service is to go.
    info = {"found": False, "manager": "systemd", "before": "absent", "service": {"pid": None}, "capture_args": []}
    more = {"sglang_server_info": info, "sglang_server_manager": "systemd", "ansible_become": False, "gather": True}
    status, said = play("nodes", own=AWAY, names={}, sglang_server_state=state, **more)
    assert status != 0 and "rescued two, of the server of one, cannot be reached: " in said, said
    assert re.search(r"one +: .*unreachable=0 +failed=1", said), said


@pytest.mark.parametrize("state, files", [("capture", "/srt/models/m.py /srt/hs_capture/mark"), ("serving", "")])
def test_a_capture_server_is_compared_with_its_model_file_and_its_runtime(play, state, files):
    info = {"found": False, "manager": "systemd", "service": {"pid": None}, "capture_args": []}
    info.update(model_file="/srt/models/m.py", runtime_file="/srt/hs_capture/mark")
    common = {"sglang_server_state": state, "sglang_server_info": info, "__sglang_server_service_state": "present"}
    for part, times in {"nodes": 2, "service": 1}.items():
        status, said = play(part, **common)
        assert status == 0 and re.findall(r'"newer than (.*)"', said) == [files] * times, said
