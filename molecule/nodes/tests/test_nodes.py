# SPDX-License-Identifier: GPL-3.0-or-later
"""A server over two hosts: started, switched and stopped together; rank 0's host captures. The tests build on each other."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.append(os.path.join(os.environ["MOLECULE_PROJECT_DIRECTORY"], "tests"))

from container_host import DUMPS, ContainerHost

HEAD, SECOND = ContainerHost("hsb-nodes-head"), ContainerHost("hsb-nodes-second")
DUMPED = """
import json, urllib.request
body = json.dumps({"input_ids": list(range(1, 9)), "rid": "hsb-nodes", "sampling_params": {"max_new_tokens": 0}}).encode()
urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:30000/generate", body, {"Content-Type": "application/json"}), timeout=120)
"""


def pids() -> list[int]:
    return [(host.seen() or {"pid": 0})["pid"] for host in (HEAD, SECOND)]


def arguments(host: ContainerHost) -> list[str]:
    return host.seen()["argv"]


def test_they_are_started_together():
    assert HEAD.drive("serving") > 0
    for rank, host in enumerate((HEAD, SECOND)):
        words = arguments(host)
        assert words[words.index("--nnodes") + 1] == "2" and words[words.index("--node-rank") + 1] == str(rank)
        assert words[words.index("--dist-init-addr") + 1] == "hsb-nodes-head:20000"
    assert HEAD.answers()
    first = pids()
    assert HEAD.drive("serving") == 0 and pids() == first


def test_they_capture_together_and_rank_0_dumps():
    first = pids()
    HEAD.play("playbooks/patch.yml")
    assert HEAD.drive("capture") > 0
    assert not set(pids()) & set(first)
    assert all("--disable-radix-cache" in arguments(host) for host in (HEAD, SECOND))
    HEAD.host.check_output("python3 -c %s", DUMPED)
    assert [name for name in HEAD.host.file(DUMPS).listdir() if name.startswith("hsb-nodes.")]
    assert not SECOND.host.run("find %s -name 'hsb-nodes*'", DUMPS).stdout
    HEAD.host.check_output("rm %s/hsb-nodes*" % DUMPS)
    first = pids()
    assert HEAD.drive("capture") == 0 and pids() == first


@pytest.mark.parametrize("dead", [0, 1])
def test_where_one_has_died_both_start_anew(dead):
    first = pids()
    (HEAD, SECOND)[dead].host.check_output("systemctl kill --signal KILL sglang; systemctl stop sglang")
    assert HEAD.drive("capture") > 0
    assert not set(pids()) & set(first) and 0 not in pids() and HEAD.answers()


def test_they_stop_together_and_come_back():
    assert HEAD.drive("stopped") > 0
    assert pids() == [0, 0] and HEAD.drive("stopped") == 0
    assert HEAD.drive("restored") > 0
    assert HEAD.answers() and "--disable-radix-cache" not in arguments(HEAD) + arguments(SECOND)


def test_a_flag_that_is_wrong_gives_both_back():
    before = [host.started() for host in (HEAD, SECOND)]
    extra = {"sglang_server_extra_capture_args": ["--no-such-flag"]}
    output = HEAD.play("playbooks/extract.yml", extra, fails=True)
    assert "This host is as it was before: patch out, server serving" in output and HEAD.recap(output)["failed"] == 1
    assert [host.started() for host in (HEAD, SECOND)] == before and HEAD.answers()
