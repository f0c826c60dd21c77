# SPDX-License-Identifier: GPL-3.0-or-later
"""A server that the collection did not start. The tests build on each other."""

from __future__ import annotations

import subprocess

import pytest

from conftest import DUMPS, ENGINE, RECAP

testinfra_hosts = [f"{ENGINE}://hsb-server"]

UNIT = "/etc/systemd/system/operators.service"
DROPIN = "/run/systemd/system/operators.service.d/50-hidden-state-bridge.conf"


@pytest.fixture(scope="module")
def before(server):
    """The operator's server and its files, before anything of ours."""
    server.wait()
    script = "/usr/local/bin/operators-server"
    return {"started": server.started(), UNIT: server.host.file(UNIT).sha256sum, script: server.host.file(script).sha256sum}


def untouched(server, before) -> bool:
    return all(server.host.file(path).sha256sum == digest for path, digest in before.items() if path != "started")


def test_a_foreign_unit_captures_and_comes_back(server, before):
    assert server.drive("serving") == 0
    assert server.drive("capture") > 0
    assert server.host.file(DROPIN).exists and server.host.file(DROPIN).mode == 0o600
    seen = server.seen()
    gate = f"SGLANG_HS_DUMP_DIR={DUMPS}"
    assert (
        gate in seen["environment"] and "OPERATORS_SCRIPT=yes" in seen["environment"] and "OPERATORS_UNIT=with space" in seen["environment"]
    )
    assert "--disable-prefill-cuda-graph" in seen["argv"] and server.answers() and untouched(server, before)
    assert server.drive("capture") == 0 and server.seen()["pid"] == seen["pid"]

    assert server.drive("restored") > 0
    assert server.started() == before["started"] and server.answers() and untouched(server, before)
    assert not server.host.file(DROPIN).exists
    pid = server.seen()["pid"]
    assert server.drive("restored") == 0 and server.seen()["pid"] == pid


def test_a_stop_is_not_undone_by_the_units_restart_policy(server, before):
    assert server.drive("stopped") > 0
    assert server.seen() is None and server.drive("stopped") == 0
    assert server.host.run("sleep 4; systemctl is-active operators").stdout.strip() != "active" and server.seen() is None
    assert server.drive("restored") > 0
    assert server.started() == before["started"]


def test_a_reboot_in_capture_mode_serves(server, before):
    server.drive("capture")
    subprocess.run([ENGINE, "restart", "--time", "20", "hsb-server"], check=True)
    server.wait()
    assert server.started() == before["started"] and not server.host.file(DROPIN).exists


def test_a_capture_that_fails_gives_the_unit_back(server, before):
    """The whole job, with a flag that no release knows; the host is named, and the others would go on."""
    output = server.play("playbooks/extract.yml", {"sglang_server_extra_capture_args": ["--no-such-flag"]}, fails=True)
    assert "does not know --no-such-flag" in output and "This host is as it was before: patch out, server serving" in output
    assert RECAP.search(output)[4] == "1"
    server.wait()
    assert server.started() == before["started"] and untouched(server, before)


def test_the_whole_job_on_a_foreign_unit(server, before):
    output = server.play("playbooks/extract.yml")
    assert RECAP.search(output)[4] == "0"
    assert server.host.run("find /srv/hidden_states -name 'data_*.ckpt' | wc -l").stdout.strip() == "16"
    assert server.started() == before["started"] and server.answers() and untouched(server, before)
    pid = server.seen()["pid"]
    server.play("playbooks/extract.yml")
    assert server.seen()["pid"] == pid


def test_a_server_that_was_started_by_hand(server):
    server.host.check_output("systemctl disable --now operators")
    command = "cd /srv && umask 027 && ulimit -n 2048 && exec /usr/local/bin/operators-server >/tmp/by-hand.log 2>&1"
    subprocess.run([ENGINE, "exec", "--detach", "--env", "BY_HAND=yes", "hsb-server", "sh", "-c", command], check=True)
    server.wait()
    by_hand = server.started()
    assert server.drive("capture") > 0
    assert f"SGLANG_HS_DUMP_DIR={DUMPS}" in server.seen()["environment"] and "BY_HAND=yes" in server.seen()["environment"]
    pid = server.seen()["pid"]
    assert server.drive("capture") == 0 and server.seen()["pid"] == pid
    assert server.drive("restored") > 0
    assert server.started() == by_hand and server.answers()
    assert server.drive("stopped") > 0 and server.seen() is None
    assert server.drive("restored") > 0
    assert server.started() == by_hand
