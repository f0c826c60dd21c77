# SPDX-License-Identifier: GPL-3.0-or-later
"""extract.yml on a server that does not come up in capture mode: the host fails by name, and the old server answers, patch out.

And on one that captures: what it refuses is listed and stops nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from conftest import drill
from stand_in_site import StandInSite


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def site(code):
    site = StandInSite(code)
    yield site
    site.close()


def is_back(site, output: str, before: dict, pristine: bytes) -> None:
    """What every drill ends with."""
    assert "one                        : " in output and "failed=1" in output
    assert "This host is as it was before: patch out, server serving" in output
    assert site.model_file.read_bytes() == pristine
    assert site.seen() == before
    # No host is left that the last play could run on.
    [row] = json.loads((site.directory / "reports" / "report.json").read_text())["hosts"]
    assert (row["host"], row["records"]) == ("one", 0) and "This host is as it was before" in row["broke"]


# Name: (how the server behaves in capture mode, variables, what the failure says).
DRILLS = {
    "a flag that the release does not know": ("", {"sglang_server_extra_capture_args": ["--no-such-flag"]}, "does not know --no-such-flag"),
    "a wrong model path": ("", {"sglang_server_extra_capture_args": ["--model-path", "/nowhere"]}, "model path is wrong"),
    "a server that dies": ("die=2 ready=600", {}, "not enough GPU memory"),
    # The time is that of the way back as well.
    "/health answers 503 for ever": ("health=503", {"sglang_server_health_timeout": 20}, "not ready within 20 s"),
    # A manager that can run no extractor, told by its name.
    "/generate hangs": ("generate=hang", {"sglang_server_health_timeout": 20, "sglang_server_manager": "process"}, "not ready within 20 s"),
}


# One stands for the others in the sample, as it is waited for; test_3_refusals has a flag that no release knows.
SAMPLE = ("/generate hangs",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else drill) for name in DRILLS])
def test_the_old_server_is_back_after(site, name):
    behaviour, variables, said = DRILLS[name]
    site.variables.update(variables)
    site.start(site.command(), STAND_IN_CAPTURE=behaviour)
    before, pristine = site.seen(), site.model_file.read_bytes()
    output = site.run("playbooks/extract.yml", fails=True)
    assert said in output
    is_back(site, output, before, pristine)


# Takes the port as soon as the server has left it.
THIEF = (
    "import socket, time\n"
    "s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "while True:\n"
    "    try:\n"
    "        s.bind(('127.0.0.1', %d)); s.listen(); break\n"
    "    except OSError: time.sleep(0.01)\n"
    "time.sleep(1000)\n"
)


@drill
def test_a_port_that_is_taken_between_stop_and_start_and_left_again(site):
    """Another process waits for the port to become free; it is named, and the server comes back once it is gone."""
    site.start(site.command())
    before, pristine, lines = site.seen(), site.model_file.read_bytes(), []
    with subprocess.Popen([sys.executable, "-c", THIEF % site.port]) as thief, site.begin("playbooks/extract.yml") as running:
        for line in running.stdout:
            lines.append(line)
            if "TASK [See whether the patch is this host's to take out]" in line:
                thief.kill()
        thief.kill()
    output = "".join(lines)
    print(output)
    assert f"port {site.port} is still taken: pid {thief.pid}: " in output
    is_back(site, output, before, pristine)


@drill
def test_a_port_that_is_taken_between_stop_and_start_and_kept(site):
    """The failure says what holds the port and how to mend it; the next run repairs the host."""
    site.variables["sglang_server_port_timeout"] = 3
    site.start(site.command())
    before, pristine = site.seen(), site.model_file.read_bytes()
    with subprocess.Popen([sys.executable, "-c", THIEF % site.port]) as thief:
        output = site.run("playbooks/extract.yml", fails=True)
        assert f"{thief.pid}" in output and "THIS HOST IS NOT AS IT WAS BEFORE" in output
        assert f"Port {site.port}: held by process {thief.pid}" in output and f"kill {thief.pid}\n" in output
        assert "ansible-playbook serve.yml" in output and "launch.py" in output
        thief.kill()
    site.play("restored")
    assert site.seen() == before and site.model_file.read_bytes() == pristine


def test_a_server_that_does_not_take_the_key_is_left_alone(site):
    """Its /health asks for none, so nothing else would say so before it is down."""
    site.variables["sglang_server_api_key"] = "right"
    server = site.start(site.command("--api-key", "right"))
    site.variables["sglang_server_api_key"] = "wrong"
    output = site.run("playbooks/preflight.yml", fails=True)
    assert "Nothing was changed" in output and "one: the server does not take the API key" in output
    output = site.play("capture", fails=True)
    assert "the server on port %d does not take the API key" % site.port in output and "set sglang_server_api_key" in output
    assert server.poll() is None and not site.record().exists()
    # The role reads it from the process, and the extractor has none.
    site.variables["sglang_server_api_key"] = ""
    output = site.run("playbooks/preflight.yml", fails=True)
    assert "one: the server asks for an API key, and the extractor is given none" in output


def test_a_server_by_hand_that_never_stopped_is_as_it_was(site):
    """The capture fails after the service of the return by itself was told to run, and before the server is."""
    (site.directory / "out.yml").write_text(json.dumps([{"name": "Drain", "ansible.builtin.fail": {"msg": "no balancer"}}]))
    site.variables["sglang_server_tasks_before_stop"] = str(site.directory / "out.yml")
    site.start(site.command())
    before, pristine, pid = site.seen(), site.model_file.read_bytes(), site.pid()
    output = site.run("playbooks/extract.yml", fails=True)
    assert "no balancer" in output and site.pid() == pid
    is_back(site, output, before, pristine)


@drill
def test_a_server_that_is_slow_to_serve_again_goes_on(site):
    site.start(site.command(), STAND_IN="ready=10")
    before = site.seen()
    site.play("capture")
    output = site.play("restored", "-e", '{"sglang_server_health_timeout": 3}', fails=True)
    assert "not ready within 3 s" in output and site.pid() is None
    deadline = time.monotonic() + 60
    while site.pid() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert site.seen() == before
    site.play("restored")
    assert site.seen() == before


def test_a_controller_that_is_killed_between_stop_and_start(site):
    site.start(site.command(), STAND_IN_CAPTURE="ready=600")
    before = site.seen()
    with site.begin("playbooks/extract.yml") as running:
        for line in running.stdout:
            if "Wait until the server is ready" in line or "loading, no answer yet" in line:
                break
        os.killpg(running.pid, signal.SIGKILL)
    assert site.pid() is None
    # The capture server never is ready; the one that serves is given as long.
    site.variables["sglang_server_health_timeout"] = 20
    output = site.run("playbooks/extract.yml", fails=True)
    assert "This host is as it was before" in output
    assert site.seen() == before


def test_a_record_that_is_refused_is_listed_and_stops_nothing_else(site):
    """The shortest but one of eight, which the canary does not take; the second run tries it again."""
    site.capturing(8, "refuse=20")
    before, out = site.seen(), site.directory / "out" / "one"
    for generation in (0, 1):
        output = " ".join(site.run("playbooks/extract.yml", fails=True).split())
        [entry] = json.loads((site.directory / "reports" / "report.json").read_text())["failed"]
        assert (entry["host"], entry["source"], entry["line"]) == ("one", "one", 2) and "HTTP 400" in entry["reason"]
        assert f"Failed record {entry['record']} (one line 2) on one: " in output and "asked to refuse it" in output
        assert "7 of 8 records are done (1 failed by themselves)" in output and "run the same command again" in output
        # Nothing was broken: not the watch, not the host, and the server serves as before.
        assert "rescued=0" in output and "Give this host up" not in output and site.seen() == before
        report = json.loads((site.directory / "reports" / "report.json").read_text())
        assert (report["totals"]["records"], report["totals"]["failed"], report["totals"]["verified"]) == (7, 1, True)
        assert [(row["state"], row["broke"], row["hashed"]) for row in report["hosts"]] == [("incomplete", "", 7)]
        done = {json.loads(line)["id"] for line in (out / "manifest.jsonl").read_text().splitlines()}
        assert done == set(range(8)) - {entry["record"]}
        assert json.loads((out / "status.json").read_text())["generation"] == generation
    shown = " ".join(site.run("playbooks/status.yml").split())
    assert "extraction: incomplete: 7/8 records" in shown and "1 failed" in shown and "(one line 2): HTTP 400" in shown
    assert "asked to refuse it" in site.run("playbooks/extract.yml", "--tags", "watch", fails=True)


@drill
def test_a_run_that_attaches_with_other_settings_has_them_count(site):
    """The first play is killed while its extractor has all ahead of it; the second says until when, which has come."""
    hold = site.directory / "hold"
    hold.touch()
    site.capturing(8, f"hold={hold}")
    site.variables["extraction_concurrency"] = 1
    before, out = site.seen(), site.directory / "out" / "one"
    with site.begin("playbooks/extract.yml") as running:
        for line in running.stdout:
            if "0/8 records" in line:
                break
        os.killpg(running.pid, signal.SIGKILL)
    log, lines = site.directory / "state/supervisor/log/hidden-state-extraction.log", []
    with site.begin("playbooks/extract.yml", "-e", "extraction_until=2026-01-31T12:00:00+00:00") as running:

        def let_go() -> None:
            # What is in flight is finished once the extractor is told to stop; a play that has attached shows its progress.
            while "stopping: " not in log.read_text() and not any("0/8 records" in line for line in lines) and running.poll() is None:
                time.sleep(0.2)
            hold.unlink()

        threading.Thread(target=let_go, daemon=True).start()
        for line in running.stdout:
            lines.append(line)
    print("".join(lines))
    assert running.returncode == 0, "an end as asked"
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "stopped" and status["generation"] == 1 and len((out / "manifest.jsonl").read_text().splitlines()) < 8
    assert site.seen() == before
