# SPDX-License-Identifier: Apache-2.0
"""The ring in host memory, and how the cap is divided."""

from __future__ import annotations

import itertools
import random
import threading
import time
from types import SimpleNamespace

import pytest

from hs_capture import budget, guards, ring

PAGE = 4096
LAYOUT = budget.Layout(("layer_1", "layer_29", "layer_57", "final_post_norm"), 7168, "bfloat16")


def test_blocks_follow_one_another_and_never_wrap() -> None:
    held = ring.Ring(4 * PAGE)
    first, second = held.take(PAGE, 0)[0], held.take(2 * PAGE - 1, 0)[0]
    assert [(block.offset, block.size) for block in (first, second)] == [(0, PAGE), (PAGE, 2 * PAGE)]
    with pytest.raises(ring.RingFull):
        held.take(2 * PAGE, 0)
    held.give(first)
    third = held.take(PAGE, 0)[0]
    assert third.offset == 3 * PAGE
    assert held.take(PAGE, 0)[0].offset == 0
    assert held.used() == 4 * PAGE
    with pytest.raises(ring.RingFull):
        held.take(1, 0)


def test_a_block_comes_back_in_any_order() -> None:
    held = ring.Ring(3 * PAGE)
    blocks = [held.take(PAGE, 0)[0] for _ in range(3)]
    held.give(blocks[1])
    with pytest.raises(ring.RingFull):
        held.take(PAGE, 0)
    held.give(blocks[0])
    assert held.take(2 * PAGE, 0)[0].offset == 0
    held.give(blocks[2])
    assert held.used() == 2 * PAGE


def test_what_can_never_fit_is_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(ring.RingFull, match="more than the whole ring") as caught:
        ring.Ring(PAGE).take(PAGE + 1, 30)
    assert not caught.value.ever
    assert time.monotonic() - began < 5


def test_a_wait_is_bounded_and_made_once() -> None:
    held = ring.Ring(PAGE)
    block = held.take(PAGE, 0)[0]
    began = time.monotonic()
    with pytest.raises(ring.RingFull, match=r"within 0\.2 s") as caught:
        held.take(1, 0.2)
    assert caught.value.ever
    assert 0.2 <= time.monotonic() - began < 2
    began = time.monotonic()
    with pytest.raises(ring.RingFull):
        held.take(1, 30)
    assert time.monotonic() - began < 5, "a ring that stalled was waited for again"
    held.give(block)
    block, waited = held.take(1, 30)
    assert waited == 0


def test_the_seconds_of_a_wait_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held = ring.Ring(PAGE)
    block = held.take(PAGE, 0)[0]
    waits, wait = threading.Event(), held._freed.wait

    def waited(seconds: float) -> bool:
        waits.set()
        return wait(seconds)

    def give() -> None:
        # Who waits lets go of the lock that `give` takes, so this one is never too early.
        assert waits.wait(30)
        time.sleep(0.01)
        held.give(block)

    monkeypatch.setattr(held._freed, "wait", waited)
    giver = threading.Thread(target=give)
    giver.start()
    assert 0.01 <= held.take(PAGE, 30)[1] < 30
    giver.join()


def test_a_thread_that_is_held_up_has_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the scheduler, or by another thread that holds the lock for an instant."""
    clock = itertools.count()
    monkeypatch.setattr(ring, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    assert ring.Ring(PAGE).take(PAGE, 30)[1] == 0.0


def test_blocks_in_use_never_overlap() -> None:
    """Eight threads write a pattern of their own, and find it whole before they give it back."""
    held = ring.Ring(32 * PAGE)
    wrong = []

    def use(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(100):
            size = generator.randrange(1, 9 * PAGE)
            block, _waited = held.take(size, 20)
            pattern = bytes([seed]) * size
            held.memory[block.offset : block.offset + size] = pattern
            time.sleep(generator.random() / 5000)
            if held.memory[block.offset : block.offset + size] != pattern:
                wrong.append(seed)
            held.give(block)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert held.used() == 0


def test_the_cap_is_divided() -> None:
    free = 500 << 30
    planned = budget.plan({}, LAYOUT, 16384, free, "/d")
    assert LAYOUT.row_bytes == 57352
    assert planned.batch == 16384 * 57352
    assert planned.ring == 4 * LAYOUT.block_bytes(16384) == 4 * planned.batch
    assert planned.ring + planned.directory == int(0.9 * free)
    assert planned.staging == 2 * 16384 * 7168 * 2 <= 512 << 20
    assert planned.wait_seconds == 10
    least = 2 * planned.batch
    small = budget.plan({"SGLANG_HS_DUMP_MAX_BYTES": str(least), "SGLANG_HS_DUMP_WAIT_SECONDS": "0.5"}, LAYOUT, 16384, 0, "/d")
    assert (small.ring, small.directory, small.wait_seconds) == (small.batch, small.batch, 0.5)
    assert budget.plan({}, LAYOUT, 163840, free, "/d").staging == 512 << 20
    # A full batch fits even where alignment makes its block longer than its rows.
    odd = budget.Layout(("layer_1",), 3, "bfloat16")
    assert budget.plan({"SGLANG_HS_DUMP_MAX_BYTES": "200"}, odd, 7, 0, "/d").ring == odd.block_bytes(7) == 128 > 7 * odd.row_bytes


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"SGLANG_HS_DUMP_MAX_BYTES": str(2 * 16384 * 57352 - 1)}, "SGLANG_HS_DUMP_MAX_BYTES=1879310335 cannot hold two prefill batches"),
        ({}, "/d has 1073741824 bytes free .* cannot hold two prefill batches .*make room in /d"),
        ({"SGLANG_HS_DUMP_MAX_BYTES": "2G"}, "SGLANG_HS_DUMP_MAX_BYTES='2G' is not a number above 0"),
        ({"SGLANG_HS_DUMP_MAX_BYTES": "-1"}, "is not a number above 0"),
        ({"SGLANG_HS_DUMP_WAIT_SECONDS": "nan"}, "SGLANG_HS_DUMP_WAIT_SECONDS='nan' is not a number above 0"),
        ({"SGLANG_HS_DUMP_WAIT_SECONDS": "inf"}, "is not a number above 0"),
    ],
)
def test_a_cap_that_is_refused(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(guards.CaptureRefused, match=reason):
        budget.plan({"SGLANG_HS_DUMP_WAIT_SECONDS": "5", **environment}, LAYOUT, 16384, 1 << 30, "/d")


@pytest.mark.parametrize(
    ("arguments", "tokens"),
    [
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 8192}, 8192),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 8192}, 8192),
        ({"chunked_prefill_size": 2048, "max_prefill_tokens": 8192}, 2048),
        ({}, 16384),
    ],
)
def test_tokens_of_a_full_prefill_batch(arguments: dict[str, int], tokens: int) -> None:
    assert budget.prefill_tokens(arguments.get) == tokens
