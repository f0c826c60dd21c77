# SPDX-License-Identifier: Apache-2.0
"""The expect list from both sides: the extractor's announcement, the server's look-up."""

from __future__ import annotations

import asyncio
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch

from hidden_state_bridge import dumps
from hs_capture.expect import ExpectList
from hs_capture.guards import CaptureRefused

IDS = np.array([5, 70000, 3], dtype=np.int32)


def announce(directory: Path, rid: str, seconds: float = 5) -> None:
    asyncio.run(dumps.announce(str(directory), rid, IDS, seconds))


def rows(*requests: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(requests).astype(np.int64))


def test_without_a_list_nothing_is_laid(tmp_path: Path) -> None:
    announce(tmp_path, "hsb-r-1-0")
    assert list(tmp_path.iterdir()) == []


def test_an_announced_request_is_found_once(tmp_path: Path) -> None:
    server = ExpectList(str(tmp_path))
    announce(tmp_path, "hsb-r-1-0")
    (entry,) = (tmp_path / "expect").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    other = np.array([5, 70000, 4], dtype=np.int32)
    assert server.rids(rows(other, IDS, other), [3, 3, 3]) == [None, "hsb-r-1-0", None]
    assert server.rids(rows(IDS), [3]) == [None]


def test_the_same_tokens_wait_for_their_turn(tmp_path: Path) -> None:
    server = ExpectList(str(tmp_path))
    announce(tmp_path, "hsb-r-1-0")
    with pytest.raises(dumps.DumpRejected, match=r"the tokens of hsb-r-2-0 was on the expect list for 0\.1 s"):
        announce(tmp_path, "hsb-r-2-0", seconds=0.1)

    async def both() -> None:
        waiting = asyncio.ensure_future(dumps.announce(str(tmp_path), "hsb-r-2-0", IDS, 5))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert server.rids(rows(IDS), [3]) == ["hsb-r-1-0"]
        await waiting

    asyncio.run(both())
    assert server.rids(rows(IDS), [3]) == ["hsb-r-2-0"]
    assert list((tmp_path / "expect").iterdir()) == []


def test_what_is_given_up_is_taken_off_the_list(tmp_path: Path) -> None:
    server = ExpectList(str(tmp_path))
    announce(tmp_path, "hsb-r-1-0")
    dumps.remove(str(tmp_path), "hsb-r-1-1.")
    dumps.remove(str(tmp_path), "hsb-other-")
    assert len(list((tmp_path / "expect").iterdir())) == 1
    dumps.remove(str(tmp_path), "hsb-r-1-0.")
    assert server.rids(rows(IDS), [3]) == [None]


def test_a_list_that_went_away_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "dumps"
    server = ExpectList(str(path))
    shutil.rmtree(path)
    assert server.rids(rows(IDS), [3]) == [None]
    assert [stat.S_IMODE(made.stat().st_mode) for made in (path, path / "expect")] == [0o700, 0o700]
    announce(path, "hsb-r-1-0")
    assert server.rids(rows(IDS), [3]) == ["hsb-r-1-0"]


def test_no_list_is_made_behind_a_link(tmp_path: Path) -> None:
    path, victim = tmp_path / "dumps", tmp_path / "victim"
    server = ExpectList(str(path))
    shutil.rmtree(path)
    victim.mkdir()
    path.symlink_to(victim)
    with pytest.raises(CaptureRefused, match="is a link or a file"):
        server.rids(rows(IDS), [3])
    assert list(victim.iterdir()) == []
