# SPDX-License-Identifier: GPL-3.0-or-later
"""The playbooks collect, convert and verify on two hosts of this machine that hold real output; no server runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plays import PLAYED

import hs_manifest as hm
from hidden_state_bridge.verify import verify

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(os.environ.get("HSB_ENGINE", ROOT / ".cache" / "sglang-cpu" / "venv")) / "bin" / "python"
RECORDS = 12
# Made with torch, which the controller does not have. Records 4 to 7 are done on both hosts.
MAKE = """
import sys
from pathlib import Path
sys.path[:0] = [f"{sys.argv[1]}/{name}" for name in ("plugins/module_utils", "roles/_bridge/files", "tests/unit/engine")]
import hosts
directory = Path(sys.argv[2])
dataset = hosts.make_dataset(directory, 12)
hosts.make_host(directory / "out" / "one", dataset, list(range(8)), ("safetensors", "speculators"))
hosts.make_host(directory / "out" / "two", dataset, list(range(4, 12)), ("safetensors", "speculators"))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    made = subprocess.run([ENGINE, "-c", MAKE, ROOT, directory], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return directory


@pytest.fixture
def play(site):
    """Runs a playbook; returns its output, once it ended as expected, and how many changes each host had."""
    (site / "ansible.cfg").touch()
    common = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "extraction_output_dir": str(site / "out"),
        "extraction_collect_dir": str(site / "collected"),
        "dataset_stage_cache_dir": str(site / "packed"),
        "extraction_dataset_dir": str(site / "packed"),
        "extraction_state_dir": f"{site}/state-{{{{ inventory_hostname }}}}",
        "extraction_code_dir": f"{site}/code-{{{{ inventory_hostname }}}}",
        "extraction_python": str(ENGINE),
        "extraction_manager": "supervisor",
        "extraction_min_free_bytes": 1 << 20,
        "extraction_watch_interval": 1,
        "_bridge_cache_dir": str(site / "payload"),
    }
    environment = {**os.environ, "ANSIBLE_CONFIG": str(site / "ansible.cfg"), "LC_ALL": "C.UTF-8", "ANSIBLE_NOCOLOR": "1"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / "playbooks" / "collections")

    def run(playbook, *arguments, fails=False, **variables):
        hosts = {name: {**common, **variables} for name in ("one", "two")}
        (site / "hosts.json").write_text(json.dumps({"sglang": {"hosts": hosts}}))
        command = [str(Path(sys.executable).parent / "ansible-playbook"), ROOT / "playbooks" / playbook, "-i", "hosts.json", *arguments]
        done = subprocess.run(command, cwd=site, env=environment, capture_output=True, text=True)
        print(done.stdout, done.stderr)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr, {host: int(n) for host, n in re.findall(r"^(one|two) .*changed=(\d+)", done.stdout, re.MULTILINE)}

    return run


def complete(path):
    entries = hm.Manifest(str(path)).entries
    assert list(entries) == list(range(RECORDS))
    result = verify(str(path), None)
    assert result["ok"], result["problems"]
    return entries


@PLAYED
def test_states_are_pulled_to_the_controller_once(site, play):
    play("collect.yml", "--check")
    assert not (site / "collected").exists()
    flipped = site / "out/two/safetensors/rows_0-2000/data_9.safetensors"
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    output, _changes = play("collect.yml", fails=True)
    assert "two: record 9" in output and "1 records cannot be collected" in output
    assert len(hm.Manifest(str(site / "collected")).entries) == RECORDS - 1
    flipped.write_bytes(content)
    output, _changes = play("collect.yml")
    assert f"{RECORDS} records of {RECORDS}" in output and "4 second copies superseded" in output
    entries = complete(site / "collected")
    assert [entries[record]["host"] for record in (3, 4, 7, 8)] == ["one", "one", "one", "two"]
    assert not (site / "collected" / ".incoming").exists()
    state = json.loads((site / "collected/speculators/state.json").read_text())
    assert (site / "collected/speculators" / state["_data_files"][0]["filename"]).exists()
    _output, changes = play("collect.yml")
    assert set(changes.values()) == {0}


def test_states_are_linked_on_a_shared_file_system_and_listed(site, play):
    linked = site / "linked"
    arguments = {"extraction_collect_dir": str(linked), "extraction_collect_mode": "link", "extraction_collect_host": "two"}
    play("collect.yml", extraction_collect_python=sys.executable, extraction_collect_formats="safetensors", **arguments)
    entry = complete(linked)[0]
    assert os.path.samefile(linked / entry["file"], site / "out" / "one" / entry["file"])
    play("collect.yml", extraction_collect_dir=str(site / "index"), extraction_collect_mode="list")
    index = [json.loads(line) for line in (site / "index/index.jsonl").read_text().splitlines()]
    assert len(index) == RECORDS + 4 and index[0]["at"][0].startswith(f"one:{site}/out/one/safetensors/")


def test_what_is_asked_wrongly_is_refused(site, play):
    output, _changes = play("collect.yml", fails=True, extraction_collect_dir="relative")
    assert "Say where the collection goes" in output
    output, _changes = play("collect.yml", fails=True, extraction_collect_host="nobody")
    assert "on a host of this play (one, two)" in output
    output, _changes = play("convert.yml", fails=True)
    assert "Say what to make and where" in output
    output, _changes = play("collect.yml", "--limit", "one", fails=True, extraction_collect_dir=str(site / "part"))
    assert "4 of 12 records are done on no host" in output


@PLAYED
def test_states_are_converted_on_the_hosts_and_repaired(site, play):
    arguments = {"extraction_convert_dir": str(site / "converted"), "extraction_convert_format": "specforge,modelopt"}
    try:
        play("convert.yml", **arguments)
        for host in ("one", "two"):
            assert verify(str(site / "converted" / host), None)["ok"]
        _output, changes = play("convert.yml", **arguments)
        assert set(changes.values()) == {0}
        (site / "converted/one/modelopt/rows_0-2000/data_2.pt").unlink()
        output, _changes = play("verify.yml", extraction_output_dir=str(site / "converted"), fails=True)
        assert "data_2.pt (record 2) is missing" in output
        output, changes = play("verify.yml", "-e", "verify_repair=true", extraction_output_dir=str(site / "converted"))
        assert "are put right; convert.yml writes their records again" in output and changes == {"one": 1, "two": 0}
        play("convert.yml", **arguments)
        converted = list(hm.Manifest(str(site / "converted" / "one")).entries)
        assert sorted(converted) == list(range(8)) and converted[-1] == 2
    finally:
        for host in ("one", "two"):
            control = [
                site / f"code-{host}/supervisor/bin/supervisorctl",
                "-c",
                site / f"state-{host}/supervisor/supervisord.conf",
                "shutdown",
            ]
            subprocess.run(control, check=False)
