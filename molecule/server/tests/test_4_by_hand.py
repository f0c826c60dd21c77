# SPDX-License-Identifier: GPL-3.0-or-later
"""A server that root started by hand, from a checkout that is installed in editable mode. The tests build on each other."""

from __future__ import annotations

import pytest
from container_host import GATE

# What `pip install --editable` leaves: the package in the checkout, its path in the environment.
CHECKOUT = """
set -e
test ! -e /usr/local/src/sglang/python/sglang || exit 0
site=$(/opt/sglang_cpu/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p /usr/local/src/sglang/python
mv $site/sglang /usr/local/src/sglang/python/
echo /usr/local/src/sglang/python > $site/__editable__.sglang.pth
"""
# The operator's: it starts the server again whenever that ends.
WRAPPER = (
    "echo $$ >/run/wrapper.pid; cd /usr/local/src/sglang; "
    "while :; do setsid --wait /usr/local/bin/operators-server >>/tmp/wrapper.log 2>&1; sleep 1; done"
)


@pytest.fixture(scope="module")
def by_hand(server):
    """The host with a hand-started server in the place of the unit; ``before`` is what was started."""
    server.host.check_output("systemctl disable --now operators")
    server.host.check_output("sh -c %s", CHECKOUT)
    command = (
        "cd /usr/local/src/sglang && umask 027 && ulimit -n 2048 && nohup setsid /usr/local/bin/operators-server >/tmp/by-hand.log 2>&1 &"
    )
    server.spawn("sh", "-c", command, env={"BY_HAND": "yes"})
    server.wait()
    server.by_hand = server.started()
    yield server
    server.drive("stopped")
    server.host.check_output(
        "rm -rf /var/lib/hidden_state_bridge/server /var/lib/hidden_state_bridge/services/sglang; systemctl enable --now operators"
    )
    server.wait()


def test_it_goes_through_all_states(by_hand):
    def check(wanted: str) -> None:
        if wanted not in ("stopped", "capture"):
            assert by_hand.started() == by_hand.by_hand
        if wanted == "capture":
            assert "BY_HAND=yes" in by_hand.seen()["environment"] and by_hand.seen()["cwd"] == "/usr/local/src/sglang"

    assert by_hand.drive("serving") == 0
    by_hand.run_states_twice(check)
    held = by_hand.host.check_output("find /var/lib/hidden_state_bridge/server /var/lib/hidden_state_bridge/services -type f -perm /077")
    assert held == ""


def test_the_whole_job_on_the_checkout(by_hand):
    output = by_hand.play("playbooks/extract.yml")
    assert by_hand.recap(output)["failed"] == 0
    assert by_hand.host.file("/usr/local/src/sglang/python/sglang/srt/models/deepseek_v2.py").contains("hidden_state.bridge begin")
    assert by_hand.started() == by_hand.by_hand and by_hand.answers()
    by_hand.play("playbooks/unpatch.yml")
    by_hand.host.check_output("rm -rf /srv/hidden_states")


def test_a_capture_that_fails_gives_it_back(by_hand):
    output = by_hand.play("playbooks/extract.yml", {"sglang_server_extra_capture_args": ["--no-such-flag"]}, fails=True)
    assert "This host is as it was before: patch out, server serving" in output and by_hand.recap(output)["failed"] == 1
    assert by_hand.started() == by_hand.by_hand and by_hand.answers()


@pytest.mark.parametrize(
    "mark, number",
    [("Patch the model source", 1), ("TASK [hidden_state.bridge.extraction : Look whether the extractor is at work]", 1)],
    ids=["patched", "extracting"],
)
def test_the_power_goes(by_hand, mark, number):
    """Nothing starts such a server with the host, but the next run knows how it was started."""
    output = by_hand.play("playbooks/extract.yml", fails=True, at=(mark, number, lambda _play: by_hand.lose_power()))
    counts = by_hand.recap(output)
    assert counts["unreachable"] + counts["failed"] == 1
    by_hand.boot()
    output = by_hand.play("playbooks/serve.yml")
    assert by_hand.recap(output)["failed"] == 0
    assert by_hand.started() == by_hand.by_hand and by_hand.answers()


def test_a_wrapper_that_revives_it_is_named_and_left_to_serve(by_hand):
    by_hand.drive("stopped")
    by_hand.host.check_output("rm -rf /var/lib/hidden_state_bridge/server /var/lib/hidden_state_bridge/services/sglang")
    by_hand.spawn("bash", "-c", WRAPPER)
    by_hand.wait()
    before, pid = by_hand.started(), by_hand.seen()["pid"]
    output = by_hand.play("playbooks/extract.yml", fails=True)
    assert "started the server again" in output and "while :; do setsid --wait" in output
    assert by_hand.recap(output)["failed"] == 1
    by_hand.wait()
    assert by_hand.started() == before and by_hand.seen()["pid"] != pid and GATE not in by_hand.seen()["environment"]
    # Without the wrapper it is a server like any other.
    by_hand.host.check_output("kill $(cat /run/wrapper.pid)")
    by_hand.run_states_twice()
    assert by_hand.started() == before
