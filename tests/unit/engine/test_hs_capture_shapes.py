# SPDX-License-Identifier: Apache-2.0
"""What a patched loop of each shape calls: layer outputs, snapshots, callbacks, watched norms."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dumping
import pytest
import torch
from test_hs_capture_batches import HIDDEN, LAYERS, batch

from hs_capture import capture, dumpfile, engine, expect
from hs_capture.collector import Proof
from hs_capture.guards import NotCapturable
from hs_capture.settings import Settings


class Norm(torch.nn.Module):
    """Like SGLang's RMSNorm: with a residual it works in place and gives both."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return hidden * 2
        residual.add_(hidden)
        hidden.copy_(residual * 2)
        return hidden, residual


class Model:
    """The loop of a model, with the calls that a patch puts into it."""

    def __init__(self, directory: Path, layers: tuple[int, ...] = (1, 3, 7), final: str = "both", **options: Any) -> None:
        self.directory = directory
        self.settings = Settings(str(directory), layers, final, "hsb-")
        self.writer = dumping.make_writer(self.settings, HIDDEN, {"family": "x"})
        self.capture = capture.Capture(self.settings, self.writer, LAYERS, HIDDEN, **options)
        self.norm = Norm()
        self.states: list[torch.Tensor] = []

    def tuple_loop(self, made: SimpleNamespace, *, watch: bool = False, skew: float = 0.0, counted: bool = False) -> None:
        running = self.capture.begin(made)
        rows = made.input_ids.shape[0]
        residual = torch.zeros(rows, HIDDEN)
        self.states = []
        for layer in range(LAYERS):
            hidden = torch.randn(rows, HIDDEN)
            running.output(None if counted else layer, hidden, residual)
            residual = hidden + residual
            self.states.append(residual.clone())
            hidden.zero_()
        hidden = torch.full((rows, HIDDEN), skew)
        if watch:
            running.watch(self.norm)
            self.norm(hidden, residual)
        else:
            running.finish(*self.norm(hidden, residual))
        residual.zero_()

    def single_loop(self, made: SimpleNamespace, layers: int = LAYERS) -> torch.Tensor:
        running = self.capture.begin(made)
        hidden = torch.zeros(made.input_ids.shape[0], HIDDEN)
        for _ in range(layers):
            hidden += torch.randn_like(hidden)
            running.output(None, hidden)
            self.states.append(hidden.clone())
        running.watch(self.norm)
        return self.norm(hidden)

    def names(self) -> list[str]:
        return dumping.names(self.writer, self.directory)

    def check(self, name: str = "hsb-a.0.safetensors") -> None:
        self.names()
        _, tensors = dumpfile.read_dump(self.directory / name)
        for layer in self.settings.layers:
            assert torch.allclose(tensors[f"layer_{layer}"], self.states[layer])
        assert torch.allclose(tensors["final_pre_norm"], self.states[-1])
        assert torch.allclose(tensors["final_post_norm"], self.states[-1] * 2)

    def reason(self, rid: str = "hsb-a") -> str:
        self.names()
        return dumpfile.read_error(self.directory / dumpfile.error_name(rid))["reason"]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model(tmp_path)


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_sums_of_a_tuple_loop(model: Model, watch: bool, counted: bool) -> None:
    model.tuple_loop(batch(("hsb-a", 0, 5)), watch=watch, counted=counted)
    model.check()
    assert not model.norm._forward_hooks


def test_states_of_a_single_loop(model: Model) -> None:
    model.single_loop(batch(("hsb-a", 0, 5)))
    model.check()
    assert not model.norm._forward_hooks


def test_a_norm_that_adds_nothing(model: Model) -> None:
    class HandsOn(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden * 2, residual

    running = model.capture.begin(batch(("hsb-a", 0, 5)))
    for layer in range(LAYERS):
        model.states.append(torch.randn(5, HIDDEN))
        running.output(layer, model.states[-1])
    norm = HandsOn()
    running.watch(norm, False)
    norm(model.states[-1], torch.zeros(5, HIDDEN))
    model.check()


def test_a_model_without_a_norm(tmp_path: Path) -> None:
    model = Model(tmp_path, (0, 7), "none")
    running = model.capture.begin(batch(("hsb-a", 0, 5)))
    for layer in range(LAYERS):
        running.output(layer, torch.full((5, HIDDEN), float(layer)))
    running.finish(None, None)
    model.names()
    _, tensors = dumpfile.read_dump(tmp_path / "hsb-a.0.safetensors")
    assert [float(tensors[f"layer_{layer}"][0, 0]) for layer in (0, 7)] == [0.0, 7.0]


def test_callbacks_hand_on(model: Model) -> None:
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    told: list[tuple[torch.Tensor, bool]] = []

    def own(tensor: torch.Tensor, owned: bool = False) -> None:
        told.append((tensor.clone(), owned))

    states = [torch.randn(2, HIDDEN) for _ in range(LAYERS + 1)]
    for layer in range(LAYERS):
        callback = running.callback(layer, own if layer == 2 else None)
        if callback is not None:
            callback(states[layer], owned=layer == 2)
    running.finish(states[-1] * 2, states[-1])
    model.states = states[1:]
    model.check()
    assert torch.equal(told[0][0], states[2]) and told[0][1] is True and len(told) == 1


def test_collectors_of_the_stream_hand_on(model: Model) -> None:
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    told: list[bool] = []
    own = SimpleNamespace(capture=lambda tensor, owned: told.append(owned))
    for layer in range(LAYERS):
        collector = running.collector(layer, own if layer in (2, 3) else None)
        if collector is not None:
            collector.capture(torch.zeros(2, HIDDEN), owned=True)
    running.finish(torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    # Layer 3 is SGLang's alone: it got its own collector.
    assert told == [True, True]
    assert model.names() == ["hsb-a.0.safetensors"]


def test_a_norm_that_takes_in_another_state_is_found(model: Model) -> None:
    model.tuple_loop(batch(("hsb-a", 0, 5)), skew=0.01)
    assert "the last layer's output and what the final norm takes in differ by" in model.reason()
    # Until it was seen to hold, every batch is looked at.
    model.tuple_loop(batch(("hsb-b", 0, 5)))
    model.check("hsb-b.0.safetensors")
    assert model.capture._proof.done


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_massive_activation_does_not_hide_another_state(dtype: torch.dtype) -> None:
    states = [torch.randn(300, 512, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    for state in states:
        state[0, 7] = 1000.0
    first, second = (state.to(dtype) for state in states)
    proof = Proof()
    with pytest.raises(NotCapturable, match=r"differ by .* of 1e\+03, and in the median row by 1\.4\d* of its length"):
        proof.check(first, second)
    assert not proof.done
    # The same sum, rounded on its way.
    parts = torch.randn(2, 300, 512, generator=torch.Generator().manual_seed(3))
    parts[:, 0, 7] = 500.0
    parts[:, 200:] = 0
    rounded = parts[0].to(dtype) + parts[1].to(dtype)
    proof.check(rounded, (parts[0] + parts[1]).to(dtype))
    assert proof.done
    zeros = torch.zeros(3, 512, dtype=dtype)
    Proof().check(zeros, zeros)
    with pytest.raises(NotCapturable, match="differ by"):
        Proof().check(torch.full_like(zeros, float("nan")), zeros)


def test_layers_outside_the_loop_are_found(model: Model) -> None:
    model.single_loop(batch(("hsb-a", 0, 5)), layers=3)
    assert model.reason() == "3 of 8 layers ran in the layer loop"


def test_layers_out_of_order_are_found(model: Model) -> None:
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    running.output(1, torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    running.finish(torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    assert "layer 1 ran as number 0" in model.reason()


@pytest.mark.parametrize("layers", [(1,), (7,)])
def test_a_partial_sum_is_never_added(tmp_path: Path, layers: tuple[int, ...]) -> None:
    model = Model(tmp_path, layers)
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    for layer in range(LAYERS):
        hidden = torch.zeros(2, HIDDEN)
        # The last layer counts even where it is not captured: the pre-norm state is its sum.
        hidden._sglang_needs_allreduce_fusion = layer in (1, 7) if layers == (1,) else layer == 7
        running.output(layer, hidden, torch.zeros(2, HIDDEN))
    running.finish(torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    assert "all-reduce fusion" in model.reason()


def test_an_owed_sum_is_named(model: Model) -> None:
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    running.output(0, torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    running.output(1, SimpleNamespace(contribution=None), torch.zeros(2, HIDDEN))
    running.finish(torch.zeros(2, HIDDEN), torch.zeros(2, HIDDEN))
    assert "layer_1 is a SimpleNamespace, not a tensor" in model.reason()


def test_a_forward_that_never_came_to_the_norm(model: Model) -> None:
    running = model.capture.begin(batch(("hsb-a", 0, 2)))
    running.watch(model.norm)
    assert model.capture.begin(batch(("user", 0, 1))) is None
    assert "without passing the final norm" in model.reason()
    assert not model.norm._forward_hooks
    # Once: what is given up is not given up again.
    (model.directory / dumpfile.error_name("hsb-a")).unlink()
    model.capture.begin(batch(("user", 0, 1)))
    assert model.names() == []


def test_a_copy_for_the_proof_that_fails_does_not_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def detach(self) -> Any:
            raise RuntimeError("out of memory")

    model = Model(tmp_path, (7,))
    running = model.capture.begin(batch(("hsb-a", 0, 3)))
    monkeypatch.setattr(engine, "snapshot", lambda *arguments: Full())
    for layer in range(LAYERS):
        running.stream(layer, torch.zeros(3, HIDDEN), None)
    running.finish(torch.zeros(3, HIDDEN), torch.zeros(3, HIDDEN))
    assert "completing layer_7 failed: RuntimeError('out of memory')" in model.reason()


def lay(directory: Path, ids: torch.Tensor, rid: str) -> Path:
    entry = directory / expect.DIRECTORY / hashlib.sha256(ids.long().numpy().astype("<i8").tobytes()).hexdigest()
    entry.write_text(rid)
    return entry


def test_expected_tokens_are_dumped_under_their_rid(tmp_path: Path) -> None:
    model = Model(tmp_path, expected=expect.ExpectList(str(tmp_path)))
    made = batch(("", 0, 5), ("", 0, 3), ("", 0, 4))
    del made.rids
    entry = lay(tmp_path, made.input_ids[5:8], "hsb-a")
    model.tuple_loop(made)
    model.states = [state[5:8] for state in model.states]
    model.check()
    assert not entry.exists()
    assert model.names() == ["expect", "hsb-a.0.safetensors"]
    assert model.capture.begin(made) is None


@pytest.mark.parametrize("content", ["user-1", "hsb-../x", "", "hsb-" + "x" * 300])
def test_an_entry_cannot_steer_a_name(tmp_path: Path, content: str) -> None:
    model = Model(tmp_path, expected=expect.ExpectList(str(tmp_path)))
    made = batch(("", 0, 5))
    lay(tmp_path, made.input_ids, content)
    assert model.capture.begin(made) is None
    assert model.names() == ["expect"]


def test_links_on_the_list_are_not_followed(tmp_path: Path) -> None:
    listed = expect.ExpectList(str(tmp_path))
    made = batch(("", 0, 5))
    entry = lay(tmp_path, made.input_ids, "x")
    entry.unlink()
    (tmp_path / "rid").write_text("hsb-a")
    entry.symlink_to(tmp_path / "rid")
    assert listed.rids(made.input_ids, [5]) == [None]
