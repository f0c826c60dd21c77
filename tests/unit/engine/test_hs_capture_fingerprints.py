# SPDX-License-Identifier: Apache-2.0
"""Fingerprints: complete states agree across ranks, partial sums and rows of others do not, and nothing else is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import dumping
import numpy as np
import pytest
import torch
from test_hs_capture_batches import HIDDEN, LAYERS, batch

from hs_capture import capture, dumpfile
from hs_capture.fingerprints import FingerprintWriter
from hs_capture.follower import Follower, FollowerBatch
from hs_capture.settings import Settings
from hs_capture.sheet import Piece

RANKS = 3


class Group:
    """A capture on rank 0 and followers, all fed the same forward, with what each holds given by `of`."""

    def __init__(self, directory: Path, wanted: bool = False) -> None:
        settings = Settings(str(directory), (1, 3), "both", "hsb-")
        self.directory = directory
        self.writer = dumping.make_writer(settings, HIDDEN)
        self.ranks = [capture.Capture(settings, self.writer, LAYERS, HIDDEN)]
        asked = Settings(str(directory), (1, 3), "both", "hsb-fp-")
        for rank in range(1, RANKS):
            prints = capture.Capture(asked, FingerprintWriter(str(directory), rank), LAYERS, HIDDEN)
            self.ranks.append(Follower(capture.Requests("hsb-").wanted if wanted else None, (1, 3), prints))
        self.begun: list[object] = []

    def forward(self, made: SimpleNamespace, partial: int | None = None) -> None:
        """Rank 1 holds another sum in layer `partial`."""
        states = torch.randn(LAYERS, made.input_ids.shape[0], HIDDEN)
        self.begun = [rank.begin(made) for rank in self.ranks]
        for rank, running in enumerate(self.begun):
            if running is None or isinstance(running, FollowerBatch):
                continue
            for layer in range(LAYERS):
                state = states[layer] * 0.4 if rank == 1 and layer == partial else states[layer]
                running.output(layer, state.clone(), torch.zeros_like(state))
            running.finish(states[-1] * 2, states[-1].clone())

    def prints(self, rid: str, start: int = 0) -> list[dict[str, np.ndarray]]:
        self.names()
        return [dumpfile.read_fingerprint(self.directory / dumpfile.fingerprint_name(rid, start, rank)) for rank in range(RANKS)]

    def names(self) -> list[str]:
        return dumping.names(self.writer, self.directory)


def test_every_rank_says_the_same_of_complete_states(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.forward(batch(("hsb-a", 0, 3), ("hsb-fp-b", 0, 5), ("user", 0, 2), ("hsb-fp-c", 0, 2500)))
    dumps = ["hsb-a.0.safetensors", "hsb-fp-b.0.safetensors", "hsb-fp-c.0.safetensors"]
    assert group.names() == sorted(dumps + [f"hsb-fp-{name}.0.fp{rank}" for name in "bc" for rank in range(RANKS)])
    for rid, rows in (("hsb-fp-b", 5), ("hsb-fp-c", 2500)):
        prints = group.prints(rid)
        _, tensors = dumpfile.read_dump(tmp_path / f"{rid}.0.safetensors")
        assert set(prints[0]) == {"layer_1", "layer_3", "final_post_norm", "final_pre_norm"}
        for name, values in prints[0].items():
            assert values.shape == (rows, dumpfile.FINGERPRINT_VALUES) and values.dtype == np.float32
            assert all(np.array_equal(values, other[name]) for other in prints)
            # Each row's numbers are of that row: as many different ones as there are rows, and of its size.
            assert len(np.unique(values, axis=0)) == rows
            size = np.sqrt((values.astype(np.float64) ** 2).sum() / dumpfile.FINGERPRINT_VALUES)
            assert size == pytest.approx(float(tensors[name].norm()) / HIDDEN**0.5, rel=0.9)


def test_only_a_forward_that_did_not_end_is_said_to_lack_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = Group(tmp_path)
    group.forward(batch(("hsb-fp-a", 0, 3)))
    group.forward(batch(("hsb-fp-b", 0, 3)))
    assert "no fingerprints" not in caplog.text
    for rank in group.ranks:
        rank.begin(batch(("hsb-fp-c", 0, 3)))
    group.forward(batch(("hsb-fp-d", 0, 3)))
    assert caplog.text.count("has no fingerprints of hsb-fp-c: the forward ended without passing") == RANKS - 1


def test_a_partial_sum_shows_in_its_layer_alone(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.forward(batch(("hsb-fp-a", 0, 9)), partial=3)
    first, second, third = group.prints("hsb-fp-a")
    assert not np.isclose(first["layer_3"], second["layer_3"], rtol=0.1).any(axis=1).all()
    for name in ("layer_1", "final_post_norm", "final_pre_norm"):
        assert np.array_equal(first[name], second[name])
    assert all(np.array_equal(first[name], third[name]) for name in first)


def test_requests_that_do_not_ask_leave_none(tmp_path: Path) -> None:
    group = Group(tmp_path)
    group.forward(batch(("hsb-a", 0, 3), ("user-fp-1", 0, 2)))
    assert group.begun[1:] == [None, None]
    assert group.names() == ["hsb-a.0.safetensors"]
    following = Group(tmp_path, wanted=True)
    following.forward(batch(("hsb-a", 0, 3)))
    assert all(isinstance(one, FollowerBatch) for one in following.begun[1:])


def test_a_failure_reaches_neither_the_server_nor_the_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = Group(tmp_path)
    group.forward(batch(("hsb-fp-a", 5, 3)))
    assert group.names() == ["hsb-fp-a.error.json"]
    assert "rank 2 has no fingerprints of hsb-fp-a" in caplog.text


def test_a_rank_that_dumps_nothing_removes_nothing(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    # Of rank 0, which may have the same process id in a namespace of its own.
    under_way = [tmp_path / dumpfile.temporary_name("5"), tmp_path / ".spare-1"]
    for path in under_way:
        path.touch()
    writer = FingerprintWriter(str(tmp_path), rank=1)
    writer.submit(writer.reserve([Piece("hsb-fp-a", 0, 0, 1)]))
    assert all(path.exists() for path in under_way)
    assert (tmp_path / dumpfile.fingerprint_name("hsb-fp-a", 0, 1)).exists()


def test_a_file_of_fingerprints_that_is_not_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.0.fp0"
    content = dumpfile.encode_fingerprint("x", 0, 0, 1, {"layer_1": bytes(16)})
    for wrong, reason in ((content[:-1], "not a whole file"), (content.replace(b"fingerprint/1", b"fingerprint/2"), "not a file of")):
        path.write_bytes(wrong)
        with pytest.raises(dumpfile.DumpError, match=reason):
            dumpfile.read_fingerprint(path)
    path.write_bytes(content)
    assert dumpfile.read_fingerprint(path)["layer_1"].shape == (1, 4)
