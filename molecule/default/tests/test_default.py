# SPDX-License-Identifier: GPL-3.0-or-later
"""What the job leaves on a host: states for every record, the patch, and the server serving as before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

testinfra_hosts = [f"{os.environ.get('HSB_CONTAINER_ENGINE', 'podman')}://hsb-default"]

OUTPUT = "/srv/hidden_states/hsb-default"
PYTHON = "/opt/sglang_cpu/venv/bin/python"
URL = "http://127.0.0.1:30000"


def fetch(host, path: str, body: dict | None = None) -> str:
    """Ask the server from inside the host, with nothing but its Python; returns status and text."""
    code = (
        "import sys, urllib.request as u; d = sys.argv[2].encode() or None;"
        "r = u.urlopen(u.Request(sys.argv[1], d, {'Content-Type': 'application/json'}), timeout=60);"
        "print(r.status, r.read().decode())"
    )
    done = host.run("python3 -c %s %s %s", code, URL + path, json.dumps(body) if body else "")
    assert done.rc == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def manifest(host) -> list[dict]:
    return [json.loads(line) for line in host.file(f"{OUTPUT}/manifest.jsonl").content_string.splitlines()]


@pytest.fixture(scope="module")
def meta(host) -> dict:
    found = host.run("cat /var/lib/hidden_state_bridge/datasets/*/meta.json")
    assert found.rc == 0, found.stderr
    return json.loads(found.stdout)


def test_the_server_is_a_running_systemd_unit(host):
    assert host.file("/proc/1/comm").content_string.strip() == "systemd"
    unit = host.service("sglang")
    assert unit.is_running, host.run("systemctl status --no-pager sglang; journalctl --no-pager -n 50 -u sglang").stdout
    main = host.check_output("systemctl show --property MainPID --value sglang")
    assert "sglang" in host.check_output("tr '\\0' ' ' < /proc/%s/cmdline", main)


def test_the_server_serves_as_before(host):
    """In serving mode: nothing of the capture in its environment, and a drop-in that is gone."""
    main = host.check_output("systemctl show --property MainPID --value sglang")
    assert "SGLANG_HS_DUMP_DIR" not in host.check_output("tr '\\0' '\\n' < /proc/%s/environ", main)
    assert host.run("ls /run/systemd/system/sglang.service.d/*").rc != 0
    assert fetch(host, "/health") == "200"


def test_the_server_answers(host):
    body = {"input_ids": [0, 75, 104, 111, 111, 114], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    status, dummy, text = fetch(host, "/generate", body).partition(" ")
    assert status == "200" and len(json.loads(text)["output_ids"]) == 4


def test_the_model_source_is_patched(host):
    source = host.check_output("%s -c %s", PYTHON, "import sglang, os; print(os.path.dirname(sglang.__file__))")
    text = host.file(f"{source}/srt/models/deepseek_v2.py").content_string
    assert text.count("# hidden_state.bridge begin ") == text.count("# hidden_state.bridge end ") >= 4
    assert host.file(f"{source}/srt/hs_capture/__init__.py").is_file


def test_the_manifest_is_complete(meta, manifest):
    assert sorted(entry["id"] for entry in manifest) == list(range(meta["records"]))
    assert sum(entry["tokens"] for entry in manifest) == meta["tokens"]
    assert {entry["source"] for entry in manifest} == {source["name"] for source in meta["sources"]}
    assert len(meta["sources"]) == 8


def test_every_file_of_the_manifest_is_there_and_private(host, manifest):
    listed = host.check_output("find %s -name 'data_*.ckpt' -printf '%%P %%s %%m %%u\\n'", OUTPUT).splitlines()
    expected = {f"{entry['file']} {entry['bytes']} 600 root" for entry in manifest}
    assert set(listed) == expected
    assert host.file(OUTPUT).mode == 0o700


def test_nothing_is_left_behind(host):
    # The counters of the capture stay for status.yml; they hold no prompt and no state.
    assert host.check_output("find /dev/shm/sglang_hs -type f ! -name capture.json 2>/dev/null || true") == ""
    assert host.check_output("find %s -name '*.tmp*'", OUTPUT) == ""


def test_the_extractor_has_ended(host):
    status = json.loads(host.file(f"{OUTPUT}/status.json").content_string)
    assert status["state"] == "done", status
    assert not host.service("hidden-state-extraction").is_running


def test_the_report_is_on_the_controller():
    reports = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "reports"
    assert {"report.html", "report.json", "summary.txt"} <= {path.name for path in reports.iterdir()}
