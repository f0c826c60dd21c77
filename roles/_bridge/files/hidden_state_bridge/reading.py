# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a source and has their records parsed by all cores, in order and in bounded memory."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from .columns import parse_batch, row_batches
from .conversations import Encoder
from .errors import Refusal
from .hashes import file_hash
from .records import Encode, Parsed, parse_lines
from .sources import BadFile, Reject, Settings, SourceFile
from .spool import SpoolWriter, spool
from .streams import Span, line_blocks

COLUMNAR = ("parquet", "arrow")
# Blocks under way for each worker: one at work, one waiting.
AHEAD = 2

_encoders: dict[tuple[str | None, bool], Encoder] = {}


def _encoder(settings: Settings) -> Encode:
    """One encoder a process, whatever field names the sources have."""
    key = (settings.tokenizer, settings.trust_remote_code)
    if key not in _encoders:
        _encoders[key] = Encoder(*key)
    return _encoders[key]


def _parse(kind: str, block: bytes | Span, first: int, settings: Settings, spools: str | None) -> Parsed:
    data = block.read() if isinstance(block, Span) else block
    parsed = (parse_batch if kind in COLUMNAR else parse_lines)(data, first, settings, _encoder(settings))
    if spools is not None:
        return spool(parsed, spools)
    parsed.ids, parsed.masks = [], []
    return parsed


class Reader:
    """Parses files with one process a core; small files in this process alone. Use it as a context manager.

    Tokens and masks go to spool files below `spools`, or nowhere without it.
    """

    def __init__(self, workers: int | None = None, spools: str | None = None) -> None:
        self._workers = workers or _cores()
        self._spools = spools
        self._pool: ProcessPoolExecutor | None = None
        self.sha256 = ""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        if self._spools is not None:
            SpoolWriter.close(self._spools)

    def read(self, file: SourceFile) -> Iterator[Parsed | Reject]:
        """The records of a file in order. What is wrong with the file itself ends it with a Reject.

        Afterwards `sha256` is the hash of the file. Raises Refusal where no other file could help.
        """
        digest = hashlib.sha256()
        blocks = row_batches(file) if file.kind in COLUMNAR else line_blocks(file.path, file.kind, digest)
        failed: BadFile | OSError | None = None
        waiting: deque[Future[Parsed]] = deque()
        try:
            held = next(blocks, None)
            while held is not None:
                first, block = held
                try:
                    held = next(blocks, None)
                except (BadFile, OSError) as error:
                    held, failed = None, error
                if held is None and not waiting:
                    yield _parse(file.kind, block, first, file.source.settings, self._spools)
                    break
                waiting.append(self._submit(file.kind, block, first, file.source.settings))
                if len(waiting) > AHEAD * self._workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except (BadFile, OSError) as error:
            failed = error
        except BrokenProcessPool:
            raise Refusal(f"a process that parsed {file.path} died, perhaps for lack of memory; pack on a machine with more") from None
        if failed is not None:
            yield Reject(file, getattr(failed, "line", 0), _reason(failed))
        # Columns are not read from end to end, and a damaged file only to where it breaks off.
        self.sha256 = _hash(file) if failed is not None or file.kind in COLUMNAR else digest.hexdigest()

    def _submit(self, kind: str, block: bytes | Span, first: int, settings: Settings) -> Future[Parsed]:
        if self._workers == 1:
            future: Future[Parsed] = Future()
            future.set_result(_parse(kind, block, first, settings, self._spools))
            return future
        if self._pool is None:
            # Forked: a zip application cannot be imported again by a process that is started afresh.
            self._pool = ProcessPoolExecutor(self._workers, mp_context=multiprocessing.get_context("fork"))
        return self._pool.submit(_parse, kind, block, first, settings, self._spools)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _reason(error: BadFile | OSError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read: {os.strerror(error.errno) if error.errno else error}; give a readable file"
    return str(error)


def _hash(file: SourceFile) -> str:
    try:
        return file_hash(file.path)
    except OSError:
        return ""
