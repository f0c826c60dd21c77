# SPDX-License-Identifier: Apache-2.0
"""Host memory in which states lie between the model and the dump files: a ring of fixed size."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque

_ALIGNMENT = 4096


class RingFull(Exception):
    """The ring had no room for a block. `ever`: whether it can have it at all; `waited`: seconds."""

    def __init__(self, message: str, ever: bool, waited: float = 0.0) -> None:
        super().__init__(message)
        self.ever = ever
        self.waited = waited


class Block:
    """Bytes [offset, offset + size) of the ring."""

    def __init__(self, offset: int, size: int) -> None:
        self.offset = offset
        self.size = size
        self.free = False


class Ring:
    """`size` bytes, given out in blocks in turn; a block may come back at any time.

    Pages are touched when they are first used, or pinned. Thread-safe.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self.memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self.memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without huge pages
        self._blocks: deque[Block] = deque()
        self._next = 0
        self._freed = threading.Condition()
        self._stalled = False

    def used(self) -> int:
        """Bytes from the oldest block to the newest, what lies between included."""
        with self._freed:
            if not self._blocks:
                return 0
            first = self._blocks[0].offset
            return self._next - first if self._next > first else self.size - first + self._next

    def take(self, size: int, seconds: float) -> tuple[Block, float]:
        """Take a block of `size` bytes, waiting up to `seconds`; returns it and the seconds waited for one that
        was given back, 0 where there was room at once.

        Once a wait was in vain, the next ones are not made until a block comes
        back: a disk that hangs costs the server one wait. Raises RingFull.
        """
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        if size > self.size:
            raise RingFull(f"{size} bytes are more than the whole ring of {self.size}", ever=False)
        with self._freed:
            offset, began, waited = self._room(size), time.monotonic(), 0.0
            while offset is None:
                if self._stalled or waited >= seconds:
                    self._stalled = True
                    raise RingFull(f"no room for {size} bytes came within {seconds:g} s", ever=True, waited=waited)
                self._freed.wait(seconds - waited)
                waited = time.monotonic() - began
                offset = self._room(size)
            block = Block(offset, size)
            self._blocks.append(block)
            self._next = offset + size
        return block, waited

    def give(self, block: Block) -> None:
        """Give a block back."""
        with self._freed:
            block.free = True
            while self._blocks and self._blocks[0].free:
                self._blocks.popleft()
            self._stalled = False
            self._freed.notify_all()

    def _room(self, size: int) -> int | None:
        """Where a block of `size` bytes fits; a block never wraps around the end."""
        if not self._blocks:
            return 0
        first = self._blocks[0].offset
        if self._next > first:
            if self.size - self._next >= size:
                return self._next
            return 0 if first >= size else None
        return self._next if first - self._next >= size else None
