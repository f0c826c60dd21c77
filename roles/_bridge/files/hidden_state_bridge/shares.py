# SPDX-License-Identifier: Apache-2.0
"""The ledger: which host had done and was given which records, kept on the controller from plan to plan.

A host that does not answer may still be at work on its share. Only the ledger knows that share, and what it did before, then.
"""

from __future__ import annotations

import fcntl
import os
from typing import Any

import hs_manifest

from .errors import Refusal

FORMAT = "hidden_state_bridge.shares/1"


class Ledger:
    """The ledger of one run, locked while it is open. Use as a context manager.

    shares: ranges of records by host, {} for a run that was never planned. Raises Refusal where the file is not ours.
    """

    def __init__(self, path: str, run: str) -> None:
        self._path, self._run = path, run
        self.shares: dict[str, str] = {}

    def __enter__(self) -> Ledger:
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise Refusal(f"{self._path}: {error.strerror}; set extraction_report_dir to a directory that you can write") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self.shares = self._read()
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def _read(self) -> dict[str, str]:
        remedy = "see that no host of the run is at work, then remove the file"
        try:
            known: dict[str, Any] = hs_manifest.read_json(self._path) or {}
        except hs_manifest.ManifestError as error:
            raise Refusal(f"{error}; {remedy}") from error
        if not known:
            return {}
        found = known.get("shares")
        if known.get("format") != FORMAT or not isinstance(found, dict) or not all(isinstance(share, str) for share in found.values()):
            raise Refusal(f"{self._path} holds no shares of an extraction; {remedy}")
        # A run of its own has its file; another identity under that name is a file that was copied.
        if known.get("run") != self._run:
            raise Refusal(f"{self._path} is of run {known.get('run')}, not {self._run}; {remedy}")
        return found

    def write(self, shares: dict[str, str]) -> None:
        """Replace all shares, durably. Raises Refusal."""
        self.shares = shares
        try:
            hs_manifest.write_json(self._path, {"format": FORMAT, "run": self._run, "shares": shares})
        except OSError as error:
            raise Refusal(f"{self._path} cannot be written: {error.strerror}; make room there and start again") from error

    def move(self, ranges: str, host: str, givers: list[str]) -> None:
        """Take the records in `ranges` away from the givers and add them to the host's. Raises Refusal."""
        moved = _numbers(ranges)
        shares = {
            name: hs_manifest.encode_ranges(_numbers(given) - moved) if name in givers else given for name, given in self.shares.items()
        }
        shares[host] = join(shares.get(host, ""), ranges)
        self.write(shares)


def join(one: str, other: str) -> str:
    """The ranges of the records in either."""
    return hs_manifest.encode_ranges(_numbers(one) | _numbers(other))


def _numbers(ranges: str) -> set[int]:
    return {number for first, last in hs_manifest.decode_ranges(ranges) for number in range(first, last + 1)}
