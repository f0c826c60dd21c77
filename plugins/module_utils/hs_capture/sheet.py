# SPDX-License-Identifier: Apache-2.0
"""The rows of one forward that are dumped, in host memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .budget import Layout
from .dumpfile import ID_BYTES, INPUT_IDS
from .guards import NotCapturable

if TYPE_CHECKING:
    import torch

    from .fingerprints import FingerprintSheet
    from .ring import Block


@dataclass(frozen=True)
class Piece:
    """The rows [first, last) of a forward: tokens of `rid` from offset `start`."""

    rid: str
    start: int
    first: int
    last: int

    @property
    def tokens(self) -> int:
        """Rows of the piece."""
        return self.last - self.first


class Sheet:
    """A block of the ring that takes token ids and states of `pieces`, which are in the order of the forward.

    In it each tensor holds the rows of all pieces one after another: a state
    takes one copy for each run of pieces that are neighbours in the forward.
    """

    def __init__(self, block: Block, copier: Any, layout: Layout, pieces: list[Piece]) -> None:
        self.block = block
        self.pieces = pieces
        self.taken: set[str] = set()
        # Of those pieces that ask for fingerprints.
        self.fingerprints: FingerprintSheet | None = None
        self._copier = copier
        self._layout = layout
        self._mark: Any = None
        self._sealed = False
        self._lock = threading.Lock()
        self._left = len(pieces)
        self._places: dict[Piece, int] = {}
        self._runs: list[list[int]] = []
        rows = 0
        for piece in pieces:
            self._places[piece] = rows
            if self._runs and self._runs[-1][1] == piece.first:
                self._runs[-1][1] = piece.last
            else:
                self._runs.append([piece.first, piece.last, rows])
            rows += piece.tokens
        self._rows = rows

    def _offset(self, name: str) -> int:
        """Where the tensor `name` begins in the ring."""
        return self.block.offset + self._layout.place(name, self._rows)

    def copy_ids(self, input_ids: torch.Tensor) -> None:
        """Copy the token ids [rows of the forward] of all pieces, as int64."""
        import torch

        offset = self._offset(INPUT_IDS)
        self._copy(input_ids, self._copier.host[offset : offset + self._rows * ID_BYTES].view(torch.int64))

    def copy(self, name: str, state: torch.Tensor) -> None:
        """Copy the rows of all pieces of the state `name` [rows of the forward, width].

        The source may be overwritten afterwards in the same stream. Raises
        NotCapturable for a state that came before or is of another dtype.
        """
        if name in self.taken:
            raise NotCapturable(f"{name} came twice", "run the patcher again")
        dtype = str(state.dtype).partition(".")[2]
        if dtype != self._layout.dtype:
            raise NotCapturable(f"{name} is {dtype}, the model {self._layout.dtype}", "leave this layer out of SGLANG_HS_DUMP_LAYERS")
        self.taken.add(name)
        offset = self._offset(name)
        target = self._copier.host[offset : offset + self._rows * self._layout.state_bytes]
        self._copy(state.detach(), target.view(state.dtype).view(self._rows, self._layout.width))
        if self.fingerprints is not None:
            self.fingerprints.copy(name, state)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self._sealed:
            raise RuntimeError("the forward was given up")
        for first, last, place in self._runs:
            self._copier.copy(target[place : place + last - first], source[first:last])

    def seal(self) -> None:
        """No copy follows."""
        self._sealed = True
        self._mark = self._copier.mark()

    def wait(self) -> None:
        """Return when all copies have ended; after `seal`."""
        self._copier.wait(self._mark)

    def parts(self, piece: Piece, memory: memoryview) -> list[memoryview]:
        """The data of a piece's dump in the ring's `memory`: token ids, then the states in order."""
        place = self._places[piece]
        parts = []
        for name in (INPUT_IDS, *self._layout.names):
            size = ID_BYTES if name == INPUT_IDS else self._layout.state_bytes
            first = self._offset(name) + place * size
            parts.append(memory[first : first + piece.tokens * size])
        return parts

    def finished(self) -> bool:
        """Count one piece as done with; True for the last."""
        with self._lock:
            self._left -= 1
            return self._left == 0
