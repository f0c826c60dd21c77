# SPDX-License-Identifier: Apache-2.0
"""Who does what: every record that is left, once, in proportion to the weights."""

from __future__ import annotations

import io
import json
import random
import sys
import time

import pytest

import hs_manifest
from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.pack import pack
from hidden_state_bridge.plan import make_plan

RECORDS = 400


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plan")
    generator = random.Random(2)
    source = directory / "a.jsonl"
    with source.open("w") as stream:
        for _ in range(RECORDS):
            ids = [1] * generator.randint(1, 200)
            stream.write(json.dumps({"input_ids": ids, "loss_mask": ids}) + "\n")
    return pack({"sources": [{"name": "a", "path": str(source)}]}, str(directory / "out"))["path"]


def expand(ranges):
    return [number for first, last in hs_manifest.decode_ranges(ranges) for number in range(first, last + 1)]


def test_shares_are_disjoint_complete_and_weighted(dataset):
    hosts = {"a": {"done": "0-9,50", "weight": 1.0}, "b": {"weight": 2.0, "done": ""}, "c": {"weight": 0, "done": "5-20"}}
    plan = make_plan({"dataset": dataset, "hosts": hosts})
    shares = {host: expand(ranges) for host, ranges in plan["shares"].items()}
    done = {*range(21), 50}
    assert sorted(shares["a"] + shares["b"]) == sorted(set(range(RECORDS)) - done)
    assert shares["c"] == [] and plan["tokens"]["c"] == 0
    assert plan["done_records"] == len(done) and plan["left_records"] == RECORDS - len(done)
    assert plan["done_tokens"] + plan["left_tokens"] == plan["total_tokens"]
    assert plan["tokens"]["a"] + plan["tokens"]["b"] == plan["left_tokens"]
    assert abs(plan["tokens"]["b"] / plan["left_tokens"] - 2 / 3) < 0.01
    assert plan == make_plan({"dataset": dataset, "hosts": dict(reversed(hosts.items()))})


def test_nothing_is_left_when_all_is_done(dataset):
    plan = make_plan({"dataset": dataset, "hosts": {"a": {"done": f"0-{RECORDS - 1}", "weight": 0}}})
    assert plan["left_records"] == plan["left_tokens"] == 0 and plan["shares"] == {"a": ""}


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        ({"a": {"weight": 0}}, "400 records are left and no host can take them"),
        ({"a": {"weight": -1}}, "host a has weight -1"),
        ({"a": {"weight": "2"}}, "host a has weight '2'"),
        ({"a": {"done": "0-400"}}, "host a has record 400, and the data set ends at 399"),
        ({"a": {"done": "7,3"}}, "host a: the ranges of records do not ascend"),
        ({"a": {"done": "x"}}, "host a: 'x' is not a range of records"),
    ],
)
def test_a_bad_request_is_refused(dataset, hosts, text):
    with pytest.raises(Refusal) as caught:
        make_plan({"dataset": dataset, "hosts": hosts})
    assert text in str(caught.value)


def test_the_command(dataset, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"dataset": dataset, "hosts": {"a": {}}})))
    assert main(["plan"]) == 0
    assert json.loads(capsys.readouterr().out)["shares"] == {"a": f"0-{RECORDS - 1}"}
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}"))
    assert main(["plan"]) == 1
    assert "a plan needs" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("no"))
    assert main(["plan"]) == 2
    assert "standard input" in capsys.readouterr().err


def test_a_hundred_hosts_take_seconds(dataset):
    hosts = {f"h{number:03}": {"done": f"{number}", "weight": 1 + number % 3} for number in range(100)}
    began = time.monotonic()
    plan = make_plan({"dataset": dataset, "hosts": hosts})
    assert plan["left_records"] == 300 and time.monotonic() - began < 2
