# SPDX-License-Identifier: Apache-2.0
"""The same canary records on several hosts, compared on the controller, where there is no torch."""

from __future__ import annotations

import copy
import io
import json
import random
import sys

import pytest

from hidden_state_bridge.__main__ import main
from hidden_state_bridge.canary_compare import compare_hosts
from hidden_state_bridge.errors import Refusal


@pytest.fixture
def request_():
    generator = random.Random(4)
    prints = {
        str(record): {
            name: [[generator.gauss(0, 1) for _value in range(4)] for _row in range(8)] for name in ("layer_1", "final_post_norm")
        }
        for record in (3, 77)
    }
    return {"host": "b", "dtype": "bfloat16", "prints": {host: copy.deepcopy(prints) for host in "abc"}}


def scale(prints, name, factor):
    for states in prints.values():
        states[name] = [[value * factor for value in row] for row in states[name]]


def test_hosts_that_agree(request_):
    scale(request_["prints"]["b"], "layer_1", 1.01)
    result = compare_hosts(request_)
    assert result["ok"]
    assert result["table"] == [f"  b and {other}: the farthest state is layer_1, 9.9e-03 apart (bound 9e-02)  right" for other in "ac"]


def test_a_host_with_other_states_is_told_from_whom_it_differs(request_):
    scale(request_["prints"]["c"], "final_post_norm", 1.2)
    result = compare_hosts(request_)
    assert not result["ok"]
    assert "b and a" in result["table"][0] and "right" in result["table"][0]
    assert "b and c: the farthest state is final_post_norm" in result["table"][1] and "WRONG" in result["table"][1]
    assert "compare weights, SGLang release" in result["table"][-1]


def test_a_record_that_one_host_did_not_take_is_not_compared(request_):
    scale(request_["prints"]["a"], "layer_1", 1.01)
    request_["prints"]["a"].pop("77")
    for host in "ab":
        result = compare_hosts({**request_, "host": host})
        assert result["ok"] and len(result["table"]) == 2


@pytest.mark.parametrize("missing", ["records", "state"])
def test_other_records_or_states_are_refused(request_, missing):
    if missing == "records":
        request_["prints"]["a"] = {"5": request_["prints"]["a"]["77"]}
    else:
        request_["prints"]["a"]["77"].pop("layer_1")
    with pytest.raises(Refusal, match="the canaries of b and a are of other records or states; run extract.yml again"):
        compare_hosts(request_)


def test_the_command(request_, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request_)))
    assert main(["canary-compare"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ok"]
