# SPDX-License-Identifier: GPL-3.0-or-later
"""The naive dump that the bench holds the capture against: copies in the loop, a file in the forward.

It takes the place of the capture runtime's writer: what the forward calls is the same.
"""

from __future__ import annotations

import logging
import os
from typing import Any

logger = logging.getLogger(__name__)


def open_writer(settings: Any, metadata: Any, width: int, read: Any) -> Writer:
    """As the runtime's ``open_writer``."""
    os.makedirs(settings.directory, mode=0o700, exist_ok=True)
    return Writer(settings.directory)


class Sheet:
    """Rows of one forward, copied as they come."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces = pieces
        self.taken: dict[str, list[Any]] = {}

    def copy_ids(self, input_ids: Any) -> None:
        """Copy the token ids."""
        self.taken["input_ids"] = self._rows(input_ids)

    def copy(self, name: str, state: Any) -> None:
        """Copy a state."""
        self.taken[name] = self._rows(state)

    def _rows(self, tensor: Any) -> list[Any]:
        return [tensor[piece.first : piece.last].cpu() for piece in self.pieces]


class Writer:
    """Saves each request's tensors before the forward goes on."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def reserve(self, pieces: list[Any]) -> Sheet:
        """A sheet for the pieces."""
        return Sheet(pieces)

    def submit(self, sheet: Sheet) -> None:
        """Save all pieces."""
        import torch

        for index, piece in enumerate(sheet.pieces):
            path = os.path.join(self._directory, f"{piece.rid}.{piece.start}")
            torch.save({name: rows[index] for name, rows in sheet.taken.items()}, path + ".tmp")
            os.rename(path + ".tmp", path + ".pt")

    def drop(self, sheet: Sheet, error: Exception) -> None:
        """Give up all pieces of a sheet."""
        for piece in sheet.pieces:
            self.fail(piece.rid, error)

    def fail(self, rid: str, error: Exception) -> None:
        """Say that a request is not dumped."""
        logger.error("%s is not dumped: %s", rid, error)
