# SPDX-License-Identifier: GPL-3.0-or-later
"""Many requests at once, in pieces, beside overlap scheduling and a prefix cache: each state is still that of its record."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy
import pytest
import torch

import models
from capture import Captured, Records, capturing, differences, make_records
from cases import RELEASES, WITH_RIDS, parameters
from hidden_state_bridge import dumps
from hs_capture.settings import DEFAULT_RID_PREFIX
from server import ServerError
from test_states import TOLERANCE, most_requests_in_a_forward

STRUCTURE = "deepseek_v3"
AT_ONCE, RECORD_COUNT, ALIKE, CHUNK = 32, 72, 8, 16
# Of a forward in which so many requests are at once under way.
FILLED = 8
REMEDY = "start the server with --disable-radix-cache"
# Overlap scheduling is SGLang's default.
OVERLAP = "--disable-overlap-schedule"
NO_CACHE = "--disable-radix-cache"
MANY = "--max-running-requests=64"
PIECES = f"--chunked-prefill-size={CHUNK}"


def distinct_records() -> dict[str, list[int]]:
    """Records of 1 to 160 tokens, of which no two begin with the same token: none is in another's prefix cache."""
    generator = random.Random(11)
    lengths = [generator.choice((1, 2, 5, 16, 17, 33, generator.randint(1, 60), generator.randint(60, 160))) for _ in range(RECORD_COUNT)]
    records = make_records(lengths, 12)
    for record, first in zip(records.values(), generator.sample(range(3, models.VOCABULARY), RECORD_COUNT)):
        record[0] = first
    return records


ALL_DIFFERENT = distinct_records()


@pytest.fixture(scope="module")
def states():
    """The reference of each record."""
    return dict(zip(ALL_DIFFERENT, models.reference(STRUCTURE, list(ALL_DIFFERENT.values())), strict=True))


def check(captured: Captured, states: dict[str, dict], layers: tuple[int, ...]) -> float:
    """Every token of every state of every dump; returns the largest |difference| over the largest |value|."""
    measured = differences(captured.dumps, states)
    assert len(measured) == len(layers) + 2
    assert {name: value for name, value in measured.items() if value > TOLERANCE} == {}
    return max(measured.values())


def cases(releases: list[str], *hows: str) -> list[tuple[str, str, int]]:
    """On two ranks each, the newest release on one too."""
    return [case for case in itertools.product(releases, hows, (1, 2)) if case[2] == 2 or case[0] == RELEASES[-1]]


CASES = cases(RELEASES, "whole") + cases(WITH_RIDS, "pieces")
UNNAMED = [release for release in RELEASES if release not in WITH_RIDS]


@pytest.mark.parametrize("release, how, tp_size", parameters(CASES))
def test_many_requests_at_once(engine_of, states, report, tmp_path, release, how, tp_size):
    arguments = [MANY, *([PIECES] if how == "pieces" else [])]
    with capturing(engine_of(release), STRUCTURE, tp_size, tmp_path, arguments=arguments, without=[OVERLAP]) as running:
        captured = running.take(ALL_DIFFERENT, AT_ONCE)
        assert not captured.errors
        worst = check(captured, states, running.layout.layers)
        assert running.unknown(captured) == []
        filled = most_requests_in_a_forward(captured.log.read_text())
        if how == "pieces":
            check_pieces(captured)
            plant_hole(captured, running)
        else:
            assert filled >= FILLED
            assert all(len(pieces) == 1 for pieces in captured.pieces.values())
    report([f"SGLang {release}", STRUCTURE, f"tp {tp_size}", f"{how}, overlap on", f"{filled} requests in a forward", f"{worst:.1e}", ""])


def check_pieces(captured: Captured) -> None:
    """Records are in pieces of the chunk's size at most, and some shared a forward with another record's."""
    shared = 0
    for rid, paths in captured.pieces.items():
        tokens = [int(re.search(r"\.(\d+)\.safetensors$", path)[1]) for path in paths] + [len(ALL_DIFFERENT[rid])]
        sizes = [end - start for start, end in zip(tokens, tokens[1:])]
        assert max(sizes) <= CHUNK, rid
        # Room that a piece before the last one left in its forward was taken by another request.
        shared += min(sizes[:-1], default=CHUNK) < CHUNK
    assert shared >= FILLED


def plant_hole(captured: Captured, running) -> None:
    """A request without one of its pieces is never taken for whole."""
    rid, paths = next((rid, paths) for rid, paths in captured.pieces.items() if len(paths) > 3)
    ids = numpy.array(ALL_DIFFERENT[rid], dtype=numpy.int32)
    for lost in range(len(paths)):
        with pytest.raises(dumps.DumpRejected, match="expected|were sent"):
            dumps.load([path for path in paths if path != paths[lost]], rid, ids, running.layout)
    Path(paths[1]).unlink()
    assert dumps.find(str(running.dumps), rid, len(ids)) is None


def cached_records() -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Records that meet rows of `ALL_DIFFERENT` in the prefix cache, and such that do not."""
    hits, misses = {}, {}
    generator = random.Random(13)
    for number, record in enumerate(ALL_DIFFERENT.values()):
        tail = [generator.randrange(3, models.VOCABULARY) for _ in range(generator.randint(1, 40))]
        like = [record, [*record, *tail], [*record[: len(record) // 2 or 1], *tail], record[: len(record) // 2 or 1]][number % 4]
        # The last token of a request is always computed: one token meets no row.
        into = hits if len(like) > 1 else misses
        into[f"{DEFAULT_RID_PREFIX}again{number}"] = like
    return hits, misses


CACHED = cases(WITH_RIDS, "cached", "cached-pieces")
CACHED_SAMPLE = (("0.5.23", "cached", 2), ("0.5.23", "cached-pieces", 1))


@pytest.mark.parametrize("release, how, tp_size", parameters(CACHED, *CACHED_SAMPLE))
def test_the_prefix_cache(engine_of, states, report, tmp_path, release, how, tp_size):
    """With it on, what met no cached row is right, and what did is an error marker that names the flag."""
    arguments = [MANY, *([PIECES] if how == "cached-pieces" else [])]
    hits, misses = cached_records()
    with capturing(engine_of(release), STRUCTURE, tp_size, tmp_path, arguments=arguments, without=[OVERLAP, NO_CACHE]) as running:
        first = running.take(ALL_DIFFERENT, AT_ONCE)
        assert not first.errors
        worst = check(first, states, running.layout.layers)
        filled = most_requests_in_a_forward(first.log.read_text())
        if how == "cached":
            assert filled >= FILLED
        else:
            check_pieces(first)
            plant_hole(first, running)
        again = running.take({**hits, **misses}, AT_ONCE)
        assert set(again.errors) == set(hits)
        for rid, error in again.errors.items():
            assert error["remedy"] == REMEDY, rid
            assert re.search(r"starts at token [1-9]\d* and 0 tokens were seen: the rest came from the prefix cache", error["reason"]), rid
        check(again, by_tokens(misses, states), running.layout.layers)

        # Of requests alike that come at once each is right, or meets the rows of one before it.
        generator = random.Random(14)
        same = [generator.randrange(3, models.VOCABULARY) for _ in range(70)]
        alike = {f"{DEFAULT_RID_PREFIX}alike{number}": same for number in range(ALIKE)}
        together = running.take(alike, AT_ONCE)
        assert together.dumps
        assert {error["remedy"] for error in together.errors.values()} <= {REMEDY}
        state = models.reference(STRUCTURE, [same])[0]
        check(together, dict.fromkeys(alike, state), running.layout.layers)
        assert running.unknown(first, again, together) == []
    report(
        [f"SGLang {release}", STRUCTURE, f"tp {tp_size}", f"{how}, overlap on", f"{filled} requests in a forward", f"{worst:.1e}"]
        + [f"{len(again.errors)} + {len(together.errors)} hits are error markers"]
    )


def by_tokens(records: Records, states: dict[str, dict]) -> dict[str, dict]:
    """The reference of records that are the first tokens of others."""
    found = {}
    for rid, ids in records.items():
        whole = next(rid for rid, other in ALL_DIFFERENT.items() if other[: len(ids)] == ids)
        found[rid] = {name: state[: len(ids)] for name, state in states[whole].items()}
    return found


# What is asked for, why a release without rids refuses it, and what to do.
REFUSED = {
    "pieces": ({"arguments": [PIECES]}, f"chunked_prefill_size is {CHUNK}", "start with --chunked-prefill-size -1"),
    "cached": ({"without": [NO_CACHE]}, "the prefix cache is on", "start with --disable-radix-cache"),
}


@pytest.mark.parametrize("release, how, tp_size", parameters(list(itertools.product(UNNAMED, REFUSED, [1]))))
def test_without_rids_pieces_and_a_prefix_cache_are_refused_at_start(engine_of, tmp_path, release, how, tp_size):
    changed, reason, remedy = REFUSED[how]
    running = capturing(engine_of(release), STRUCTURE, tp_size, tmp_path, **changed)
    with pytest.raises(ServerError, match="ended with status|was not ready") as failure, running:
        pass
    refusal = rf"CaptureRefused: hidden state capture refused: {reason}[^;]*; {remedy}, or unset SGLANG_HS_DUMP_DIR"
    assert re.search(refusal, (tmp_path / "server.log").read_text()), failure.value


def test_a_row_that_is_anothers_is_seen(states):
    """A row moved, or two requests swapped, is far beyond the tolerance."""
    rids = [rid for rid, record in ALL_DIFFERENT.items() if len(record) == 17][:2]
    for wrong in (lambda own, other: torch.roll(own, 1, 0), lambda own, other: other):
        moved = {
            rid: ({}, {name: wrong(state, states[rids[1 - place]][name]) for name, state in states[rid].items()})
            for place, rid in enumerate(rids)
        }
        assert min(differences(moved, states).values()) > 100 * TOLERANCE
