# SPDX-License-Identifier: GPL-3.0-or-later
"""What goes wrong ends with a message that names the thing and the remedy, and leaves the server as it was."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from conftest import BIN, ROOT


@pytest.mark.parametrize("arguments", [("status.yml",), ("extract.yml",), ("extract.yml", "-e", "extraction_state=stopped")])
def test_an_inventory_without_hosts_is_refused(tmp_path, arguments):
    empty = tmp_path / "hosts.yml"
    empty.write_text("all: {children: {sglang: {}}}\n")
    playbook, *rest = arguments
    done = subprocess.run(
        [BIN / "ansible-playbook", f"playbooks/{playbook}", "-i", empty, *rest], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and "No host to work on" in done.stdout + done.stderr


def test_a_limit_that_matches_no_host_is_refused(site, tmp_path):
    inventory = json.loads(site.inventory.read_text())
    inventory["all"]["hosts"] = {"trainer": {"ansible_connection": "local"}}
    both = tmp_path / "hosts.json"
    both.write_text(json.dumps(inventory))
    for limit, message in (("trainer", "No host to work on"), ("nosuch", "match")):
        done = subprocess.run(
            [BIN / "ansible-playbook", "playbooks/extract.yml", "-i", both, "--limit", limit],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0 and message in done.stdout + done.stderr, done.stdout + done.stderr


def test_a_broken_line_is_named(site, tmp_path):
    sources = tmp_path / "sources"
    shutil.copytree(site.directory / "sources", sources)
    broken = sorted(sources.glob("*.jsonl"))[3]
    lines = broken.read_text().splitlines()
    lines[4] = lines[4][:-5]
    broken.write_text("\n".join(lines) + "\n")
    listed = [{"name": path.stem, "path": str(path)} for path in sorted(sources.glob("*.jsonl"))]
    output = site.play("extract.yml", extra={"dataset_stage_sources": listed}, fails=True)
    assert f"{broken}:5" in output


def test_a_data_set_that_the_extractor_would_not_find_is_named_before_anything_stops(site):
    output = site.play("extract.yml", extra={"extraction_dataset_dir": "/srv/elsewhere"}, fails=True)
    assert "Nothing was changed" in output and "the extractor looks into /srv/elsewhere" in output


def test_a_dump_directory_that_is_not_writable_is_named_before_anything_stops(site):
    pids = site.server_pids()
    extra = {"extraction_output_dir": str(site.directory / "other"), "extraction_dump_dir": "/proc/hsb"}
    output = site.play("extract.yml", extra=extra, fails=True)
    assert "extraction_dump_dir" in output and "/proc" in output and "remedy" in output
    assert site.server_pids() == pids and site.serving()


def test_a_model_path_that_is_wrong_is_named_before_anything_stops(site):
    pids = site.server_pids()
    output = site.play("extract.yml", extra={"sglang_server_model": "/nosuch/model"}, fails=True)
    assert "/nosuch/model" in output
    assert site.server_pids() == pids and site.serving()


def test_a_server_that_does_not_come_up_is_brought_back_as_it_was(site):
    before = site.model_file.read_bytes()
    extra = {
        "extraction_output_dir": str(site.directory / "other"),
        "sglang_server_extra_capture_args": ["--no-such-flag"],
    }
    output = site.play("extract.yml", extra=extra, fails=True)
    assert "no-such-flag" in output, "the last lines of the server's log are not shown"
    assert site.serving()
    assert site.model_file.read_bytes() == before
    assert not list((site.directory / "other").rglob("*.ckpt"))


def test_layers_that_the_model_has_not_are_named_before_anything_stops(site):
    pids = site.server_pids()
    extra = {"extraction_output_dir": str(site.directory / "other"), "extraction_layers": [1, 3, 99]}
    output = site.play("extract.yml", extra=extra, fails=True)
    assert "layer 99 is out of range; the model has layers 0 to 7" in output
    assert site.server_pids() == pids and site.serving()
