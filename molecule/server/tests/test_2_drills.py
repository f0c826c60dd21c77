# SPDX-License-Identifier: GPL-3.0-or-later
"""extract.yml on the operator's unit, and what goes wrong in it: the host fails by name, and the old server answers, patch out."""

from __future__ import annotations

import re

import pytest

# Ends the server's main process once it has lived for that long in capture mode.
KILLER = """
import glob, os, signal, time
while True:
    for path in glob.glob("/proc/[0-9]*/environ"):
        pid = int(path.split("/")[2])
        try:
            capturing = b"SGLANG_HS_DUMP_DIR=" in open(path, "rb").read() and b"sglang.launch_server" in open(f"/proc/{pid}/cmdline", "rb").read()
        except OSError:
            continue
        if capturing:
            time.sleep(20)
            os.kill(pid, signal.SIGKILL)
            raise SystemExit
    time.sleep(0.2)
"""
# Takes the port as soon as the server has left it; leaves it once it is told to.
THIEF = """
import os, socket, time
taken = socket.socket()
taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
while True:
    try:
        taken.bind(("127.0.0.1", 30000))
        break
    except OSError:
        time.sleep(0.01)
taken.listen()
while not os.path.exists("/tmp/thief-go"):
    time.sleep(0.1)
"""


def ended_as_before(server, output: str) -> None:
    """What every drill ends with."""
    assert server.recap(output)["failed"] == 1
    assert "This host is as it was before: patch out, server serving" in output
    assert not server.is_patched()
    server.is_as_before()


@pytest.mark.parametrize(
    "arguments, said",
    [(["--no-such-flag"], "does not know --no-such-flag"), (["--model-path", "/nowhere"], "the model path is wrong")],
    ids=["a wrong flag", "a wrong model path"],
)
def test_a_server_that_does_not_start(server, arguments, said):
    output = server.play("playbooks/extract.yml", {"sglang_server_extra_capture_args": arguments}, fails=True)
    assert said in output
    ended_as_before(server, output)


def test_a_server_that_dies_after_20_s(server):
    server.spawn("python3", "-c", KILLER)
    output = server.play("playbooks/extract.yml", fails=True)
    assert "died" in output
    ended_as_before(server, output)


@pytest.fixture
def thief(server):
    server.host.check_output("rm -f /tmp/thief-go")
    server.spawn("python3", "-c", THIEF)
    yield
    server.host.check_output("touch /tmp/thief-go")


def test_a_port_that_is_taken_and_left(server, thief):
    output = server.play(
        "playbooks/extract.yml",
        fails=True,
        at=("TASK [See whether the patch is this host's to take out]", 1, lambda _play: server.host.run("touch /tmp/thief-go")),
    )
    assert re.search(r"port 30000 is still taken: pid \d+: python3 -c import os, socket, time", output)
    ended_as_before(server, output)


def test_a_port_that_is_taken_and_kept(server, thief):
    output = server.play("playbooks/extract.yml", {"sglang_server_port_timeout": 3}, fails=True)
    assert server.recap(output)["failed"] == 1 and server.seen() is None
    assert "THIS HOST IS NOT AS IT WAS BEFORE" in output and "was not left within 3 s" in output
    (holder,) = set(re.findall(r"Port 30000: held by process (\d+) \(python3 -c", output))
    # A unit whose script does not end well at SIGTERM has failed, says systemd.
    assert re.search("The server: (stopped|failed), no process, health down", output) and "The model source: holds no patch" in output
    # The commands that it gives, as they stand there.
    commands = [line.strip() for line in output.rpartition("or on the host:")[2].partition("PLAY")[0].splitlines() if line.strip()]
    assert commands[0] == f"kill {holder}" and commands[-1] == "journalctl -f -u operators", commands
    for command in commands[:-1]:
        server.host.check_output(command)
    server.is_as_before()
    # What was recorded before the run is still there.
    pid = server.seen()["pid"]
    server.drive("serving")
    assert server.drive("serving") == 0 and server.seen()["pid"] == pid


def test_a_controller_that_is_killed_between_stop_and_start(server):
    with pytest.raises(AssertionError, match="ended with -9"):
        server.play("playbooks/extract.yml", at=("Patch the model source", 1, server.kill_controller))
    assert server.seen() is None and not server.answers()
    output = server.play("playbooks/extract.yml")
    assert server.recap(output)["failed"] == 0
    server.is_as_before()
    server.play("playbooks/unpatch.yml")
    server.host.check_output("rm -rf /srv/hidden_states")
