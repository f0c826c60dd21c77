# SPDX-License-Identifier: Apache-2.0
"""First pass over one source: what is kept goes to spool files, what is learned stays as a few numbers a record."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import orjson

from .errors import Refusal
from .reading import Reader
from .records import KEY_BYTES, Parsed
from .sources import Reject, Source, SourceFile, copies, files_of
from .spool import KINDS

# Bytes spooled between two looks at the free space.
ROOM_EVERY_BYTES = 64 << 20


class Scan:
    """What the first pass learned of one source.

    An entry a kept record, in the order of files and lines: spools and starts (which spool files, and tokens before it
    there), lengths, lines, files (index into file_rows).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.file_rows: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(("short", "long", "untrained_dropped", "rejected"), 0)
        self.max_token_id = 0
        self._raw = {name: array("q") for name in ("lengths", "full_lengths", "trained", "lines", "files", "spools", "starts")}
        self.keys = bytearray()
        self.first_reject: Reject | None = None

    @property
    def read(self) -> int:
        """Good records so far, filtered ones included."""
        return len(self._raw["lengths"]) + sum(self.counts[name] for name in ("short", "long", "untrained_dropped"))

    def take(self, parsed: Parsed, file: int) -> None:
        """Add the records of one stretch of a file."""
        for name in ("lengths", "full_lengths", "trained", "lines"):
            self._raw[name] += getattr(parsed, name)
        for name, value in (("files", file), ("spools", parsed.spool)):
            self._raw[name] += array("q", [value]) * len(parsed.lengths)
        self._raw["starts"] += array("q", accumulate(parsed.lengths[:-1], initial=parsed.start) if parsed.lengths else ())
        for name in ("short", "long", "untrained_dropped"):
            self.counts[name] += getattr(parsed, name)
        self.keys += parsed.keys
        self.max_token_id = max(self.max_token_id, parsed.max_token_id)

    def close(self) -> list[tuple[int, int]]:
        """End the pass: records whose id an earlier one has are left out; returned as (record, earlier record)."""
        columns = {name: np.frombuffer(values, dtype=np.int64) if values else np.zeros(0, np.int64) for name, values in self._raw.items()}
        self.lengths, self._full, self._trained = columns["lengths"], columns["full_lengths"], columns["trained"]
        self.lines, self.files = columns["lines"], columns["files"]
        self.spools, self.starts = columns["spools"], columns["starts"]
        repeated = _repeated(self.keys)
        self.keys = bytearray()
        kept = np.ones(len(self.lengths), dtype=bool)
        kept[[record for record, _first in repeated]] = False
        self._copies = np.zeros(len(kept), dtype=np.int64)
        self._copies[kept] = copies(self.source, int(kept.sum()))
        self._good = int(kept.sum())
        return repeated

    def place(self, record: int) -> tuple[int, int]:
        """File and line of a record of this pass."""
        return int(self.files[record]), int(self.lines[record])

    def chosen(self) -> np.ndarray:
        """The records that are taken, each as often as it is."""
        return np.repeat(np.arange(len(self._copies)), self._copies)

    def summary(self) -> dict[str, Any]:
        """The source's entry in meta.json."""
        taken = self._copies
        not_chosen = self._good - int(np.count_nonzero(taken))
        counts = self.counts
        return {
            "name": self.source.name,
            "path": os.path.basename(os.path.normpath(self.source.path)),
            "files": self.file_rows,
            "weight": self.source.weight,
            "max_records": self.source.max_records,
            "records": int(taken.sum()),
            "tokens": int((taken * self.lengths).sum()),
            "trained_tokens": int((taken * self._trained).sum()),
            "longest": int(self.lengths[taken > 0].max(initial=0)),
            "cut": int(taken[self._full > self.lengths].sum()),
            "untrained": int(taken[self._trained == 0].sum()),
            "repeated": int(taken.sum()) - int(np.count_nonzero(taken)),
            "dropped": counts["short"] + counts["long"] + counts["untrained_dropped"] + not_chosen,
            "not_chosen": not_chosen,
            **counts,
        }


def _repeated(keys: bytearray) -> list[tuple[int, int]]:
    """(record, first record with the same key) for each record whose key came before; zeros are no key."""
    words = np.frombuffer(keys, dtype=np.uint64).reshape(-1, KEY_BYTES // 8) if keys else np.zeros((0, KEY_BYTES // 8), np.uint64)
    with_key = np.flatnonzero(words.any(axis=1))
    order = with_key[np.lexsort((with_key, words[with_key, 1], words[with_key, 0]))]
    found, first = [], -1
    same = np.flatnonzero((words[order[1:]] == words[order[:-1]]).all(axis=1)) + 1 if len(order) else []
    for place in map(int, same):
        if not found or found[-1][0] != order[place - 1]:
            first = int(order[place - 1])
        found.append((int(order[place]), first))
    return sorted(found)


def scan(
    source: Source,
    reader: Reader,
    rejects: BinaryIO | None = None,
    check_room: Callable[[], None] | None = None,
) -> Scan:
    """Read a source once. Skipped records go to `rejects`, where it is given.

    check_room is called now and then while the reader's spools grow. Raises Refusal: at the first bad record, unless bad ones are
    skipped; and for a source without a single good record among bad ones.
    """
    result = Scan(source)
    files = files_of(source)
    unchecked = 0

    def reject(item: Reject) -> None:
        if source.settings.on_bad == "fail":
            raise Refusal(str(item))
        result.counts["rejected"] += 1
        result.first_reject = result.first_reject or item
        if rejects is not None:
            rejects.write(orjson.dumps(item.as_row()) + b"\n")

    for number, file in enumerate(files):
        for part in reader.read(file):
            if isinstance(part, Reject):
                reject(part)
                continue
            for line, reason, text in part.rejects:
                reject(Reject(file, line, reason, text))
            result.take(part, number)
            unchecked += sum(part.lengths) * sum(KINDS.values())
            if check_room is not None and unchecked > ROOM_EVERY_BYTES:
                check_room()
                unchecked = 0
        result.file_rows.append({"path": file.name, "sha256": reader.sha256})
    for record, first in result.close():
        reject(_same_id(result, files, record, first))
    if result.first_reject is not None and not result.read:
        raise Refusal(f"{result.first_reject} (the source has no good record, so nothing of it can be skipped)")
    return result


def _same_id(result: Scan, files: list[SourceFile], record: int, first: int) -> Reject:
    file, line = result.place(record)
    first_file, first_line = result.place(first)
    name = result.source.settings.id_field
    return Reject(
        files[file],
        line,
        f"its {name} is that of {files[first_file].path}:{first_line}; take one out, or set id_field to another field, or to none",
    )
