# SPDX-License-Identifier: Apache-2.0
"""The capture runtime on forward batches made by hand."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dumping
import pytest
import torch

from hs_capture import capture, dumpfile
from hs_capture.guards import NotCapturable
from hs_capture.settings import Settings

LAYERS, HIDDEN = 8, 4


class Packer:
    """Like SGLang's: copies on append, and is falsy while empty."""

    copies_on_append = True

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def append(self, tensor: torch.Tensor) -> None:
        self.taken.append(tensor.clone())

    def __len__(self) -> int:
        return len(self.taken)


class Server:
    """A capture and the loop of a patched model around it."""

    def __init__(self, directory: Path, layers: tuple[int, ...] = (1, 3, 4), final: str = "post_norm") -> None:
        self.directory = directory
        metadata = {"layers": ",".join(map(str, layers)), "final": final, "sglang_version": "0.5.20", "patch_version": "1"}
        settings = Settings(str(directory), layers, final, "hsb-")
        self.writer = dumping.make_writer(settings, HIDDEN, {**metadata, "family": "D", "tp_size": "1"})
        self.capture = capture.Capture(settings, self.writer, LAYERS, HIDDEN)
        self.own: dict[int, Any] = {}
        self.skip: set[int] = set()
        self.mark: set[int] = set()

    def forward(self, batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of all layers [LAYERS, t, H] and the normed state, whatever is captured."""
        outputs = torch.randn(LAYERS, batch.input_ids.shape[0], HIDDEN)
        running = self.capture.begin(batch)
        stream = torch.zeros_like(outputs[0])
        for layer in range(LAYERS):
            own = self.own.get(layer)
            collector = own if running is None else running.collector(layer, own)
            if collector is not None and layer not in self.skip:
                given = stream if getattr(collector, "copies_on_append", False) else stream.clone()
                if layer in self.mark:
                    given._sglang_needs_allreduce_fusion = True
                collector.append(given)
            # In place, as fused kernels do: what was not copied is lost.
            stream.copy_(outputs[layer])
        post = stream * 2
        if running is not None:
            running.finish(post, stream)
            stream.zero_()
        return outputs, post

    def names(self) -> list[str]:
        return dumping.names(self.writer, self.directory)

    def read(self, name: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        assert self.writer.drain(20)
        return dumpfile.read_dump(self.directory / name)

    def error(self, rid: str) -> dict[str, str]:
        assert self.writer.drain(20)
        return dumpfile.read_error(self.directory / dumpfile.error_name(rid))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def batch(*requests: tuple[str | None, int, int], mode: str = "EXTEND", **changes: Any) -> SimpleNamespace:
    """A forward batch of (rid, start, length)."""
    rows = sum(length for _, _, length in requests)
    made = SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        rids=[rid for rid, _, _ in requests],
        extend_prefix_lens_cpu=[start for _, start, _ in requests],
        extend_seq_lens_cpu=[length for _, _, length in requests],
        input_ids=torch.randint(0, 512, (rows,), dtype=torch.int32),
        can_run_tbo=False,
    )
    vars(made).update(changes)
    return made


def run(running: Any, given: dict[int, Any], post: torch.Tensor) -> None:
    """The loop and the norm by hand: layer i takes in `given[i]` (zeros like `post` by default)."""
    for layer in range(LAYERS):
        collector = running.collector(layer, None)
        if collector is not None:
            collector.append(given.get(layer, torch.zeros_like(post)))
    running.finish(post, torch.zeros_like(post))


def test_rows_go_to_their_requests(server: Server) -> None:
    made = batch(("hsb-a", 0, 3), ("user", 0, 2), ("hsb-b", 0, 4), ("HEALTH_CHECK_1", 0, 1))
    ids = made.input_ids.clone()
    outputs, post = server.forward(made)
    assert server.names() == ["hsb-a.0.safetensors", "hsb-b.0.safetensors"]
    for name, rows in (("hsb-a.0.safetensors", slice(0, 3)), ("hsb-b.0.safetensors", slice(5, 9))):
        metadata, tensors = server.read(name)
        assert metadata["layers"] == "1,3,4"
        assert list(tensors) and set(tensors) == {"input_ids", "layer_1", "layer_3", "layer_4", "final_post_norm"}
        assert torch.equal(tensors["input_ids"], ids[rows].long())
        for layer in (1, 3, 4):
            assert torch.equal(tensors[f"layer_{layer}"], outputs[layer][rows])
        assert torch.equal(tensors["final_post_norm"], post[rows])


@pytest.mark.parametrize(
    ("final", "names"),
    [
        ("post_norm", {"final_post_norm"}),
        ("pre_norm", {"final_pre_norm"}),
        ("both", {"final_post_norm", "final_pre_norm"}),
        ("none", set()),
    ],
)
def test_final_states(tmp_path: Path, final: str, names: set[str]) -> None:
    server = Server(tmp_path, (0, 7), final)
    outputs, post = server.forward(batch(("hsb-a", 0, 3)))
    _, tensors = server.read("hsb-a.0.safetensors")
    assert set(tensors) == {"input_ids", "layer_0", "layer_7"} | names
    assert torch.equal(tensors["layer_0"], outputs[0])
    assert torch.equal(tensors["layer_7"], outputs[7])
    assert torch.equal(tensors.get("final_pre_norm", outputs[7]), outputs[7])
    assert torch.equal(tensors.get("final_post_norm", post), post)


def test_token_ids_are_copied(server: Server) -> None:
    made = batch(("hsb-a", 0, 3))
    ids = made.input_ids.clone()
    running = server.capture.begin(made)
    made.input_ids.zero_()
    run(running, {}, torch.zeros(3, HIDDEN))
    assert torch.equal(server.read("hsb-a.0.safetensors")[1]["input_ids"], ids.long())


@pytest.mark.parametrize(
    "made",
    [
        batch(("user", 0, 3), (None, 0, 2)),
        batch(("hsb-a", 0, 3), rids=None),
        batch(("hsb-a", 0, 3), mode="DECODE"),
        batch(("hsb-a", 0, 3), mode="MIXED"),
        batch(("hsb-a", 0, 3), mode="TARGET_VERIFY"),
    ],
)
def test_forwards_that_dump_nothing(server: Server, made: SimpleNamespace) -> None:
    assert server.capture.begin(made) is None
    assert server.names() == []


def test_a_rid_that_cannot_name_a_file_is_reported_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            server.forward(batch(("hsb-../../x", 0, 3)))
    assert server.names() == []
    assert len(caplog.records) == 1
    assert "cannot name a dump" in caplog.text


def test_sglangs_own_collector_gets_what_it_wants(server: Server) -> None:
    kept: list[torch.Tensor] = []
    server.own = {2: Packer(), 5: kept, 6: Packer()}
    outputs, _ = server.forward(batch(("hsb-a", 0, 3)))
    assert torch.equal(server.own[2].taken[0], outputs[1])
    assert torch.equal(kept[0], outputs[4])
    assert torch.equal(server.own[6].taken[0], outputs[5])
    assert torch.equal(server.read("hsb-a.0.safetensors")[1]["layer_1"], outputs[1])


def test_a_collector_says_whether_it_copies(server: Server) -> None:
    running = server.capture.begin(batch(("hsb-a", 0, 3)))
    assert running.collector(2, None).copies_on_append is True
    assert running.collector(2, Packer()).copies_on_append is True
    assert running.collector(2, []).copies_on_append is False
    own = Packer()
    assert running.collector(3, own) is own
    assert running.collector(0, None) is None


def test_pieces_of_a_chunked_prefill(server: Server) -> None:
    server.forward(batch(("hsb-a", 0, 16)))
    server.forward(batch(("hsb-b", 0, 5), ("hsb-a", 16, 11)))
    assert server.names() == ["hsb-a.0.safetensors", "hsb-a.16.safetensors", "hsb-b.0.safetensors"]
    assert server.read("hsb-a.16.safetensors")[0]["start"] == "16"
    # A request that was retracted begins again.
    server.forward(batch(("hsb-a", 0, 27)))
    assert server.read("hsb-a.0.safetensors")[0]["tokens"] == "27"


def test_a_prefix_cache_hit_is_an_error_not_a_short_file(server: Server) -> None:
    server.forward(batch(("hsb-a", 63, 1), ("hsb-b", 0, 3)))
    assert server.names() == ["hsb-a.error.json", "hsb-b.0.safetensors"]
    assert "prefix cache" in server.error("hsb-a")["reason"]
    assert "--disable-radix-cache" in server.error("hsb-a")["remedy"]
    before = server.error("hsb-a")
    server.forward(batch(("hsb-a", 64, 8)))
    assert (server.error("hsb-a"), server.names()) == (before, ["hsb-a.error.json", "hsb-b.0.safetensors"])


def test_a_gap_between_pieces_is_an_error(server: Server) -> None:
    server.forward(batch(("hsb-a", 0, 16)))
    server.forward(batch(("hsb-a", 17, 4)))
    assert "starts at token 17 and 16 tokens were seen" in server.error("hsb-a")["reason"]


@pytest.mark.parametrize(
    ("made", "reason", "remedy"),
    [
        (batch(("hsb-a", 0, 3), can_run_tbo=True), "two-batch overlap", "--enable-two-batch-overlap"),
        (batch(("hsb-a", 0, 3), input_ids=torch.zeros(4, dtype=torch.int32)), "4 rows", "without data, context"),
        (batch(("hsb-a", 0, 3), extend_prefix_lens_cpu=[0, 0]), "2 offsets", "without data, context"),
        (batch(("hsb-a", 0, 3), ("hsb-a", 0, 2)), "came twice in one batch", "use a rid once"),
        (batch(("hsb-a", 0, 3), extend_seq_lens_cpu=None), "could not begin", "read the log"),
    ],
)
def test_batches_that_cannot_be_captured(server: Server, made: SimpleNamespace, reason: str, remedy: str) -> None:
    server.forward(made)
    assert server.names() == ["hsb-a.error.json"]
    assert reason in server.error("hsb-a")["reason"]
    assert remedy in server.error("hsb-a")["remedy"]


def test_each_request_fails_once_with_the_first_reason(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*arguments: object) -> None:
        raise NotCapturable("no room", "make some")

    told: list[tuple[str, str]] = []
    monkeypatch.setattr(server.writer, "reserve", no_room)
    monkeypatch.setattr(server.writer, "fail", lambda rid, error: told.append((rid, error.reason.partition(" starts")[0])))
    server.forward(batch(("hsb-a", 5, 3), ("hsb-b", 0, 3), ("hsb-c", 0, 2), ("hsb-c", 0, 2)))
    assert told == [("hsb-a", "the piece"), ("hsb-c", "the rid came twice in one batch"), ("hsb-b", "no room")]
    # A further piece of what has failed has its marker.
    told.clear()
    server.forward(batch(("hsb-a", 8, 3), ("hsb-d", 0, 3)))
    assert told == [("hsb-d", "no room")]


def test_a_layer_that_gave_nothing_is_an_error(server: Server) -> None:
    server.skip = {4}
    server.forward(batch(("hsb-a", 0, 3), ("hsb-b", 0, 2)))
    assert server.names() == ["hsb-a.error.json", "hsb-b.error.json"]
    assert "gave no layer_3" in server.error("hsb-b")["reason"]


def test_a_partial_sum_is_an_error(server: Server) -> None:
    server.mark = {4}
    server.forward(batch(("hsb-a", 0, 3)))
    assert "layer_3 is one rank's partial sum" in server.error("hsb-a")["reason"]


@pytest.mark.parametrize("shape", [(2, HIDDEN), (3, HIDDEN // 2), (4, HIDDEN)])
def test_a_shard_or_padding_is_an_error(server: Server, shape: tuple[int, int]) -> None:
    running = server.capture.begin(batch(("hsb-a", 0, 3)))
    run(running, {2: torch.zeros(shape)}, torch.zeros(3, HIDDEN))
    assert "expected [3, 4]" in server.error("hsb-a")["reason"]
    assert server.names() == ["hsb-a.error.json"]


def test_a_failing_copy_does_not_reach_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    running = server.capture.begin(batch(("hsb-a", 0, 3)))
    monkeypatch.setattr("hs_capture.copier.DirectCopier.copy", broken)
    run(running, {}, torch.zeros(3, HIDDEN))
    assert "copying layer_1 failed" in server.error("hsb-a")["reason"]


def test_a_state_of_another_dtype_is_an_error(server: Server) -> None:
    running = server.capture.begin(batch(("hsb-a", 0, 3)))
    run(running, {2: torch.zeros(3, HIDDEN, dtype=torch.bfloat16)}, torch.zeros(3, HIDDEN))
    assert server.error("hsb-a")["reason"] == "layer_1 is bfloat16, the model float32"


def test_what_comes_after_a_batch_was_given_up_goes_nowhere(server: Server) -> None:
    stale = server.capture.begin(batch(("hsb-a", 0, 3), ("hsb-b", 0, 2)))
    outputs, _ = server.forward(batch(("hsb-c", 0, 3)))
    run(stale, {}, torch.ones(5, HIDDEN))
    assert server.names() == ["hsb-a.error.json", "hsb-b.error.json", "hsb-c.0.safetensors"]
    assert torch.equal(server.read("hsb-c.0.safetensors")[1]["layer_3"], outputs[3])
