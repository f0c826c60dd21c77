# SPDX-License-Identifier: Apache-2.0
"""What SGLang does by a collective, every tensor parallel rank asks for alike: otherwise the server hangs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_hs_capture_batches import HIDDEN, LAYERS, batch
from test_hs_capture_shapes import Model, Norm

from hs_capture import capture, dumpfile, engine
from hs_capture.capture import Requests
from hs_capture.fingerprints import FingerprintWriter
from hs_capture.follower import Follower
from hs_capture.guards import NotCapturable


class Collective:
    """Counts the snapshots of each rank: they have to be the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[float] = []
        self.fails = False
        monkeypatch.setattr(engine, "snapshot", self.snapshot)

    def snapshot(self, hidden: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        self.calls.append(float(hidden[0, 0]))
        if self.fails:
            raise NotImplementedError("a snapshot needs a plain update")
        return hidden + 1

    def run(self, ranks: list[Any], made: SimpleNamespace) -> list[list[float]]:
        """Snapshots of each rank in one forward."""
        calls = []
        for rank in ranks:
            self.calls = []
            running = rank.begin(made)
            for layer in range(LAYERS):
                if running is not None:
                    running.stream(layer, torch.full((made.input_ids.shape[0], HIDDEN), float(layer)), made)
            if running is not None:
                running.watch(Norm())
                final = torch.full((made.input_ids.shape[0], HIDDEN), LAYERS + 0.0)
                running.finish(final * 2, final)
            calls.append(self.calls)
        return calls


@pytest.mark.parametrize(
    "made",
    [
        batch(("hsb-a", 0, 3)),
        batch(("user", 0, 3)),
        batch(("hsb-a", 0, 3), mode="DECODE"),
        batch(("hsb-a", 5, 3)),
        batch(("hsb-a", 0, 3), can_run_tbo=True),
        batch(("hsb-a", 0, 3), extend_prefix_lens_cpu=[0, 0]),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_takes_part_in_the_same_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: SimpleNamespace, fails: bool
) -> None:
    model = Model(tmp_path, follows=True)
    collective = Collective(monkeypatch)
    collective.fails = fails
    other = Follower(Requests("hsb-").wanted, model.settings.layers)
    first, second = collective.run([model.capture, other], made)
    assert first == second


def test_snapshots_are_dumped_and_their_failure_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(tmp_path, follows=True)
    collective = Collective(monkeypatch)
    collective.run([model.capture], batch(("hsb-a", 0, 3)))
    model.names()
    _, tensors = dumpfile.read_dump(tmp_path / "hsb-a.0.safetensors")
    assert [float(tensors[f"layer_{layer}"][0, 0]) for layer in (1, 3, 7)] == [2.0, 4.0, 8.0]
    collective.fails = True
    collective.run([model.capture], batch(("hsb-b", 0, 3)))
    assert "completing layer_1 failed" in model.reason("hsb-b")


def given_callbacks(running: Any, own: dict[int, Any]) -> list[bool]:
    """Per layer, whether SGLang gets a callback: it makes an all-reduce where it does."""
    given = []
    for layer in range(LAYERS):
        callback = own.get(layer) if running is None else running.callback(layer, own.get(layer))
        given.append(callback is not None)
        if callback is not None:
            callback(torch.zeros(3, HIDDEN))
            callback(torch.zeros(3, HIDDEN), owned=True)
    return given


@pytest.mark.parametrize(
    ("made", "captured"),
    [
        (batch(("hsb-a", 0, 3)), True),
        (batch(("hsb-fp-a", 0, 3)), True),
        (batch(("hsb-a", 5, 3)), True),
        (batch(("hsb-fp-a", 5, 3)), True),
        (batch(("hsb-a", 0, 3), can_run_tbo=True), True),
        (batch(("hsb-a", 0, 3), extend_prefix_lens_cpu=[0, 0]), True),
        (batch(("user", 0, 3)), False),
        (batch(("hsb-a", 0, 3), rids=None), False),
        (batch(("hsb-a", 0, 3), mode="DECODE"), False),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_every_rank_gives_sglang_a_callback_for_the_same_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: SimpleNamespace, captured: bool, full: bool
) -> None:
    def no_room(*arguments: object) -> None:
        raise NotCapturable("no room", "make some")

    model = Model(tmp_path, follows=True)
    if full:
        monkeypatch.setattr(model.writer, "reserve", no_room)
    asked = replace(model.settings, rid_prefix="hsb-fp-")
    prints = capture.Capture(asked, FingerprintWriter(str(tmp_path), 1), LAYERS, HIDDEN)
    wanted = Requests("hsb-").wanted
    ranks = [model.capture, Follower(wanted, model.settings.layers, prints), Follower(wanted, model.settings.layers)]
    told: list[Any] = []
    own = {2: lambda tensor, owned=False: told.append(tensor), 3: lambda tensor, owned=False: told.append(tensor)}
    given = [given_callbacks(rank.begin(made), own) for rank in ranks]
    assert given[0] == [layer in (2, 3, 4) if captured else layer in (2, 3) for layer in range(LAYERS)]
    assert given[1:] == [given[0]] * 2
    # SGLang's own are called on every rank.
    assert len(told) == 3 * 2 * 2


def test_a_rank_that_follows_takes_what_a_patched_model_calls(tmp_path: Path) -> None:
    running = Follower(Requests("hsb-").wanted, (1, 3)).begin(batch(("hsb-a", 0, 3)))
    own = object()
    assert (running.collector(2, None), running.collector(2, own), running.callback(2, own)) == (None, own, own)
    running.watch(Norm())
    running.watch(Norm(), False)
