# SPDX-License-Identifier: GPL-3.0-or-later
"""What preflight says of a data set that does not fit, of a file system that all hosts fill together, of an interpreter, and of
hosts that are not of one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOKENS = {"one": 60_000_000, "two": 45_000_000}
WHOLE = '{"version": "3.11", "glibc": "2.36", "machine": "x86_64", "missing": []}'
MODULE = "hidden_state.bridge.server_return"
OUTPUT = {"path": "/data/states", "network": "nfs4 filer:/export", "free": 100_000_000_000}


def last_task(role: str, name: str) -> dict:
    tasks = yaml.safe_load((ROOT / "roles" / role / "tasks" / f"{name}.yml").read_text())
    return tasks[-1]


@pytest.fixture
def evaluate(tmp_path):
    """Runs one task for two hosts, or those that are given with their tokens, with those variables; returns the fact that it sets."""
    (tmp_path / "ansible.cfg").touch()

    def run(task: dict, fact: str, given: dict = TOKENS, **variables) -> dict:
        show = {
            "ansible.builtin.copy": {
                "content": "{{ %s | to_json }}" % fact,
                "dest": f"{tmp_path}/{{{{ inventory_hostname }}}}",
                "mode": "0600",
            }
        }
        (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [task, show]}]))
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, **variables}
        plans = {name: {"bytes": tokens * 500, "tokens": tokens, "bytes_per_token": 500} for name, tokens in given.items()}
        hosts = {name: dict(local, extraction_plan=plan) for name, plan in plans.items()}
        (tmp_path / "hosts.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "hosts.json"]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return {name: json.loads((tmp_path / name).read_text()) for name in hosts}

    return run


def problems(evaluate, **variables) -> dict:
    """What preflight of the extraction says where nothing else is wrong."""
    fine = {
        "sglang_server_info": {"key_found": False, "service": {"mode": "serving"}},
        "extraction_api_key": "",
        "extraction_output_dir": "/data/states",
        "extraction_dump_dir": "/data/dumps",
        "extraction_min_free_bytes": 1_000_000_000,
        "extraction_unattended_after": 600,
        "extraction_watch_interval": 5,
        "__extraction_before": {"conflict": ""},
        "__extraction_run_problems": [],
        "__extraction_settings_check": {"rc": 0},
        "__extraction_output_bytes": 1000,
        "__extraction_interpreter": {"rc": 0, "stdout": WHOLE},
        "__extraction_paths": {"problems": [], "paths": [dict(OUTPUT, network="")]},
    }
    return evaluate(last_task("extraction", "preflight"), "extraction_problems", **{**fine, **variables})


@pytest.mark.parametrize(("after", "refused"), [(0, False), (29, True), (30, False), ("600", False)])
def test_a_host_that_would_not_wait_for_a_late_play_is_refused(evaluate, after, refused):
    found = problems(evaluate, extraction_unattended_after=after)["one"]
    assert [problem["what"].partition(":")[0] for problem in found] == refused * [
        "extraction_unattended_after is 29 s, and a play looks on every 5 s"
    ]
    assert not refused or found[0]["remedy"] == "set it to 0, or to 30 or more"


@pytest.mark.parametrize(
    ("free", "network", "refused"), [(100, "nfs4 filer:/export", True), (107, "nfs4 filer:/export", False), (100, "", False)]
)
def test_hosts_that_share_a_file_system_need_room_for_all(evaluate, free, network, refused):
    """60 and 45 GB at 1,000 bytes a token, and 1 GB that stays free: each alone fits into 100 GB."""
    paths = {"problems": [], "paths": [dict(OUTPUT, free=free * 10**9, network=network)]}
    found = problems(evaluate, __extraction_paths=paths)
    if not refused:
        assert found == {"one": [], "two": []}
        return
    (problem,) = found["one"]
    assert problem["what"] == (
        "extraction_output_dir: /data/states is on nfs4 filer:/export, where all hosts together write 106.0 GB and 100.0 GB are free"
    )
    assert problem["remedy"] == "free 6.0 GB there, or choose another file system"


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ({"rc": 0, "stdout": WHOLE}, []),
        ({"rc": 0, "stdout": WHOLE.replace("[]", '["orjson"]')}, []),
        ({"rc": 0, "stdout": WHOLE.replace("[]", '["torch"]')}, ["/opt/python has no torch"]),
        (
            {"rc": 0, "stdout": WHOLE.replace("[]", '["orjson"]').replace("2.36", "")},
            ["/opt/python lacks orjson, and is not one that wheels"],
        ),
        ({"rc": 127, "msg": "[Errno 2] No such file"}, ["/opt/python cannot run: [Errno 2] No such file"]),
        ({"skipped": True}, []),
    ],
)
def test_an_interpreter_that_packages_cannot_be_brought_for_is_refused(evaluate, probe, said):
    found = problems(evaluate, extraction_python="/opt/python", __extraction_interpreter=probe)["one"]
    assert len(found) == len(said) and all(problem["what"].startswith(text) for problem, text in zip(found, said))


@pytest.mark.parametrize(
    ("ours", "theirs", "different"),
    [
        ({"tokenizer.json": "1", "merges.txt": "2"}, {"tokenizer.json": "1", "merges.txt": "2"}, ""),
        ({"tokenizer.json": "1", "merges.txt": "2"}, {"tokenizer.json": "9", "merges.txt": "2"}, "tokenizer.json"),
        ({"tokenizer.json": "1"}, {"tiktoken.model": "1"}, "tiktoken.model, tokenizer.json"),
        (None, {"tokenizer.json": "1"}, ""),
        ({"tokenizer.json": "1"}, {}, ""),
    ],
)
def test_a_data_set_of_another_tokenizer_is_refused(evaluate, ours, theirs, different):
    found = evaluate(
        last_task("dataset_stage", "pack"),
        "dataset_stage_problems",
        dataset_stage_packed={"meta": {"tokenizer": {"files": ours} if ours else None}},
        sglang_server_info={"model": {"tokenizer": theirs}},
        sglang_server_model="/models/Kimi-K2.5",
        dataset_stage_dir="/var/lib/datasets",
    )["one"]
    if not different:
        assert found == []
        return
    assert found[0]["what"] == f"the data set was tokenized with another tokenizer than that of /models/Kimi-K2.5: {different} differs"
    assert "set dataset_stage_tokenizer to the directory of the one that was used" in found[0]["remedy"]


def test_a_data_set_that_is_staged_where_nobody_looks_is_refused(evaluate):
    found = evaluate(
        last_task("dataset_stage", "pack"),
        "dataset_stage_problems",
        dataset_stage_packed={"meta": {"tokenizer": None}},
        sglang_server_info={"model": {}},
        dataset_stage_dir="/data/sets",
        extraction_dataset_dir="/elsewhere",
    )["one"]
    assert [problem["what"] for problem in found] == ["data sets are staged into /data/sets, and the extractor looks into /elsewhere"]


@pytest.mark.parametrize(("mode", "directory", "enough"), [("capture", "/dev/shm/d", True), ("serving", "/dev/shm/d", False)])
def test_dumps_that_the_next_start_removes_do_not_take_the_memory_of_the_server(evaluate, mode, directory, enough):
    """They count against the group of the process that wrote them, which is not there any more where it was started anew.

    One record of one token at 500 bytes is wanted.
    """
    server = {"key_found": False, "memory": {"limit": 1000, "used": 800}, "service": {"mode": mode}}
    found = problems(
        evaluate,
        sglang_server_info=server,
        extraction_dump_dir=directory,
        extraction_concurrency=1,
        dataset_stage_packed={"meta": {"max_length": 1}},
        __extraction_paths={"problems": [], "paths": [dict(OUTPUT, network=""), {"removable": 300}]},
    )["one"]
    assert [problem["what"].partition(",")[0] for problem in found] == (not enough) * ["the memory limit of the server leaves 200 bytes"]


@pytest.mark.parametrize("name", ["settle", "main"])
@pytest.mark.parametrize("set_to", [{}, {"sglang_server_stop_timeout": 1000, "sglang_server_port_timeout": 7}])
def test_whoever_holds_the_return_off_waits_as_long_as_it_may_take(evaluate, name, set_to):
    def patience(role, name):
        tasks = yaml.safe_load((ROOT / f"roles/{role}/tasks/{name}.yml").read_text())
        (held,) = [task[MODULE] for task in tasks if task.get(MODULE, {}).get("state") == "held"]
        return held["patience"]

    defaults = yaml.safe_load((ROOT / "roles/sglang_server/defaults/main.yml").read_text())
    server = {key: set_to.get(key, defaults[key]) for key in ("sglang_server_stop_timeout", "sglang_server_port_timeout")}
    wanted = evaluate({"ansible.builtin.set_fact": {"seconds": patience("sglang_server", "main")}}, "seconds", **server)
    variables = yaml.safe_load((ROOT / "roles/extraction/vars/main.yml").read_text())
    own = {"__extraction_return_patience": variables["__extraction_return_patience"], **set_to}
    assert evaluate({"ansible.builtin.set_fact": {"seconds": patience("extraction", name)}}, "seconds", **own) == wanted


def by_host(one: object, two: object, three: object = None) -> str:
    """A variable that has another value on each of the hosts."""
    return "{{ %s[inventory_hostname] }}" % json.dumps({"one": one, "two": two, "three": three})


def of_one_run(evaluate, one=None, two=None, before=None, three=None, **variables) -> dict:
    """What preflight says where the servers of the hosts differ so, and `before` made what lies on the second one.

    There is a third host where it is told of.
    """
    server = {"release": "0.5.20", "attention_backend": "", "gpu_architecture": "9.0", "key_found": False}
    server["service"] = {"mode": "serving"}
    identity = {"weights": "w", "layers": [1, 3, 4]}
    expression = yaml.safe_load((ROOT / "roles/extraction/vars/main.yml").read_text())["__extraction_run_problems"]
    lies = {"conflict": "", "records_done": 7, "provenance": before or {}}
    fine = {
        "sglang_server_info": by_host(*({**server, **(own or {})} for own in (one, two, three))),
        "extraction_identity": identity,
        "__extraction_reports": "/prod/reports",
        "extraction_allow_mixed": False,
        "__extraction_output_dir": "/out/host",
        "__extraction_before": by_host({"conflict": ""}, lies, {"conflict": ""}),
        "__extraction_run_problems": expression.replace("extraction_plan.left.records", str(variables.pop("left", 5))),
    }
    if three:
        variables["given"] = {**TOKENS, "three": 1}
    return {name: [problem["what"] for problem in found] for name, found in problems(evaluate, **{**fine, **variables}).items()}


def test_hosts_of_another_run_are_refused_with_both_identities(evaluate):
    two = {"weights": "v", "layers": [1, 3, 4]}
    ours = by_host({"weights": "w", "layers": [1, 3, 4]}, two)
    # Whatever else may be mixed.
    found = of_one_run(evaluate, extraction_identity=ours, extraction_allow_mixed=True, left=0)
    both = '{"layers": [1, 3, 4], "weights": "v"} here, {"layers": [1, 3, 4], "weights": "w"} there'
    assert found == {"one": [], "two": [f"is of another run than one: {both}"]}


def test_hosts_have_one_ledger(evaluate):
    """Beside the inventory, of which there may be two."""
    found = of_one_run(evaluate, __extraction_reports=by_host("/prod/reports", "/more/reports"), extraction_allow_mixed=True)
    said = "extraction_report_dir is /more/reports here and /prod/reports on one, and the ledger of shares in it is one for all hosts"
    assert found == {"one": [], "two": [said]}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("release", "0.5.21", "SGLang is 0.5.21 here and 0.5.20 on one"),
        ("attention_backend", "flashinfer", "attention backend is flashinfer here and not given on one"),
        ("gpu_architecture", "10.0", "GPU architecture is 10.0 here and 9.0 on one"),
    ],
)
def test_what_would_mix_releases_backends_or_architectures_is_refused_unless_that_is_allowed(evaluate, key, value, said):
    assert of_one_run(evaluate, two={key: value}) == {"one": [], "two": [said]}
    assert of_one_run(evaluate, two={key: value}, extraction_allow_mixed="true") == {"one": [], "two": []}


def test_an_architecture_is_held_against_the_first_host_that_told_one(evaluate):
    silent, other = {"gpu_architecture": ""}, {"gpu_architecture": "12.0"}
    said = ["GPU architecture is 12.0 here and 9.0 on two"]
    assert of_one_run(evaluate, one=silent, three=other) == {"one": [], "two": [], "three": said}
    assert of_one_run(evaluate, one=silent, two=silent, three=silent) == {"one": [], "two": [], "three": []}


def test_an_architecture_that_is_not_told_stays_the_one_that_made_the_records(evaluate):
    """Else the settings change, and an extractor at work is started again."""
    settings = yaml.safe_load((ROOT / "roles/extraction/vars/main.yml").read_text())["__extraction_settings"]
    server = {"one": {"gpu_architecture": ""}, "two": {"gpu_architecture": "12.0"}}
    before = {"one": {"provenance": {"gpu_architecture": "9.0"}}, "two": {"provenance": {"gpu_architecture": "9.0"}}}
    task = {"ansible.builtin.set_fact": {"told": settings["provenance"]["gpu_architecture"]}}
    told = {"sglang_server_info": by_host(*server.values()), "__extraction_before": by_host(*before.values())}
    assert evaluate(task, "told", **told) == {"one": "9.0", "two": "12.0"}
    assert evaluate(task, "told", **{**told, "__extraction_before": {"skipped": True}}) == {"one": "", "two": "12.0"}


def test_what_made_the_records_that_are_there_counts_too(evaluate):
    old = {"sglang_version": "0.5.19", "attention_backend": "fa3", "gpu_architecture": "9.0"}
    there = "made the 7 records in /out/host"
    said = [f"SGLang is 0.5.20, and 0.5.19 {there}", f"attention backend is not given, and fa3 {there}"]
    assert of_one_run(evaluate, before=old) == {"one": [], "two": said}
    # Nothing is left to mix, or an earlier release of ours did not say.
    assert of_one_run(evaluate, before=old, left=0) == of_one_run(evaluate, before={"sglang_version": "0.5.20"}) == {"one": [], "two": []}


@pytest.mark.parametrize("name", ["configure", "convert_here"])
def test_a_planted_link_in_a_shared_output_directory_is_refused(tmp_path, name):
    """Whoever may write there would have the directory of his choice given to the extractor's user."""
    (target,) = [
        task for task in yaml.safe_load((ROOT / f"roles/extraction/tasks/{name}.yml").read_text()) if "ansible.builtin.file" in task
    ]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    # Whatever umask another test has left.
    elsewhere.chmod(0o755)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "one").symlink_to(elsewhere)
    play = {"hosts": "localhost", "gather_facts": False, "tasks": [target]}
    play["vars"] = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "extraction_user": str(os.getuid()),
        "extraction_group": str(os.getgid()),
        "extraction_output_group": "",
        "extraction_state_dir": str(tmp_path / "state"),
        "__extraction_output_dir": str(tmp_path / "out" / "one"),
        "__extraction_convert_output": str(tmp_path / "out" / "one"),
    }
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "play.yml", "-i", "localhost,"]
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"{tmp_path}/out/one already exists as a link" in done.stdout + done.stderr, done.stdout
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    (tmp_path / "out" / "one").unlink()
    assert subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode == 0
    assert (tmp_path / "out" / "one").stat().st_mode & 0o777 == 0o700


def test_the_report_takes_whatever_a_failure_says(evaluate):
    task = yaml.safe_load((ROOT / "roles/extraction/tasks/write_report.yml").read_text())[0]
    hosts = task["vars"]["__extraction_hosts"].replace("groups['sglang']", "groups['all']")
    said = 'the model\'s code says: \U0001f6a8 \u00e9 "quoted"\nand more: {{ no template }}'
    found = evaluate(
        {"ansible.builtin.set_fact": {"rows": hosts}},
        "rows",
        __afresh=[],
        __extraction_end={"records_done": 1, "failures": []},
        extraction_output_dir="/out",
        bridge_failure={"__ansible_unsafe": said},
    )["one"]
    assert {name: row["broke"] for name, row in found.items()} == dict.fromkeys(TOKENS, said)


@pytest.mark.parametrize(
    ("complete", "failed", "state", "until", "passes"),
    [
        (True, 0, "done", "", True),
        # Of a pilot more may be done than was asked for.
        (True, 1, "incomplete", "", False),
        (False, 0, "stopped", "", False),
        (False, 0, "stopped", "06:00", True),
        (False, 1, "stopped", "06:00", False),
        (False, 0, "failed", "06:00", False),
    ],
)
def test_a_run_with_records_that_are_left_or_failed_has_a_status_other_than_0(evaluate, complete, failed, state, until, passes):
    condition = last_task("extraction", "report")["ansible.builtin.assert"]["that"]
    found = evaluate(
        {"ansible.builtin.set_fact": {"passes": "{{ %s }}" % condition}},
        "passes",
        __extraction_totals={"complete": complete, "failed": failed},
        __report={"hosts": [{"state": state}]},
        extraction_until=until,
    )
    assert found["one"] is passes
