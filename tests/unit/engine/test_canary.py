# SPDX-License-Identifier: Apache-2.0
"""The canary against the stand-in server: right states pass, batch-dependent ones do not."""

from __future__ import annotations

import os
import subprocess

import fake_server
import numpy as np
import pytest
import torch
from fake_server import FakeServer

import hs_manifest
from hidden_state_bridge import canary_compare, dumps
from hidden_state_bridge.canary import choose, run_canary
from hidden_state_bridge.canary_compare import compare_hosts, distances
from hidden_state_bridge.config import read_config
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.packed import PackedDataset


def test_right_states_pass(site):
    with FakeServer(site.dumps, delay=0.02) as server:
        result = run_canary(read_config({**site.config, "url": server.url}))
        assert server.most_in_flight > 1
    assert result["ok"] and [row["state"] for row in result["states"]] == ["layer_1", "layer_3", "layer_4", "final_post_norm"]
    assert "alone against together" in result["table"][0] and "right" in result["table"][1]
    assert os.listdir(site.dumps) == []


def moved(state, _ids, _layer):
    return state.roll(1, 0)


def mixed(state, _ids, _layer):
    return state * 1.01


def partial(state, _ids, layer):
    return state if layer == fake_server.FINAL else state * 1.02


def fused(state, ids, _layer):
    return state * 1.02 if len(ids) <= LIMIT else state


LIMIT = 30


@pytest.mark.parametrize(
    ("fault", "letter", "text"),
    [
        (moved, "t", "the rows are moved by one"),
        (moved, "r", "the rows are moved by one"),
        (mixed, "t", "see which capture flag of this release is missing"),
        (mixed, "r", "see which capture flag of this release is missing"),
        (partial, "t", "layers deviate and the final state does not: the layer loop holds a partial sum"),
        (fused, "t", f"only records of at most {LIMIT} tokens deviate, as all-reduce fusion leaves them"),
    ],
)
def test_states_that_depend_on_the_batch_are_found_and_named(site, monkeypatch, fault, letter, text):
    monkeypatch.setattr(canary_compare, "FUSION_TOKENS", LIMIT)
    right, write = fake_server.expected_state, FakeServer._write

    def wrong(self, rid, *arguments):
        with monkeypatch.context() as patch:
            if f"-{letter}" in rid:
                patch.setattr(fake_server, "expected_state", lambda ids, layer, dtype: fault(right(ids, layer, dtype), ids, layer))
            write(self, rid, *arguments)

    monkeypatch.setattr(FakeServer, "_write", wrong)
    with FakeServer(site.dumps) as server:
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert not result["ok"] and "WRONG" in result["table"][1] and text in result["table"][-1]


def test_a_state_that_is_not_finite_is_far_away():
    one = torch.ones(3, 4)
    other = one.clone()
    other[1, 2] = torch.nan
    assert distances(one, other).tolist() == [0, np.inf, 0]


def test_the_same_canary_on_two_hosts_gives_the_same_prints(site):
    with FakeServer(site.dumps) as server:
        first, second = (run_canary(read_config({**site.config, "url": server.url})) for _time in range(2))
    assert first["prints"] == second["prints"] and len(first["prints"]) == first["records"]
    assert all(len(rows) <= 8 and len(rows[0]) == 4 for states in first["prints"].values() for rows in states.values())
    request = {"host": "a", "dtype": "float32", "prints": {"a": first["prints"], "b": second["prints"]}}
    assert compare_hosts(request)["ok"]


@pytest.mark.parametrize(
    ("fault", "text"), [("marker", "prefix cache hit"), ("none", "no whole dump"), ("400", "HTTP 400"), ("503", "503")]
)
def test_a_failing_canary_says_why_and_leaves_nothing(site, fault, text):
    with FakeServer(site.dumps, lambda *_: fault) as server, pytest.raises(Refusal) as caught:
        run_canary(read_config({**site.config, "url": server.url}))
    assert text in str(caught.value) and str(caught.value).startswith("the canary failed on http://")
    assert os.listdir(site.dumps) == []


def test_a_record_that_the_server_refuses_is_left_out_and_named(site):
    config = read_config({**site.config, "url": "http://127.0.0.1:1"})
    longest = max(choose(PackedDataset(config.dataset).lengths), key=lambda record: PackedDataset(config.dataset).lengths[record])
    with FakeServer(site.dumps, lambda rid, *_: "400" if rid.endswith(f"-a{longest}") else "ok") as server:
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert result["ok"] and result["table"][1].startswith(f"  record {longest} is left out: HTTP 400")
    assert result["records"] == len(choose(PackedDataset(config.dataset).lengths)) - 1
    assert os.listdir(site.dumps) == []


@pytest.mark.parametrize("fault", ["ok", "pieces"])
def test_ranks_that_hold_the_same_states_pass(site, fault):
    with FakeServer(site.dumps, lambda *_: fault) as server:
        server.ranks = 4
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert result["ok"] and "4 ranks: the farthest state is 0.0e+00 apart" in result["table"][-1]
    assert os.listdir(site.dumps) == []


def test_an_extractor_at_work_leaves_the_dumps_of_a_canary_alone(site, monkeypatch):
    write, config, removed = FakeServer.dump, read_config(site.config), []

    def swept(server, rid, *arguments):
        write(server, rid, *arguments)
        removed.append(dumps.remove(config.dump_dir, config.rid_stem))

    monkeypatch.setattr(FakeServer, "dump", swept)
    with FakeServer(site.dumps) as server:
        server.ranks = 2
        assert run_canary(read_config({**site.config, "url": server.url}))["ok"]
    assert set(removed) == {0}


def test_what_a_killed_canary_left_goes_with_the_next(site):
    os.mkdir(os.path.join(site.dumps, "expect"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name, process in (("canary-0123456789ab", ended.pid), ("fp-canary-0123456789ab", ended.pid), ("canary-0123456789ab", os.getpid())):
        (site.dumps / f"hsb-{name}-{process}-1-a0.0.safetensors").touch()
    (site.dumps / "expect" / "0").write_text(f"hsb-canary-0123456789ab-{ended.pid}-1-t0")
    with FakeServer(site.dumps) as server:
        run_canary(read_config({**site.config, "url": server.url}))
    assert sorted(os.listdir(site.dumps)) == ["expect", f"hsb-canary-0123456789ab-{os.getpid()}-1-a0.0.safetensors"]
    assert os.listdir(site.dumps / "expect") == []


@pytest.mark.parametrize("at_work", [False, True])
def test_dumps_of_an_extractor_that_was_killed_go_unless_one_is_at_work(site, at_work):
    left = "hsb-000000000000-1-0.0.safetensors"
    (site.dumps / left).touch()
    site.output.mkdir(parents=True)
    lock = hs_manifest.Lock(str(site.output))
    if not at_work:
        lock.close()
    with FakeServer(site.dumps) as server:
        run_canary(read_config({**site.config, "url": server.url}))
    assert os.listdir(site.dumps) == [left] * at_work
    if at_work:
        lock.close()


def test_ranks_of_other_hosts_are_not_waited_for(site):
    with FakeServer(site.dumps) as server:
        server.ranks, server.nodes = 2, 2
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert result["ok"] and "2 ranks" in result["table"][-1]


def test_partial_sums_on_the_ranks_are_found(site):
    with FakeServer(site.dumps) as server:
        server.ranks, server.partial = 2, True
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert not result["ok"]
    assert "layer_1 2.0e-02" in result["table"][-2] and "WRONG" in result["table"][-2]
    assert "all-reduce fusion" in result["table"][-1] and "--enforce-disable-flashinfer-allreduce-fusion" in result["table"][-1]


def test_a_rank_that_says_nothing_fails_the_canary(site):
    with FakeServer(site.dumps, lambda *_: "silent") as server, pytest.raises(Refusal, match="rank 1 of 2 wrote no hsb-fp-"):
        server.ranks = 2
        run_canary(read_config({**site.config, "url": server.url}))
    assert os.listdir(site.dumps) == []


def test_without_rids_in_batches_ranks_are_not_asked(site):
    os.mkdir(os.path.join(site.dumps, "expect"))
    with FakeServer(site.dumps) as server:
        server.ranks, server.partial = 2, True
        assert run_canary(read_config({**site.config, "url": server.url}))["ok"]


def test_records_on_either_side_of_the_fusion_limit_are_chosen():
    lengths = np.array([100, 2047, 3000, 2048, 2049, 5, 8192, 900])
    chosen = [int(lengths[record]) for record in choose(lengths)]
    assert {5, 2048, 2049, 8192} <= set(chosen) and len(chosen) == len(set(chosen)) <= 6
    assert choose(np.array([7])) == [0]


def test_distance_is_relative_to_each_row():
    one = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    assert distances(one, one + torch.tensor([[0.0, 0.5], [0.0, 0.05]])) == pytest.approx([0.1, 0.1])
