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
from hidden_state_bridge.plan import claim, make_plan
from hidden_state_bridge.shares import Ledger

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


def test_a_measured_rate_moves_the_weight_within_bounds(dataset):
    def parts(**rates):
        hosts = {host: {"tokens": rate * 100, "seconds": seconds} for host, (rate, seconds) in rates.items()}
        plan = make_plan({"dataset": dataset, "hosts": hosts})
        return {host: tokens / plan["left_tokens"] for host, tokens in plan["tokens"].items()}

    assert parts(a=(30, 100), b=(10, 100)) == {"a": pytest.approx(0.75, abs=0.01), "b": pytest.approx(0.25, abs=0.01)}
    # Unknown is the mean of what is known; a short start says nothing; nobody falls below a quarter of the mean.
    assert parts(a=(30, 100), b=(10, 100), c=(0, 0))["c"] == pytest.approx(1 / 3, abs=0.01)
    assert parts(a=(30, 100), b=(10, 29)) == {"a": pytest.approx(0.5, abs=0.01), "b": pytest.approx(0.5, abs=0.01)}
    assert parts(a=(1000, 100), b=(1, 100))["b"] == pytest.approx(0.25 / (0.25 + 2), abs=0.01)


def test_a_pilot_takes_records_of_all_lengths_and_is_the_same_the_next_time(dataset):
    plan = make_plan({"dataset": dataset, "hosts": {"a": {}, "b": {}}, "records": 20})
    pilot = sorted(expand(plan["shares"]["a"]) + expand(plan["shares"]["b"]))
    assert len(pilot) == plan["total_records"] == plan["left_records"] == 20
    assert expand(plan["wanted"]) == sorted(pilot)
    lengths = make_plan({"dataset": dataset, "hosts": {"a": {}}})["total_tokens"] / RECORDS
    assert plan["total_tokens"] / 20 == pytest.approx(lengths, rel=0.15)
    done = hs_manifest.encode_ranges(pilot[:8])
    again = make_plan({"dataset": dataset, "hosts": {"c": {"done": done}}, "records": 20})
    assert expand(again["shares"]["c"]) == pilot[8:] and again["done_records"] == 8


def test_extractors_at_work_keep_their_shares_until_another_host_could_help(dataset):
    # As it was written, with what is done since.
    at_work = {"a": {"share": "0-199", "done": "0-20"}, "b": {"share": "200-299, 300-399"}}
    plan = make_plan({"dataset": dataset, "hosts": at_work})
    assert plan["shares"] == {"a": "0-199", "b": "200-299, 300-399"} and plan["stop"] == []
    assert plan["tokens"]["a"] + plan["tokens"]["b"] == plan["left_tokens"]
    assert make_plan({"dataset": dataset, "hosts": {**at_work, "c": {"weight": 0}}})["stop"] == []
    plan = make_plan({"dataset": dataset, "hosts": {**at_work, "c": {}}})
    assert plan["stop"] == ["a", "b"] and plan["tokens"]["c"] > 0
    assert sorted(sum(map(expand, plan["shares"].values()), [])) == list(range(21, RECORDS))
    # What belongs to nobody is a reason as well.
    assert make_plan({"dataset": dataset, "hosts": {"a": {"share": "0-398"}}})["stop"] == ["a"]
    # At the end of all work nobody is disturbed.
    ended = {"a": {"share": "0-399", "done": "0-399"}, "b": {}}
    assert make_plan({"dataset": dataset, "hosts": ended})["stop"] == []


def request(dataset, path, hosts, **more):
    return {"dataset": dataset, "ledger": str(path / "reports" / "shares.json"), "run": "r1", "hosts": hosts, **more}


def test_the_share_of_a_host_that_is_not_asked_stays_its_own(dataset, tmp_path):
    first = make_plan(request(dataset, tmp_path, {"a": {}, "b": {}}, commit=True))
    there = {"a": {"done": hs_manifest.encode_ranges(expand(first["shares"]["a"])[:9])}}
    for commit in (True, False):
        plan = make_plan(request(dataset, tmp_path, there, commit=commit))
        assert plan["held"] == {"b": {"records": len(expand(first["shares"]["b"])), "tokens": first["tokens"]["b"]}}
        assert expand(plan["shares"]["a"]) == expand(first["shares"]["a"])[9:]
        assert plan["left_records"] == RECORDS - 9
    handed_on = make_plan(request(dataset, tmp_path, there, reassign=True, commit=True))
    assert handed_on["held"] == {} and len(expand(handed_on["shares"]["a"])) == RECORDS - 9
    assert make_plan(request(dataset, tmp_path, there))["held"] == {}


def test_what_a_host_did_under_earlier_plans_stays_its_own(dataset, tmp_path):
    first = make_plan(request(dataset, tmp_path, {"a": {}, "b": {}}, commit=True))
    done = {host: hs_manifest.encode_ranges(expand(ranges)[:50]) for host, ranges in first["shares"].items()}
    second = make_plan(request(dataset, tmp_path, {host: {"done": ranges} for host, ranges in done.items()}, commit=True))
    of_b = {*expand(done["b"]), *expand(second["shares"]["b"])}
    for _time in range(2):
        third = make_plan(request(dataset, tmp_path, {"a": {"done": done["a"]}}, commit=True))
        assert third["held"]["b"]["records"] == len(of_b)
        assert {*expand(third["shares"]["a"]), *expand(done["a"])} == set(range(RECORDS)) - of_b


def test_a_pilot_without_a_host_leaves_its_share_its_own(dataset, tmp_path):
    """Also where no record of the share is among those of the pilot."""
    first = make_plan(request(dataset, tmp_path, {"a": {}, "b": {"weight": 0}}, commit=True, records=20))
    pilot = expand(first["shares"]["a"])
    full = make_plan(request(dataset, tmp_path, {"a": {"done": first["shares"]["a"]}, "b": {}}, commit=True))
    make_plan(request(dataset, tmp_path, {"a": {"done": first["shares"]["a"]}}, commit=True, records=20))
    again = make_plan(request(dataset, tmp_path, {"a": {"done": first["shares"]["a"]}}))
    assert not set(pilot) & set(expand(full["shares"]["b"]))
    assert again["held"]["b"]["records"] == len(expand(full["shares"]["b"]))
    assert not set(expand(again["shares"]["a"])) & set(expand(full["shares"]["b"]))


def test_a_look_ahead_leaves_the_ledger_alone(dataset, tmp_path):
    make_plan(request(dataset, tmp_path, {"a": {}, "b": {}}))
    assert make_plan(request(dataset, tmp_path, {"a": {}}))["held"] == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "cannot be read"),
        ("{}x", "cannot be read"),
        ('{"format": "other"}', "holds no shares of an extraction"),
        ('{"format": "hidden_state_bridge.shares/1", "run": "r2", "shares": {}}', "is of run r2, not r1"),
        ('{"format": "hidden_state_bridge.shares/1", "run": "r1", "shares": {"a": 1}}', "holds no shares"),
    ],
)
def test_a_ledger_that_is_not_ours_is_refused(dataset, tmp_path, content, text):
    path = tmp_path / "reports" / "shares.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(Refusal, match=f"{text}.*see that no host of the run is at work, then remove the file"):
        make_plan(request(dataset, tmp_path, {"a": {}}))
    assert path.read_text() == content


def test_a_ledger_that_cannot_be_made_names_the_variable(dataset, tmp_path):
    (tmp_path / "reports").write_text("a file")
    with pytest.raises(Refusal, match="set extraction_report_dir to a directory"):
        make_plan(request(dataset, tmp_path, {"a": {}}))


def test_what_failed_hosts_leave_goes_to_those_at_work_once(dataset, tmp_path):
    plan = make_plan(request(dataset, tmp_path, {host: {} for host in "abcd"}, commit=True))
    given = {host: expand(ranges) for host, ranges in plan["shares"].items()}
    done, refused = given["a"][:30], given["a"][30:33]
    failed = {"a": {"done": hs_manifest.encode_ranges(done), "refused": [hs_manifest.encode_ranges(refused[:2]), str(refused[2]), ""]}}

    def take(host, weights):
        asked = {**request(dataset, tmp_path, {}), "host": host, "weights": weights, "failed": failed}
        return claim(asked)

    first = take("b", {"b": 1.0, "c": 2.0, "d": 1.0})
    second = take("c", {"c": 2.0, "d": 2.0})
    last = take("d", {"d": 1.0})
    parts = [expand(part["share"]) for part in (first, second, last)]
    assert sorted(sum(parts, [])) == given["a"][33:]
    tokens = [part["tokens"] for part in (first, second, last)]
    assert tokens[0] / sum(tokens) == pytest.approx(0.25, abs=0.05)
    assert tokens[1] / tokens[2] == pytest.approx(1, abs=0.1)
    assert take("d", {"d": 1.0})["share"] == "" and take("b", {"b": 1.0})["records"] == 0
    # A host that took something over and fails leaves all that it was given, but for what it has done.
    failed["d"] = {"done": hs_manifest.encode_ranges(given["d"] + parts[2][:5]), "refused": []}
    assert expand(take("c", {"c": 1.0})["share"]) == parts[2][5:]
    with Ledger(str(tmp_path / "reports" / "shares.json"), "r1") as ledger:
        assert set(expand(ledger.shares["c"])) == {*given["c"], *parts[1], *parts[2][5:]}


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
    began = time.process_time()
    plan = make_plan({"dataset": dataset, "hosts": hosts})
    assert plan["left_records"] == 300 and time.process_time() - began < 2
