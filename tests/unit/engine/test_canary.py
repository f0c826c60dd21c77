# SPDX-License-Identifier: Apache-2.0
"""The canary against the stand-in server: right states pass, batch-dependent ones do not."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from fake_server import FakeServer

from hidden_state_bridge.canary import choose, distances, run_canary
from hidden_state_bridge.config import read_config
from hidden_state_bridge.errors import Refusal


def test_right_states_pass(site):
    with FakeServer(site.dumps, delay=0.02) as server:
        result = run_canary(read_config({**site.config, "url": server.url}))
        assert server.most_in_flight > 1
    assert result["ok"] and [row["state"] for row in result["states"]] == ["layer_1", "layer_3", "layer_4", "final_post_norm"]
    assert "alone against together" in result["table"][0] and "right" in result["table"][1]
    assert os.listdir(site.dumps) == []


def test_states_that_depend_on_the_batch_are_found(site, monkeypatch):
    real = FakeServer._write

    def shifted(self, rid, input_ids, first, last, fault):
        import fake_server

        if "-t" in rid:
            state = fake_server.expected_state
            monkeypatch.setattr(fake_server, "expected_state", lambda ids, layer, dtype: state(ids, layer, dtype).roll(1, 0) * 1.01)
            real(self, rid, input_ids, first, last, fault)
            monkeypatch.setattr(fake_server, "expected_state", state)
        else:
            real(self, rid, input_ids, first, last, fault)

    monkeypatch.setattr(FakeServer, "_write", shifted)
    with FakeServer(site.dumps) as server:
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert not result["ok"] and "WRONG" in result["table"][1] and "capture flag" in result["table"][-1]


@pytest.mark.parametrize(
    ("fault", "text"), [("marker", "prefix cache hit"), ("none", "no whole dump"), ("400", "HTTP 400"), ("503", "503")]
)
def test_a_failing_canary_says_why_and_leaves_nothing(site, fault, text):
    with FakeServer(site.dumps, lambda *_: fault) as server, pytest.raises(Refusal) as caught:
        run_canary(read_config({**site.config, "url": server.url}))
    assert text in str(caught.value) and str(caught.value).startswith("the canary failed on http://")
    assert os.listdir(site.dumps) == []


@pytest.mark.parametrize("fault", ["ok", "pieces"])
def test_ranks_that_hold_the_same_states_pass(site, fault):
    with FakeServer(site.dumps, lambda *_: fault) as server:
        server.ranks = 4
        result = run_canary(read_config({**site.config, "url": server.url}))
    assert result["ok"] and "4 ranks: the farthest state is 0.0e+00 apart" in result["table"][-1]
    assert os.listdir(site.dumps) == []


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
