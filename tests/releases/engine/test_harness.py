# SPDX-License-Identifier: GPL-3.0-or-later
"""What the other tests here stand on: that it refuses by name, and that a wrong state is seen."""

from __future__ import annotations

import pytest
import torch

import cases
import engines
import models
import server
import source_edits
from capture import RECORDS, differences
from hs_capture.dumpfile import layer_name
from test_states import SAMPLE

RELEASE, STRUCTURE, _TP_SIZE = SAMPLE


def test_an_unknown_release_is_refused():
    with pytest.raises(engines.EngineError, match=r"0\.3\.0 is not known here; known are .*0\.5\.20"):
        engines.install("0.3.0")


def test_without_a_demo_engine_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "DEMO", tmp_path)
    with pytest.raises(engines.EngineError, match="make engine"):
        engines.install(RELEASE)


def test_without_an_index_nothing_counts_as_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "CACHE", tmp_path)
    settings = {"CONFIG_FILE": "/dev/null", "FIND_LINKS": "", "RETRIES": "0", "INDEX_URL": "http://127.0.0.1:9/simple", "NO_CACHE_DIR": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for _time in range(2):
        with pytest.raises(engines.EngineError, match=r"does pip reach the package index\?(?s:.)*No matching distribution"):
            engines.install(RELEASE)


def test_a_second_install_does_nothing_and_a_second_run_waits(cache, monkeypatch):
    engine = engines.install(RELEASE)
    monkeypatch.setattr(engines, "_run", None)
    assert engines.install(RELEASE) == engine
    with pytest.raises(engines.EngineError, match="another run works in"), engines.locked():
        pass


def test_the_engine_stays_as_released(engine_of):
    clone = engine_of(RELEASE)
    released = engines.install(RELEASE).model_file("deepseek_v2")
    before = released.read_bytes()
    assert clone.model_file("deepseek_v2").samefile(released)
    source_edits.record_naive_sums(clone)
    assert b"naive_sum" in clone.model_file("deepseek_v2").read_bytes()
    assert released.read_bytes() == before
    assert not (engines.install(RELEASE).site / "naive_sum.py").exists()


def test_a_server_that_cannot_start_shows_its_log(engine_of, tmp_path):
    failing = server.Server(engine_of(RELEASE), tmp_path / "no-model", 1, tmp_path / "log", {})
    with pytest.raises(server.ServerError, match=r"ended with status \d+ before it was ready(?s:.)*no-model"), failing:
        pass


def test_only_a_flag_that_is_there_can_be_left_out(tmp_path):
    with pytest.raises(server.ServerError, match=r"^--no-such cannot be left out: the server has --device=cpu .*--disable-radix-cache"):
        server.Server(engines.Engine(RELEASE, tmp_path), tmp_path, 1, tmp_path / "log", {}, without=["--no-such", "--disable-radix-cache"])


def test_a_server_that_is_not_ready_in_time_is_stopped(engine_of, monkeypatch, tmp_path):
    monkeypatch.setattr(server, "START", 2)
    slow = server.Server(engine_of(RELEASE), models.checkpoint(STRUCTURE), 1, tmp_path / "log", {})
    with pytest.raises(server.ServerError, match="not ready after 2 s"), slow:
        pass
    assert slow.members() == []


def test_a_release_that_is_asked_for_has_to_be_known(monkeypatch):
    monkeypatch.setenv(cases.VARIABLE, "0.5.20,0.5.99")
    with pytest.raises(pytest.UsageError, match=r"0\.5\.99 is not known; known are 0\.5\.9, .*all"):
        cases.parameters([SAMPLE], SAMPLE)


def test_what_does_not_run_says_why(monkeypatch):
    other = ("0.5.9", *SAMPLE[1:])
    reasons = {}
    for asked in ("", "all", "0.5.9"):
        monkeypatch.setenv(cases.VARIABLE, asked)
        monkeypatch.setattr(cases, "usable_cores", lambda: [0, 1])
        reasons[asked] = [[mark.args[0] for mark in one.marks] for one in cases.parameters([SAMPLE, other], SAMPLE)]
    assert reasons == {
        "": [[], ["not in the sample; SERVERS=all runs it"]],
        "all": [[], []],
        "0.5.9": [["SERVERS=0.5.9 leaves it out"], []],
    }
    monkeypatch.setattr(cases, "usable_cores", lambda: [0])
    assert "2 ranks need as many cores" in cases.parameters([other], SAMPLE)[0].marks[0].args[0]


def test_one_wrong_value_in_one_token_is_seen(states_of):
    states = states_of(STRUCTURE)
    dumps = {rid: ({}, dict(states[rid])) for rid in RECORDS}
    assert set(differences(dumps, states).values()) == {0.0}
    name = layer_name(3)
    rid, (_metadata, tensors) = list(dumps.items())[5]
    tensors[name] = tensors[name].clone()
    tensors[name][-1, 7] += 0.01
    wrong = differences(dumps, states)
    assert wrong.pop(name) == pytest.approx(0.01 / max(state[name].abs().max().item() for state in states.values()), rel=1e-3)
    assert set(wrong.values()) == {0.0}
    tensors[name][0, 0] = torch.nan
    with pytest.raises(AssertionError, match=f"{rid}: {name} is not finite"):
        differences(dumps, states)
