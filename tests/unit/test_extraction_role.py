# SPDX-License-Identifier: GPL-3.0-or-later
"""Entry points of the role extraction on hosts of this machine that hold output of any bytes; no server and no extractor runs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from plays import PLAYED

import hs_manifest as hm

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = {"dataset": "d" * 64, "weights": "w", "layers": [1], "final": "post_norm", "dtype": "float32"}
PAYLOAD = "- ansible.builtin.include_role: {name: hidden_state.bridge._bridge}"
FLIP = "- ansible.builtin.command: {argv: [%s, %s, '{{ extraction_output_dir }}/{{ inventory_hostname }}/safetensors/data_1.safetensors']}"


def part(name: str) -> str:
    return f"- ansible.builtin.include_role: {{name: hidden_state.bridge.extraction, tasks_from: {name}}}"


def make_output(path: Path, first: int = 0) -> Path:
    """A host's own output directory with three records of any bytes, as an extraction that is done leaves it."""
    hm.claim_directory(str(path), hm.run_of(IDENTITY))
    hm.claim_run(str(path), IDENTITY, {"host": path.name})
    (path / "safetensors").mkdir()
    writer = hm.ManifestWriter(str(path))
    for record in range(first, first + 3):
        name, content = f"safetensors/data_{record}.safetensors", bytes([record]) * 50
        (path / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        writer.append([{"id": record, "source": "a", "line": 1, "file": name, "bytes": 50, "tokens": 3, "sha256": digest}])
    writer.close()
    hm.write_json(f"{path}/{hm.STATUS}", {"state": "done"})
    return path


@pytest.fixture
def play(tmp_path):
    """Runs tasks, or a playbook, on hosts with these variables each; returns what it printed once it ended as expected."""
    (tmp_path / "ansible.cfg").touch()
    # A socket of supervisor's is looked for below it, and its path may not be long.
    state = Path(tempfile.mkdtemp(prefix="hsb-"))
    plan = {"run": hm.run_of(IDENTITY), "share": "0-2", "total": {"records": 3, "tokens": 9}, "held": {}}
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "dataset_stage_packed": {"path": str(tmp_path / "packed"), "meta": {"records": 3, "tokens": 9}},
        "extraction_identity": IDENTITY,
        "extraction_plan": plan,
        "extraction_output_dir": str(tmp_path / "out"),
        "extraction_report_dir": str(tmp_path / "reports"),
        "extraction_state_dir": f"{state}/{{{{ inventory_hostname }}}}",
        "extraction_code_dir": f"{tmp_path}/code-{{{{ inventory_hostname }}}}",
        "extraction_python": sys.executable,
        "extraction_min_free_bytes": 1 << 20,
        "_bridge_cache_dir": str(tmp_path / "payload"),
        "_bridge_code_dir": "{{ extraction_code_dir }}",
    }

    def run(what, hosts=None, *arguments, fails=False, environment=None, groups=()):
        hosts = {name: {**common, **variables} for name, variables in (hosts or {"one": {}}).items()}
        inventory = {"sglang": {"hosts": hosts}, **{group: {"hosts": dict.fromkeys(hosts, {})} for group in groups}}
        (tmp_path / "hosts.json").write_text(json.dumps(inventory))
        if isinstance(what, Path):
            playbook = what
        else:
            playbook = tmp_path / "play.yml"
            tasks = "".join(f"    {line}\n" for task in what for line in task.splitlines())
            playbook.write_text(f"- hosts: sglang\n  gather_facts: true\n  tasks:\n{tasks}")
        command = [str(Path(sys.executable).parent / "ansible-playbook"), playbook, "-i", "hosts.json", *arguments]
        surroundings = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
        surroundings["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / "playbooks" / "collections")
        surroundings.update(environment or {})
        done = subprocess.run(command, cwd=tmp_path, env=surroundings, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.state = state
    yield run
    shutil.rmtree(state)


def reported(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "reports" / "report.json").read_text())


def test_what_a_later_verification_finds_is_in_the_report(play, tmp_path):
    make_output(tmp_path / "out" / "one")
    (tmp_path / "flip.py").write_text("import sys; f = open(sys.argv[1], 'r+b'); f.write(b'X')\n")
    flip = FLIP % (sys.executable, tmp_path / "flip.py")
    rescued = f"- block:\n    {part('verify')}\n  rescue:\n    {part('account')}\n    - ansible.builtin.fail: {{msg: given up}}"
    said = play([PAYLOAD, part("verify"), part("account"), flip, rescued], fails=True)
    assert "1 files in" in said and "given up" in said
    (row,) = reported(tmp_path)["hosts"]
    assert row["verified"] is False and [problem["id"] for problem in row["problems"]] == [1]
    assert row["problems"][0]["file"] == "safetensors/data_1.safetensors"


def test_what_a_call_becomes_verifies(play, tmp_path):
    make_output(tmp_path / "out" / "one")
    sudo, python = tmp_path / "sudo", tmp_path / "python"
    sudo.write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nBECAME=become exec "$@"\n')
    python.write_text('#!/bin/sh\necho "read with ${BECAME:-no become}" >&2; exit 1\n')
    for program in (sudo, python):
        program.chmod(0o755)
    hosts = {"one": {"extraction_python": str(python), "ansible_become_exe": str(sudo)}}
    said = play(ROOT / "playbooks/verify.yml", hosts, "--become", fails=True, environment={"ANSIBLE_BECOME_ALLOW_SAME_USER": "true"})
    assert "read with become" in said


@PLAYED
def test_a_report_is_written_where_the_files_of_every_host_are_wrong(play, tmp_path):
    for name in ("one", "two"):
        (make_output(tmp_path / "out" / name) / "safetensors" / "data_1.safetensors").write_bytes(b"X" * 50)
    said = play([PAYLOAD, part("report")], {"one": {}, "two": {}}, fails=True)
    assert said.count("1 files in") >= 2
    report = reported(tmp_path)
    assert [(row["verified"], len(row["problems"])) for row in report["hosts"]] == [(False, 1), (False, 1)]
    assert report["totals"]["verified"] is False and report["totals"]["complete"]


# Stands for the controller's interpreter: keeps what the archive would have been asked.
ASKED = """#!/bin/sh
cat > "$(dirname "$0")/asked.json"
echo '{"share": "", "records": 0, "tokens": 0}'
"""


def test_who_takes_over_shares_with_those_alone_that_will(play, tmp_path):
    """Not with a host that failed and whose server is still brought back, one without a share, and one that is through."""
    python = tmp_path / "python"
    python.write_text(ASKED)
    python.chmod(0o755)
    make_output(tmp_path / "elsewhere" / "failed")
    failed = {"bridge_failure": "it broke", "extraction_output_dir": str(tmp_path / "elsewhere"), "extraction_service_name": "its-own"}
    hosts = {"one": {"_bridge_archive": "pyz", "extraction_controller_python": str(python), "__extraction_before": {"run": "r"}}}
    hosts["one"]["extraction_manager"] = "supervisor"
    hosts.update(
        failed=failed, idle={"extraction_plan": {"share": ""}}, through={"extraction_through": True}, busy={"extraction_weight": 3}
    )
    claims = part("claim") + "\n  when: inventory_hostname == 'one'"
    play([claims], hosts, groups=["hsb_work"])
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["weights"] == {"one": 1.0, "busy": 3.0}
    assert asked["failed"] == {"failed": {"done": "0-2", "refused": [""]}}


@PLAYED
def test_each_host_has_an_output_directory_of_its_own(play, tmp_path):
    make_output(tmp_path / "out" / "one")
    make_output(tmp_path / "elsewhere" / "two", 3)
    hosts = {"one": {}, "two": {"extraction_output_dir": str(tmp_path / "elsewhere")}}
    breaks = "- ansible.builtin.fail: {msg: it broke}\n  when: inventory_hostname == 'two'"
    play([PAYLOAD, breaks, part("report")], hosts, fails=True)
    rows = {row["host"]: row for row in reported(tmp_path)["hosts"]}
    assert [rows[name]["records"] for name in hosts] == [3, 3]
    assert rows["two"]["output_dir"] == str(tmp_path / "elsewhere" / "two")
    linked = tmp_path / "linked"
    for host in hosts.values():
        host.update(extraction_collect_dir=str(linked), extraction_collect_mode="link", extraction_collect_partial=True)
    play(ROOT / "playbooks/collect.yml", hosts)
    assert sorted(hm.Manifest(str(linked)).entries) == list(range(6))


# The extractor adds a line between the checksum that Ansible takes and its copy.
GROWING = """
from ansible.plugins.connection.local import DOCUMENTATION, Connection as Local
DOCUMENTATION = DOCUMENTATION.replace("name: local", "name: growing")
class Connection(Local):
    transport = "growing"
    def fetch_file(self, in_path, out_path):
        if in_path.endswith("manifest.jsonl"):
            with open(in_path, "a") as stream:
                stream.write('{"id": 3, "sou')
        super().fetch_file(in_path, out_path)
"""


def test_states_are_pulled_while_the_manifest_grows(play, tmp_path):
    make_output(tmp_path / "out" / "one")
    (tmp_path / "growing.py").write_text(GROWING)
    hosts = {"one": {"ansible_connection": "growing", "extraction_collect_dir": str(tmp_path / "collected")}}
    # The packed set, which tells how many there are, is not here.
    hosts["one"]["extraction_collect_partial"] = True
    play(ROOT / "playbooks/collect.yml", hosts, environment={"ANSIBLE_CONNECTION_PLUGINS": str(tmp_path)})
    assert sorted(hm.Manifest(str(tmp_path / "collected")).entries) == [0, 1, 2]


def test_a_host_that_never_had_a_share_is_passed_over(play, tmp_path):
    out, converted = make_output(tmp_path / "out" / "one"), tmp_path / "converted"
    hosts = {name: {"extraction_convert_dir": str(converted), "extraction_convert_format": "specforge"} for name in ("one", "two")}
    said = play([PAYLOAD, part("verify"), part("convert") + "\n  when: inventory_hostname == 'two'"], hosts)
    assert f"Nothing was extracted into {tmp_path}/out/two, so nothing is verified" in said
    assert f"Nothing was extracted into {tmp_path}/out/two, so nothing is converted" in said
    assert not converted.exists() and not (play.state / "two").exists()
    # What is refused as a whole is about no file.
    (out / hm.MARKER).unlink()
    said = play(ROOT / "playbooks/verify.yml", hosts, fails=True)
    assert f"Nothing was verified in {out}" in said and "0 files" not in said and f"has no {hm.MARKER}" in said


@pytest.mark.parametrize("what", ["verify", "convert"])
def test_without_an_interpreter_the_variable_is_named(play, tmp_path, what):
    make_output(tmp_path / "out" / "one")
    converts = {"extraction_convert_dir": str(tmp_path / "converted"), "extraction_convert_format": "specforge"}
    said = play([part(what)], {"one": {"extraction_python": "", **converts}}, fails=True)
    assert "extraction_python is not set, and no server is found that would tell" in said and not (tmp_path / "converted").exists()


@pytest.mark.parametrize("playbook", ["verify.yml", pytest.param("convert.yml", marks=PLAYED)])
def test_where_no_host_has_anything_the_directory_is_a_wrong_one(play, tmp_path, playbook):
    host = {"extraction_convert_dir": str(tmp_path / "converted"), "extraction_convert_format": "specforge"}
    said = play(ROOT / "playbooks" / playbook, {"one": host, "two": host}, fails=True)
    assert f"No host of this play has states: {tmp_path}/out/one, {tmp_path}/out/two" in said
    assert not (tmp_path / "converted").exists()


def test_hosts_of_one_machine_convert_beside_each_other(play):
    told = "- ansible.builtin.debug: {msg: 'unit {{ __extraction_convert_service }}'}"
    said = play([part("status, public: true"), told], {"one": {}, "two": {"extraction_service_name": "second"}})
    assert "unit hidden-state-extraction-conversion" in said and "unit second-conversion" in said


# Every unit failed, and of one systemd says nothing.
SYSTEMCTL = """#!/bin/sh
case "$*" in *mute*) exit 1;; esac
echo "LoadState=loaded\nActiveState=failed\nMainPID=0\nExecMainStatus=2"
"""


def test_the_status_is_of_the_last_start(play, tmp_path):
    """That of a service of this very directory; another's end, and a manager that does not answer, tell nothing about it."""
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(SYSTEMCTL)
    systemctl.chmod(0o755)
    hosts = {name: {"extraction_manager": "systemd"} for name in ("one", "other", "mute", "never")}
    hosts["mute"]["extraction_service_name"] = "mute"
    for name, output in (("one", "out/one"), ("other", "later/other"), ("mute", "out/mute")):
        make_output(tmp_path / "out" / name)
        settings = play.state / name / "extraction"
        settings.mkdir(parents=True)
        (settings / "config.json").write_text(json.dumps({"output_dir": str(tmp_path / output)}))
    told = "- ansible.builtin.debug: {msg: '{{ inventory_hostname }} is {{ extraction_status.state }}, {{ extraction_status.message }}.'}"
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = play([part("status"), told], hosts, environment={"PATH": path})
    assert "one is failed, the extraction service failed before it could start; its log says why." in said
    assert all(line in said for line in ("other is done, .", "mute is done, .", "never is absent, ."))


# Does not answer at the first look.
LATE = """#!/bin/sh
mkdir "$0.asked" 2>/dev/null && exit 1
echo "LoadState=loaded\\nActiveState=inactive\\nMainPID=0\\nExecMainStatus=0"
"""


def test_a_look_that_fails_does_not_give_an_extraction_up(play, tmp_path):
    make_output(tmp_path / "out" / "one")
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(LATE)
    systemctl.chmod(0o755)
    host = {"extraction_manager": "systemd", "extraction_watch_interval": 1}
    said = play([part("watch")], {"one": host}, environment={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert "one: cannot be looked at: systemctl show" in said
