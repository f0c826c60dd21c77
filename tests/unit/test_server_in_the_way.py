# SPDX-License-Identifier: GPL-3.0-or-later
"""What is known before a stop: a unit that runs more than the server, and workers of a dead one on the server's GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest
from test_managed_service import FakeManager, work
from test_server_role import play  # noqa: F401

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_worker
from ansible_collections.hidden_state.bridge.plugins.modules import sglang_info

SERVER = (
    "import os, subprocess, sys, time; subprocess.Popen(['sleep', '60']); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
)
ALONE = '"$PYTHON" -c "$SERVER" "$0.pid" 2>&1 | tee "$0.log" >"$0.copy" & sleep 60 & (while :; do sleep 1; done) & %s wait\n'
# As a manager of several programs, which is no shell.
HOLDER = "import os, subprocess, sys, time; %s subprocess.Popen([os.environ['PYTHON'], '-c', os.environ['SERVER'], sys.argv[0] + '.pid']); time.sleep(60)"


@pytest.fixture
def unit(tmp_path, monkeypatch):
    """Runs a program as a unit would; returns what is there beside the server that it starts."""
    mains = []

    def run(shell, text):
        path = tmp_path / "serve"
        path.write_text(text)
        environment = {**os.environ, "PYTHON": sys.executable, "SERVER": SERVER}
        mains.append(subprocess.Popen([shell, str(path)], env=environment, start_new_session=True))
        noted, deadline = tmp_path / "serve.pid", time.monotonic() + 30
        while not (noted.exists() and noted.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(0.3)
        main = mains[0].pid
        monkeypatch.setattr(found.sq, "main_pid", lambda _unit: main)
        service = {"pid": int(noted.read_text()), "processes": hp.family_of(main), "control": None}
        assert len(service["processes"]) > 2
        return found.others_in_unit({"manager": "unit", "service": "operators", "pid": None}, service)

    yield run
    for main in mains:
        os.killpg(main.pid, 9)
        main.wait()


def test_what_a_script_needs_beside_its_server_is_nothing_else(unit):
    assert unit("sh", ALONE % "") == []


@pytest.mark.parametrize(
    "shell, text",
    [
        ("sh", ALONE % '"$PYTHON" -c "import time; time.sleep(59)" &'),
        (sys.executable, HOLDER % "subprocess.Popen([os.environ['PYTHON'], '-c', 'import time; time.sleep(59)']);"),
    ],
)
def test_what_a_unit_runs_beside_the_server_is_named(unit, shell, text):
    (one,) = unit(shell, text)
    assert one["command"].endswith("-c import time; time.sleep(59)") and hp.is_alive(one["pid"])


def test_a_server_that_no_unit_runs_has_none_beside_it():
    for located in ({"manager": "process", "service": "", "pid": 7}, {"manager": "unit", "service": "x", "pid": None}):
        assert found.others_in_unit(located, {"pid": None, "processes": [1]}) == []


def test_the_gpus_of_a_found_server_are_those_of_its_process(tmp_path):
    params = {"visible_gpus": "0", "state_dir": str(tmp_path), "name": "sglang"}
    running, stopped = {"environment": {"CUDA_VISIBLE_DEVICES": "4,5"}}, {"environment": None}
    assert sglang_info.visible_gpus(params, running, True) == "4,5"
    assert sglang_info.visible_gpus(params, running, False) == "0"
    assert sglang_info.visible_gpus(params, {"environment": {}}, True) == sglang_info.visible_gpus(params, stopped, True) == ""
    path = found.record_path(str(tmp_path), "sglang")
    os.makedirs(os.path.dirname(path))
    sglang_info.pr.write(path, running)
    assert sglang_info.visible_gpus(params, stopped, True) == "4,5"


ORPHANS = [
    {"pid": 2**22 + 1, "gpu": "GPU-a", "command": "sglang::scheduler"},
    {"pid": 2**22 + 2, "gpu": "GPU-b", "command": "sglang::scheduler"},
]


def test_workers_of_a_dead_server_are_told_from_those_of_the_service(monkeypatch):
    monkeypatch.setattr(sglang_info.gpus, "compute_processes", lambda: ORPHANS)
    assert sglang_info.gpu_orphans("", {"processes": [2**22 + 2]}) == ORPHANS[:1]
    assert sglang_info.gpu_orphans("GPU-b", {"processes": []}) == ORPHANS[1:]


def test_a_server_is_not_stopped_for_a_start_into_what_a_dead_one_left(monkeypatch, child):
    monkeypatch.setattr(service_worker.gpus, "compute_processes", lambda: ORPHANS[:1])
    manager = FakeManager(child)
    outcome = work(monkeypatch, manager, tag="another")
    assert (
        outcome.failed and "not restarted" in outcome.values["msg"] and "pid %d: sglang::scheduler" % (2**22 + 1) in outcome.values["msg"]
    )
    assert (outcome.values["action"], outcome.values["changed"], manager.told) == ("none", False, [])


SEEN = {
    "found": True,
    "python": "/py",
    "model_path": "/m",
    "manager": "unit",
    "before": None,
    "contradictions": [],
    "unit_others": [],
    "gpu_orphans": [],
    "service": {"name": "operators"},
}


@pytest.mark.parametrize(
    "state, seen, said",
    [
        ("capture", {}, ""),
        ("capture", {"unit_others": [{"pid": 7, "command": "node app.js"}]}, "operators runs more than the server.*pid 7: node app.js"),
        ("stopped", {"unit_others": [{"pid": 7, "command": "node app.js"}]}, "Give the server a unit of its own"),
        ("serving", {"unit_others": [{"pid": 7, "command": "node app.js"}]}, ""),
        ("capture", {"gpu_orphans": ORPHANS}, f"hold the server's GPUs: pid {2**22 + 1}: sglang::scheduler; pid {2**22 + 2}.*End these"),
        ("restored", {"gpu_orphans": ORPHANS}, ""),
    ],
)
def test_both_are_refused_before_anything_stops(play, state, seen, said):  # noqa: F811
    variables = {"sglang_server_state": state, "sglang_server_capture_environment": {"SGLANG_HS_DUMP_DIR": "/dumps"}}
    status, output = play({"ansible.builtin.include_tasks": "preflight.yml"}, sglang_server_info={**SEEN, **seen}, **variables)
    assert (status != 0) is bool(said), output

    assert re.search(said, " ".join(output.split())), output


def test_the_survey_names_both_with_the_remedy(play):  # noqa: F811
    seen = {
        **SEEN,
        "release": "0.5.20",
        "manager": "supervisor",
        "unit_others": [{"pid": 7, "command": "node app.js"}],
        "gpu_orphans": ORPHANS,
    }
    what = "sglang_server_problems | map(attribute='what') | join(' ')"
    remedies = "sglang_server_problems | map(attribute='remedy') | list"
    checks = [f"'would stop: pid 7: node app.js' in {what}", f"'hold the GPUs: pid {2**22 + 1}: sglang::scheduler;' in {what}"]
    checks.append(f"{remedies} == ['give the server a unit of its own, or end these', 'end these processes']")
    tasks = [{"ansible.builtin.include_tasks": "survey.yml"}, {"ansible.builtin.assert": {"that": checks}}]
    status, output = play(*tasks, seen=seen, ansible_facts={"user_id": "root", "user_uid": 0})
    assert status == 0, output
