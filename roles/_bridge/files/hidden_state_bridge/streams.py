# SPDX-License-Identifier: Apache-2.0
"""Files of lines, plain or compressed, as blocks of whole lines in bounded memory."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from .errors import Refusal
from .sources import BadFile

BLOCK_BYTES = 4 << 20
# A compressed piece may unfold to some thousand times its size.
COMPRESSED_BYTES = 1 << 14
MAX_LINE_BYTES = 64 << 20
NEWLINE = ord("\n")


def missing_package(name: str, purpose: str) -> Refusal:
    """The refusal where an optional package is not installed."""
    return Refusal(
        f"{purpose} needs the Python package {name}, which this interpreter lacks; install it there (pip install {name}),"
        " pack on a machine that has it (dataset_stage_pack_host, dataset_stage_pack_python), or give the source as JSONL"
    )


def _pieces(stream: BinaryIO, size: int, digest: hashlib._Hash) -> Iterator[bytes]:
    for piece in iter(lambda: stream.read(size), b""):
        digest.update(piece)
        yield piece


def _inflate(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Gzip, of one member or several, perhaps with zeros after the last."""
    unpacker = zlib.decompressobj(wbits=31)
    begun = False
    for piece in pieces:
        while piece:
            if unpacker.eof:
                piece = piece.lstrip(b"\0")
                if not piece:
                    break
                unpacker = zlib.decompressobj(wbits=31)
            begun = True
            try:
                yield unpacker.decompress(piece, BLOCK_BYTES)
                while unpacker.unconsumed_tail:
                    yield unpacker.decompress(unpacker.unconsumed_tail, BLOCK_BYTES)
            except zlib.error as error:
                raise BadFile(f"damaged gzip data ({error}); fetch the file again") from None
            piece = unpacker.unused_data
    if not (begun and unpacker.eof):
        raise BadFile("the gzip file ends in the middle; fetch it again")


def _unzstd(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Zstandard, of one frame or several."""
    try:
        import zstandard
    except ImportError:
        raise missing_package("zstandard", "a .zst source") from None
    maker = zstandard.ZstdDecompressor()
    unpacker: Any = None
    for piece in pieces:
        while piece:
            if unpacker is None or unpacker.eof:
                unpacker = maker.decompressobj()
            try:
                yield unpacker.decompress(piece)
            except zstandard.ZstdError as error:
                raise BadFile(f"damaged zstd data ({error}); fetch the file again") from None
            piece = unpacker.unused_data
    if unpacker is None or not unpacker.eof:
        raise BadFile("the zstd file ends in the middle; fetch it again")


_UNPACK: dict[str, Callable[[Iterator[bytes]], Iterator[bytes]]] = {"gzip": _inflate, "zstd": _unzstd}


@dataclass(frozen=True)
class Span:
    """A stretch of a plain file: whoever parses it reads it, so that its bytes need not travel between processes."""

    path: str
    start: int
    size: int

    def read(self) -> bytes:
        """The bytes. Raises OSError."""
        with open(self.path, "rb", buffering=0) as stream:
            stream.seek(self.start)
            return stream.read(self.size)


def line_blocks(path: str, kind: str, digest: hashlib._Hash) -> Iterator[tuple[int, bytes | Span]]:
    """Whole lines as (number of the first line, bytes or where they are); `digest` takes in the file's bytes.

    A line of more than MAX_LINE_BYTES comes as its first part alone, so no more of it is ever held. Raises OSError, and
    BadFile for a compressed file that is damaged, after all lines that are whole, and for one that changes meanwhile.
    """
    with open(path, "rb", buffering=0) as stream:
        before = os.fstat(stream.fileno())
        if kind in _UNPACK:
            yield from _lines(_UNPACK[kind](_pieces(stream, COMPRESSED_BYTES, digest)))
        else:
            yield from _spans(path, _pieces(stream, BLOCK_BYTES, digest))
        after = os.fstat(stream.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise BadFile("it changed while it was read; wait until it is complete")


def _spans(path: str, pieces: Iterator[bytes]) -> Iterator[tuple[int, Span]]:
    start, position, number, passing = 0, 0, 1, False
    for piece in pieces:
        begin = 0
        if passing:
            begin = piece.find(b"\n") + 1
            if begin:
                start, passing, number = position + begin, False, number + 1
        if not passing:
            end = piece.rfind(b"\n", begin) + 1
            if end:
                yield number, Span(path, start, position + end - start)
                # Several times faster than bytes.count, and this runs in the one process that all others wait for.
                number += int(np.count_nonzero(np.frombuffer(piece, dtype=np.uint8, count=end - begin, offset=begin) == NEWLINE))
                start = position + end
            elif position + len(piece) - start > MAX_LINE_BYTES:
                yield number, Span(path, start, MAX_LINE_BYTES + 1)
                passing = True
        position += len(piece)
    if position > start and not passing:
        yield number, Span(path, start, position - start)


def _lines(pieces: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    held: list[bytes] = []
    size, number, passing = 0, 1, False
    failed: BadFile | None = None
    while True:
        try:
            piece = next(pieces, None)
        except BadFile as error:
            failed = error
            break
        if piece is None:
            break
        if passing:
            end = piece.find(b"\n") + 1
            if not end:
                continue
            piece, passing, number = piece[end:], False, number + 1
        held.append(piece)
        size += len(piece)
        if size < BLOCK_BYTES:
            continue
        data = b"".join(held)
        end = data.rfind(b"\n") + 1
        if end:
            yield number, data[:end]
            number += data.count(b"\n", 0, end)
            held, size = [data[end:]], len(data) - end
        elif size > MAX_LINE_BYTES:
            yield number, data
            held, size, passing = [], 0, True
        else:
            held = [data]
    data = b"".join(held)
    if failed is not None:
        # What follows the last whole line is cut off with the file.
        data = data[: data.rfind(b"\n") + 1]
    if data:
        yield number, data
    if failed is not None:
        failed.line = number + data.count(b"\n")
        raise failed
