# SPDX-License-Identifier: Apache-2.0
"""Tokens and masks between the two passes of packing: each process appends what it parsed to two files of its own.

`PID.ids` int32 [tokens] and `PID.mask` uint8 [tokens] in one directory; a record lies at the same place in both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from .errors import Refusal
from .records import Parsed

# Kind of a spool file: bytes a token.
KINDS = {"ids": 4, "mask": 1}
# Written to the packed set at once.
BATCH_BYTES = 4 << 20


class SpoolWriter:
    """The spool files of this process below a directory."""

    _of_process: dict[tuple[str, int], SpoolWriter] = {}

    def __init__(self, directory: str) -> None:
        self._directory, self._pid, self._tokens = directory, os.getpid(), 0
        self._streams = [open(os.path.join(directory, f"{self._pid}.{kind}"), "xb") for kind in KINDS]

    @classmethod
    def here(cls, directory: str) -> SpoolWriter:
        """The writer of this very process: a forked one inherits its parent's, which it must not use."""
        key = (directory, os.getpid())
        if key not in cls._of_process:
            cls._of_process[key] = cls(directory)
        return cls._of_process[key]

    @classmethod
    def close(cls, directory: str) -> None:
        """Close this process's files, if it has any there."""
        writer = cls._of_process.pop((directory, os.getpid()), None)
        for stream in writer._streams if writer else ():
            stream.close()

    def add(self, parsed: Parsed) -> None:
        """Append the records and note in `parsed` where they lie instead. Raises OSError."""
        for stream, pieces in zip(self._streams, (parsed.ids, parsed.masks)):
            stream.write(b"".join(pieces))
            stream.flush()
        parsed.spool, parsed.start = self._pid, self._tokens
        self._tokens += sum(parsed.lengths)
        parsed.ids, parsed.masks = [], []


def spool(parsed: Parsed, directory: str) -> Parsed:
    """Append what was parsed to this process's files. Raises Refusal where they cannot be written."""
    try:
        SpoolWriter.here(directory).add(parsed)
    except OSError as error:
        raise Refusal(f"packing in {directory} failed: {error}; see to its free space and permissions") from None
    return parsed


def read_spools(directory: str, kind: str, places: Iterable[tuple[int, int, int]]) -> Iterator[bytes]:
    """The values of one kind of the records at `places` (spool, start, tokens), joined to some MiB at a time. Raises OSError."""
    width = KINDS[kind]
    handles: dict[int, int] = {}
    held: list[bytes] = []
    size = 0
    with contextlib.ExitStack() as stack:
        for number, start, tokens in places:
            if number not in handles:
                handles[number] = stack.enter_context(open(os.path.join(directory, f"{number}.{kind}"), "rb")).fileno()
            data = os.pread(handles[number], tokens * width, start * width)
            if len(data) != tokens * width:
                raise OSError(f"spool file {number}.{kind} ended after {len(data)} of {tokens * width} bytes")
            held.append(data)
            size += len(data)
            if size >= BATCH_BYTES:
                yield b"".join(held)
                held, size = [], 0
        yield b"".join(held)
