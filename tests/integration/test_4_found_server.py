# SPDX-License-Identifier: GPL-3.0-or-later
"""A server that was started by hand: recorded, replaced for the capture, given back as it was; and what goes wrong with one."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
import time

import pytest

from conftest import drill
from stand_in_site import StandInSite, changed


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """The service manager's environment, made once for all."""
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def site(code):
    site = StandInSite(code)
    yield site
    site.close()


def arguments_of(pid: int) -> list[str]:
    return [word for word in pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0") if word]


def test_a_server_that_was_started_by_hand(site):
    secret = "sk-never-to-be-seen"
    site.variables["sglang_server_api_key"] = secret
    site.start(site.command("--enable-mixed-chunk", "--api-key", secret, "--tp=1"))
    by_hand = site.seen()
    output = site.play("serving", "-vvv")
    assert changed(output) == 0 and site.seen() == by_hand and secret not in output

    output = site.play("capture", "-vvv")
    assert secret not in output
    words = arguments_of(site.pid())
    added = ["--chunked-prefill-size", "-1", "--disable-prefill-cuda-graph", "--enforce-disable-flashinfer-allreduce-fusion"]
    assert "--enable-mixed-chunk" not in words and words[-4:] == added
    assert "- --enable-mixed-chunk (decode rows are mixed into a prefill)" in output
    capturing = site.seen()
    assert set(capturing["environment"]) - set(by_hand["environment"]) == {f"SGLANG_HS_DUMP_DIR={site.directory}/dumps".encode()}
    pid = site.pid()
    assert changed(site.play("capture")) == 0 and site.pid() == pid

    site.play("restored")
    assert site.seen() == by_hand
    pid = site.pid()
    assert changed(site.play("serving")) == 0 and site.pid() == pid
    assert changed(site.play("restored")) == 0 and site.pid() == pid

    # And once more from there: it is the same server still, under a service manager now.
    site.play("stopped")
    assert site.pid() is None
    assert changed(site.play("stopped")) == 0
    site.play("restored")
    assert site.seen() == by_hand

    private = [path for path in (site.directory / "state").rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]
    assert len(private) >= 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in private if path.suffix == ".json"} == {0o600}
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 or stat.S_IMODE((site.directory / "state").stat().st_mode) == 0o700


def test_secrets_of_a_described_server_are_seen_nowhere(site):
    key, token = "sk-never-to-be-seen", "hf-nor-this"
    site.ours()
    site.variables["sglang_server_api_key"] = key
    site.variables["sglang_server_environment"]["HF_TOKEN"] = token
    for wanted in ("serving", "capture", "restored"):
        output = site.play(wanted, "-vvv", "--diff")
        assert key not in output and token not in output
        assert key not in " ".join(arguments_of(site.pid()))
    state = site.directory / "state"
    texts = {path: path.read_text(errors="replace") for path in state.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if key in text or token in text]
    # Nobody else passes through it.
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "wanted, variable, words",
    [
        ("serving", "sglang_server_args", ["--api-key", "{}"]),
        ("serving", "sglang_server_args", ["--api={}"]),
        ("capture", "sglang_server_extra_capture_args", ["--adm", "{}"]),
        ("capture", "sglang_server_extra_capture_args", ["--admin-api-key={}"]),
    ],
)
def test_a_key_among_the_arguments_is_refused_and_not_shown(site, wanted, variable, words):
    key = "sk-never-to-be-seen"
    site.ours()
    site.variables[variable] = ["--tp", 1, *(word.format(key) for word in words)]
    output = site.play(wanted, "-vvv", "--diff", fails=True)
    assert f"would be started with {words[0].split('=')[0]} in " in output and "set sglang_server_api_key" in output and key not in output
    assert not (site.directory / "state" / "services").exists()


def test_a_key_among_the_arguments_is_a_problem_of_preflight(site):
    key = "sk-never-to-be-seen"
    site.ours()
    site.variables["sglang_server_args"] = ["--tp", "1", "--api-key", key]
    output = site.run("playbooks/preflight.yml", "-vvv", fails=True)
    assert "started with --api-key in " in output and "set sglang_server_api_key" in output and key not in output


@drill
def test_a_server_is_taken_out_of_service_and_put_back(site):
    """The hooks run around the stop of a serving server and after it serves again, and requests in flight are waited for."""
    notes = site.directory / "notes"
    for name in ("out", "back"):
        task = {"name": name, "ansible.builtin.shell": f"echo {name} >> {notes}"}
        (site.directory / f"{name}.yml").write_text(json.dumps([task]))
    site.variables["sglang_server_tasks_before_stop"] = str(site.directory / "out.yml")
    site.variables["sglang_server_tasks_after_start"] = str(site.directory / "back.yml")
    site.variables["sglang_server_drain_timeout"] = 3
    site.start(site.command(), STAND_IN="busy=2")
    output = site.play("capture")
    assert "2 requests in flight, and no time left" in output and notes.read_text() == "out\n"
    site.play("restored")
    site.play("restored")
    assert notes.read_text() == "out\nback\n"


@drill
def test_a_wrapper_that_starts_it_again_is_noticed(site):
    wrapper = site.directory / "wrapper.sh"
    command = " ".join(f"'{word}'" for word in site.command())
    wrapper.write_text(f"while :; do {command}; sleep 1; done\n")
    site.start(["/bin/sh", str(wrapper)])
    first = site.pid()
    output = site.play("stopped", fails=True)
    assert "started the server again" in output and str(wrapper) in output
    # It may be between two turns of the wrapper just then.
    deadline = time.monotonic() + 30
    while site.pid() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert site.pid() not in (None, first)


def test_a_server_that_ignores_sigterm_is_killed(site):
    site.start(site.command(), STAND_IN="deaf")
    site.play("stopped")
    assert site.pid() is None


def test_what_another_process_holds_is_no_server(site):
    site.ours()
    script = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', %d)); s.listen(); time.sleep(600)" % site.port
    with subprocess.Popen([sys.executable, "-c", script]) as holder:
        output = site.play("capture", fails=True)
        holder.kill()
    assert f"port {site.port} is taken: pid {holder.pid}" in output


@pytest.mark.parametrize(
    "started, added, named",
    [
        (["--enable-dp-attention"], [], "--enable-dp-attention"),
        ([], ["--tp", "2", "--dp-size", "2"], "--dp-size"),
        ([], ["--tp", "2", "--dp=2"], "--dp, short for --dp-size"),
        (["--config", "sglang.yaml"], [], "--config: what its file turns on is not seen"),
    ],
)
def test_contradictions_are_refused_before_anything_stops(site, started, added, named):
    (site.model / "sglang.yaml").write_text("dp-size: 2\n")
    site.start(site.command(*started))
    site.variables["sglang_server_extra_capture_args"] = added
    pid = site.pid()
    output = site.play("capture", fails=True)
    assert "capture cannot work with" in output and named in output
    assert site.pid() == pid and os.path.exists(f"/proc/{pid}")


@drill
def test_a_capture_that_does_not_come_up_gives_the_server_back(site):
    site.start(site.command(), STAND_IN_CAPTURE="die=1 ready=5")
    by_hand = site.seen()
    output = site.play("capture", fails=True)
    assert "not enough GPU memory" in output and "died" in output
    assert site.pid() is None
    site.play("restored")
    assert site.seen() == by_hand


@drill
def test_the_record_survives_a_controller_that_went_away(site):
    site.start(site.command())
    by_hand = site.seen()
    site.play("stopped")
    assert json.loads(site.record().read_text())["manager"] == "process"
    # The next run knows of it by the record alone.
    site.play("capture")
    site.play("restored")
    assert site.seen() == by_hand
