# Copyright (c) hidden_state.bridge contributors
# Apache License 2.0 (see LICENSES/Apache-2.0.txt or https://www.apache.org/licenses/LICENSE-2.0)
# SPDX-License-Identifier: Apache-2.0
"""Hashes of files block by block, so that a copy can be checked, resumed and mended a block at a time.

A file is described by ``{"bytes": size, "blocks": [SHA-256 in hex, ...]}``; the last block may be shorter, and an empty
file has none. It needs nothing but the standard library, so it runs under any Python 3.9+ of a host.
"""

from __future__ import annotations

import hashlib
import os

READ_BYTES = 1 << 20


class BlockHashes:
    """Takes in a file's bytes from start to end."""

    def __init__(self, block_bytes):
        self._block_bytes = block_bytes
        self._digest = hashlib.sha256()
        self._size = 0
        self._blocks = []

    def update(self, data):
        """Take in more bytes: bytes, or a view of bytes."""
        view = memoryview(data)
        while len(view):
            room = self._block_bytes - self._size % self._block_bytes
            self._digest.update(view[:room])
            self._size += len(view[:room])
            view = view[room:]
            if self._size % self._block_bytes == 0:
                self._blocks.append(self._digest.hexdigest())
                self._digest = hashlib.sha256()

    def close(self):
        """The description of the file."""
        if self._size % self._block_bytes:
            self._blocks.append(self._digest.hexdigest())
        return {"bytes": self._size, "blocks": self._blocks}


def block_size(expected, number, block_bytes):
    """Bytes of that block of a file of that description."""
    return min(block_bytes, expected["bytes"] - number * block_bytes)


def read_block(stream, number, size, block_bytes):
    """Yield the bytes of one block in pieces; fewer than `size` where the file ends before."""
    stream.seek(number * block_bytes)
    while size:
        piece = stream.read(min(size, READ_BYTES))
        if not piece:
            return
        size -= len(piece)
        yield piece


def wrong_blocks(path, expected, block_bytes):
    """Numbers of the blocks that a file lacks or that differ: all of them where there is no file. Raises OSError.

    A file that is longer than described has its last block counted as wrong.
    """
    count = len(expected["blocks"])
    try:
        stream = open(path, "rb")
    except FileNotFoundError:
        return list(range(count))
    with stream:
        size = os.fstat(stream.fileno()).st_size
        wrong = []
        for number, known in enumerate(expected["blocks"]):
            digest = hashlib.sha256()
            if number * block_bytes < size:
                for piece in read_block(stream, number, block_size(expected, number, block_bytes), block_bytes):
                    digest.update(piece)
            if digest.hexdigest() != known:
                wrong.append(number)
    if size > expected["bytes"] and count and count - 1 not in wrong:
        wrong.append(count - 1)
    return wrong


def missing(directory, files, block_bytes):
    """{name: numbers of wrong blocks} of the described files that are not whole in a directory.

    Raises OSError, and ValueError for a name that leads out of the directory.
    """
    found = {}
    for name, expected in sorted(files.items()):
        if not name or name != os.path.basename(name) or name in (".", ".."):
            raise ValueError("%r is no name of a file of the set" % name)
        path = os.path.join(directory, name)
        wrong = wrong_blocks(path, expected, block_bytes)
        if wrong:
            found[name] = wrong
    return found


def pieces_of(directory, blocks, files, block_bytes):
    """Yield the blocks {name of file: numbers}, one after the other by name, in pieces. Raises OSError."""
    for name, numbers in sorted(blocks.items()):
        with open(os.path.join(directory, name), "rb") as stream:
            for number in numbers:
                yield from read_block(stream, number, block_size(files[name], number, block_bytes), block_bytes)


def write_blocks(path, numbers, source, expected, block_bytes):
    """Write those blocks of a file from the stream `source`, where they follow one another, and make them durable.

    Each block is compared with its description before it is written: raises ValueError for one that differs, after those
    before it are written. The file is given its size, and mode 0600 where it is made. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    handle = os.open(path, flags, 0o600)
    try:
        if os.fstat(handle).st_size != expected["bytes"]:
            os.ftruncate(handle, expected["bytes"])
        for number in numbers:
            data = source.read(block_size(expected, number, block_bytes))
            if hashlib.sha256(data).hexdigest() != expected["blocks"][number]:
                raise ValueError("block %d of %s arrived damaged" % (number, os.path.basename(path)))
            view, place = memoryview(data), number * block_bytes
            while len(view):
                done = os.pwrite(handle, view, place)
                view, place = view[done:], place + done
        os.fsync(handle)
    finally:
        os.close(handle)
