# SPDX-License-Identifier: Apache-2.0
"""A few numbers a row of each state, from every tensor parallel rank, for requests that ask for them.

Complete states agree across ranks, partial sums do not. No collective is made:
each rank writes a file of its own, and the canary compares them. A request asks
by a rid that begins with the prefix of all rids and ``fp-``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .directory import DumpDirectory
from .dumpfile import FINGERPRINT_VALUES, encode_fingerprint, fingerprint_name
from .guards import CaptureRefused, NotCapturable

if TYPE_CHECKING:
    import torch

    from .sheet import Piece

logger = logging.getLogger(__name__)

RID_SUFFIX = "fp-"
_SEED = 20177
# Rows at once, so that their float32 copy stays small.
_ROWS = 2048


class Signs:
    """The same random signs on every rank: a row's numbers are its products with them, by the root of the width."""

    def __init__(self) -> None:
        self._signs: torch.Tensor | None = None

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [t, FINGERPRINT_VALUES] of a state [t, width]."""
        import torch

        width = rows.shape[1]
        if self._signs is None:
            generator = torch.Generator("cpu").manual_seed(_SEED)
            drawn = torch.randint(0, 2, (width, FINGERPRINT_VALUES), generator=generator, device="cpu")
            self._signs = ((drawn * 2 - 1) / width**0.5).to(rows.device, torch.float32)
        parts = [rows[first : first + _ROWS].detach().float() @ self._signs for first in range(0, len(rows), _ROWS)]
        return torch.cat(parts)


class FingerprintSheet:
    """Fingerprints of the pieces of one forward; takes what a ``Sheet`` takes."""

    def __init__(self, pieces: list[Piece], signs: Signs) -> None:
        self.pieces = pieces
        self.taken: dict[str, list[torch.Tensor]] = {}
        self._signs = signs

    def copy_ids(self, input_ids: torch.Tensor) -> None:
        """Nothing: token ids are in the dump."""

    def copy(self, name: str, state: torch.Tensor) -> None:
        """Take the rows of all pieces of the state `name` [rows of the forward, width]."""
        if name in self.taken:
            raise NotCapturable(f"{name} came twice", "run the patcher again")
        self.taken[name] = [self._signs.project(state[piece.first : piece.last]) for piece in self.pieces]


class FingerprintWriter:
    """Stands where the capture's ``Writer`` does on ranks that dump nothing. It writes in the forward: for canaries alone."""

    def __init__(self, directory: str | DumpDirectory, rank: int) -> None:
        self._directory = directory
        self._rank = rank
        self._signs = Signs()
        self._open: FingerprintSheet | None = None

    def reserve(self, pieces: list[Piece]) -> FingerprintSheet:
        """A sheet for the pieces of a forward."""
        self._open = FingerprintSheet(pieces, self._signs)
        return self._open

    def submit(self, sheet: FingerprintSheet) -> None:
        """Write a file for each piece; a failure is logged, never raised: the canary misses the file."""
        self._open = None
        try:
            # Not before it is asked for: most ranks never write.
            if isinstance(self._directory, str):
                self._directory = DumpDirectory(self._directory, owner=False)
            for index, piece in enumerate(sheet.pieces):
                values = {name: rows[index].cpu().contiguous().numpy().tobytes() for name, rows in sheet.taken.items()}
                content = encode_fingerprint(piece.rid, piece.start, self._rank, piece.tokens, values)
                name = fingerprint_name(piece.rid, piece.start, self._rank)
                self._directory.put(name, content, self._directory.handle())
        except Exception:
            logger.exception("fingerprints of rank %d could not be written", self._rank)

    def drop(self, sheet: FingerprintSheet, error: NotCapturable | CaptureRefused) -> None:
        """Give up all pieces of a sheet, unless it was handed over already."""
        if sheet is not self._open:
            return
        self._open = None
        for piece in sheet.pieces:
            self.fail(piece.rid, error)

    def fail(self, rid: str, error: NotCapturable | CaptureRefused) -> None:
        """Log it: the error marker is rank 0's."""
        logger.error("rank %d has no fingerprints of %s: %s", self._rank, rid, error)
