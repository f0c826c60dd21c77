# SPDX-License-Identifier: GPL-3.0-or-later
"""A server in a unit of the operator's. The tests build on each other."""

from __future__ import annotations

from container_host import GATE

from conftest import DROPIN


def test_a_foreign_unit_goes_through_all_states(server):
    def check(wanted: str) -> None:
        assert server.host.file(DROPIN).exists == (wanted == "capture")
        if wanted == "capture":
            seen = server.seen()
            assert server.host.file(DROPIN).mode == 0o600 and "--disable-prefill-cuda-graph" in seen["argv"]
            assert {GATE, "OPERATORS_SCRIPT=yes", "OPERATORS_UNIT=with space"} <= set(seen["environment"])
        elif wanted != "stopped":
            server.is_as_before()

    server.run_states_twice(check)


def test_a_stop_is_not_undone_by_the_units_restart_policy(server):
    server.drive("stopped")
    # Its RestartSec is 2.
    assert server.host.run("sleep 6; systemctl is-active operators").stdout.strip() != "active" and server.seen() is None
    server.drive("restored")
    server.is_as_before()


def test_a_unit_that_stops_along_with_it_is_started_again(server):
    text = "[Unit]\\nPartOf=operators.service\\n[Service]\\nExecStart=/usr/bin/sleep infinity\\n"
    server.host.check_output(f"printf '{text}' >/run/systemd/system/beside.service; systemctl daemon-reload; systemctl start beside")
    server.drive("capture")
    assert server.host.run("systemctl is-active beside").stdout.strip() == "inactive"
    server.drive("restored")
    server.is_as_before()
    server.host.check_output("systemctl is-active beside")
    server.host.check_output("systemctl stop beside; rm /run/systemd/system/beside.service; systemctl daemon-reload")


def test_the_whole_job_on_a_foreign_unit(server):
    output = server.play("playbooks/extract.yml")
    assert server.recap(output)["failed"] == 0
    assert server.host.run("find /srv/hidden_states -name 'data_*.ckpt' | wc -l").stdout.strip() == "16"
    server.is_as_before()
    pid = server.seen()["pid"]
    server.play("playbooks/extract.yml")
    assert server.seen()["pid"] == pid
    # The drills that follow have the job before them again.
    server.play("playbooks/unpatch.yml")
    server.host.check_output("rm -rf /srv/hidden_states")
