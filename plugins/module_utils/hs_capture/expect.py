# SPDX-License-Identifier: Apache-2.0
"""The expect list: whose tokens a prefill has, where SGLang's batches carry no rid (before 0.5.10).

Before a request is sent, its client lays ``<dump directory>/expect/<sha256>``
(0600, by rename), where the name is the hash of the token ids as little-endian
int64 and the content is the rid. A prefill of exactly these tokens takes the
entry off the list and is dumped under that rid.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING

from .directory import open_directory

if TYPE_CHECKING:
    import torch

DIRECTORY = "expect"


def entry_name(ids: bytes) -> str:
    """File name of the entry for token ids given as little-endian int64."""
    return hashlib.sha256(ids).hexdigest()


class ExpectList:
    """The server's side of the list in `directory` (the dump directory)."""

    def __init__(self, directory: str) -> None:
        self._dumps = directory
        self._directory = os.path.join(directory, DIRECTORY)
        self._make()

    def _make(self) -> None:
        descriptor = open_directory(self._dumps)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(DIRECTORY, 0o700, dir_fd=descriptor)
        finally:
            os.close(descriptor)

    def rids(self, input_ids: torch.Tensor, lengths: list[int]) -> list[str | None]:
        """The rid of each request of a prefill, None where it is not expected.

        `input_ids` [rows] int64 holds the requests one after the other. Raises CaptureRefused where the dump
        directory was replaced by one that cannot be used, and OSError.
        """
        try:
            waiting = os.listdir(self._directory)
        except FileNotFoundError:
            # The dump directory was removed. A client that finds no list announces nothing, so it is made again here.
            self._make()
            waiting = []
        if not waiting:
            return [None] * len(lengths)
        rows = input_ids.detach().cpu().long().contiguous().numpy().astype("<i8")
        rids = []
        first = 0
        for length in lengths:
            rids.append(self._take(entry_name(rows[first : first + length].tobytes())))
            first += length
        return rids

    def _take(self, name: str) -> str | None:
        path = os.path.join(self._directory, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            return None
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            rid = stream.read(256).strip()
        os.unlink(path)
        return rid
