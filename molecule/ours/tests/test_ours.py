# SPDX-License-Identifier: GPL-3.0-or-later
"""A server of ours, in a systemd unit and under supervisor. The tests of a host build on each other."""

from __future__ import annotations

import os
import sys
import time

import pytest
import yaml

sys.path.append(os.path.join(os.environ["MOLECULE_PROJECT_DIRECTORY"], "tests"))

from container_host import CAPTURE, GATE, PATIENCE, ROOT, ContainerHost

KEY, TOKEN = "sk-never-to-be-seen", "hf-nor-this"
# Files that hold a secret, each with its mode and whether somebody else than root comes as far as to it.
HOLDERS = """
import os, sys
def reachable(path):
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True
for top in ("/etc", "/run", "/var", "/opt/hidden_state_bridge", "/tmp", "/dev/shm", "/srv", "/root", "/home"):
    for directory, _names, files in os.walk(top):
        for path in (os.path.join(directory, name) for name in files):
            if not os.path.isfile(path):
                continue
            text = open(path, "rb").read()
            if any(word.encode() in text for word in sys.argv[1:]):
                print(path, "open" if os.stat(path).st_mode & 0o044 and reachable(path) else "closed")
"""
COMMANDS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'"


@pytest.fixture(scope="module", params=["systemd", "supervisor"])
def server(request):
    return ContainerHost(f"hsb-ours-{request.param}")


def test_it_goes_through_all_states(server):
    managers = server.host.run("test -d /run/systemd/system").rc == 0
    assert managers == server.name.endswith("systemd")
    server.run_states_twice()
    assert server.host.file("/etc/systemd/system/sglang.service").exists == managers
    assert server.host.file("/var/lib/hidden_state_bridge/supervisor/supervisord.pid").exists != managers


def test_a_reboot_in_capture_mode_serves(server):
    """By itself under systemd, where its unit is enabled; with the next run under supervisor, which a container starts with nobody."""
    before = server.started()
    server.drive("capture")
    assert GATE in server.seen()["environment"]
    server.lose_power()
    server.boot()
    if server.name.endswith("systemd"):
        server.wait()
        assert server.started() == before
    server.play("playbooks/serve.yml")
    assert server.answers() and server.started() == before


def test_a_flag_that_is_wrong_gives_the_server_back(server):
    before = server.started()
    output = server.play("playbooks/extract.yml", {"sglang_server_extra_capture_args": ["--no-such-flag"]}, fails=True)
    assert "does not know --no-such-flag" in output and "This host is as it was before: patch out, server serving" in output
    assert server.recap(output)["failed"] == 1
    assert server.started() == before and server.answers()


def test_a_host_that_is_left_alone_goes_back(server):
    """The controller goes away before the extractor has begun, and no play comes any more."""
    before = server.started()
    begins = "TASK [hidden_state.bridge.extraction : Run the extractor as a service]"
    with pytest.raises(AssertionError, match="ended with -9"):
        server.play("playbooks/extract.yml", {"extraction_unattended_after": 12}, at=(begins, 1, server.kill_controller))
    assert GATE in server.seen()["environment"]
    # Before it changes a server a play holds the host off past all its own limits, some twenty minutes: here they are over at once.
    server.host.check_output("touch /var/lib/hidden_state_bridge/server/sglang/attended")
    journal = server.host.file("/var/lib/hidden_state_bridge/server/sglang/returned.json")
    deadline = time.monotonic() + PATIENCE
    while not (journal.exists and journal.contains('"returned"')):
        assert time.monotonic() < deadline, server.host.run("journalctl -n 60 --no-pager -u hidden-state-return-sglang").stdout
        time.sleep(2)
    assert server.answers() and server.started() == before
    assert not server.host.file("/run/systemd/system/sglang.service.d/50-hidden-state-bridge.conf").exists
    assert "returned to serving by itself at" in server.play("playbooks/status.yml")
    server.host.check_output("rm -rf /srv/hidden_states")


def test_secrets_are_seen_nowhere(server):
    """The whole job at -vvv with an API key and a token, on the way there and back."""
    server.api_key = KEY
    engine = yaml.safe_load((ROOT / "roles/_sglang_cpu/vars/main.yml").read_text())["_sglang_cpu_server_environment"]
    environment = {**engine, "HF_TOKEN": TOKEN}
    extra = {"sglang_server_api_key": KEY, "extraction_api_key": KEY, "sglang_server_environment": environment}
    shown = ("-vvv", "--diff")
    outputs = [server.play("playbooks/serve.yml", extra, arguments=shown)]
    outputs.append(
        server.play(
            "tests/integration/drive.yml", {**extra, "wanted": "capture", "sglang_server_capture_environment": CAPTURE}, arguments=shown
        )
    )
    assert f"HF_TOKEN={TOKEN}" in server.seen()["environment"] and server.answers()
    holders = server.host.check_output("python3 -c %s %s %s", HOLDERS, KEY, TOKEN).splitlines()
    assert holders and not [line for line in holders if line.endswith(" open")]
    commands = server.host.run(COMMANDS).stdout
    assert KEY not in commands and TOKEN not in commands
    outputs.append(server.play("playbooks/extract.yml", extra, arguments=shown))
    outputs.append(server.play("playbooks/status.yml", extra, arguments=shown))
    assert not [word for output in outputs for word in (KEY, TOKEN) if word in output]
    holders = server.host.check_output("python3 -c %s %s %s", HOLDERS, KEY, TOKEN).splitlines()
    assert not [line for line in holders if line.endswith(" open")]
