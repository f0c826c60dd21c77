# SPDX-License-Identifier: Apache-2.0
"""From dump to durable output file: what one worker thread does for one record."""

from __future__ import annotations

import contextlib
import grp
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hs_manifest
from hs_capture import dumpfile

from . import dumps
from .errors import ConfigError
from .formats import FORMATS, file_name
from .formats.files import Stored
from .packed import Record

# Threads beyond which a host's rate hardly grows: with these 3 GB/s were reached (docs/performance.md).
MOST_WORKERS = 16


def default_workers() -> int:
    """Threads that store beside a server, which needs most of the CPUs itself."""
    return min(MOST_WORKERS, max(1, (os.cpu_count() or 1) // 4))


@dataclass(frozen=True)
class Access:
    """Modes and group of what is written; gid -1 leaves the group alone."""

    directory_mode: int = 0o700
    file_mode: int = 0o600
    gid: int = -1


def access_of(group: str | None) -> Access:
    """Only the owner, or the group as well: 0750 and 0640. Raises ConfigError for a group that is not there."""
    if group is None:
        return Access()
    try:
        return Access(0o750, 0o640, grp.getgrnam(group).gr_gid)
    except KeyError as error:
        raise ConfigError(f"group {group!r} does not exist on this host; make it or choose another") from error


@dataclass(frozen=True)
class Target:
    """Where and how records are written: a file of each format below output_dir."""

    output_dir: str
    formats: tuple[str, ...]
    layout: dumps.Layout
    access: Access


# Directories that this process has found or made right, with the access that it gave them.
_RIGHT: set[tuple[str, Access]] = set()


def make_directory(path: str, access: Access) -> None:
    """Make one directory with its mode and group; one that is there is kept, and put right once a process. Raises OSError."""
    try:
        os.mkdir(path, access.directory_mode)
    except FileExistsError:
        # Its maker may have been killed before it was all that.
        if (path, access) in _RIGHT:
            return
    found = os.stat(path)
    if stat.S_IMODE(found.st_mode) != access.directory_mode:
        os.chmod(path, access.directory_mode)
    if access.gid not in (-1, found.st_gid):
        os.chown(path, -1, access.gid)
    hs_manifest.fsync_directory(os.path.dirname(path))
    _RIGHT.add((path, access))


def store(target: Target, record: Record, rid: str, pieces: list[str]) -> dict[str, Any]:
    """Check the dump, write the record's files and make them durable; returns its manifest entry.

    Raises dumps.DumpRejected or OSError.
    """
    states = dumps.load(pieces, rid, record.input_ids, target.layout)
    files = save(target.output_dir, target.formats, target.access, record, states)
    return entry_of(record, files, states.metadata.get("sglang_version", ""))


def save(output_dir: str, formats: tuple[str, ...], access: Access, record: Record, states: dumps.States | Stored) -> list[dict[str, Any]]:
    """Write a record's file in each format; returns their `file`, `bytes` and `sha256`. Raises OSError.

    A file appears under its name only when it is whole and on disk.
    """
    return [_save_one(output_dir, name, access, record, states) for name in formats]


def _save_one(output_dir: str, format_name: str, access: Access, record: Record, states: dumps.States | Stored) -> dict[str, Any]:
    name = file_name(format_name, record.index)
    path = os.path.join(output_dir, name)
    make_directories(output_dir, os.path.dirname(name), access)
    with filling(path, access, replace=True) as temporary:
        digest = FORMATS[format_name].save(temporary, record, states)
        size = os.path.getsize(temporary)
    return {"file": name, "bytes": size, "sha256": digest}


def make_directories(output_dir: str, below: str, access: Access) -> None:
    """Make the directories of a path below the output directory. Raises OSError."""
    path = output_dir
    for part in below.split("/"):
        path = os.path.join(path, part)
        make_directory(path, access)


def temporary_of(path: str) -> str:
    """Where this process makes the file that is to come to `path`."""
    return os.path.join(os.path.dirname(path), dumpfile.temporary_name(os.path.basename(path)))


@contextlib.contextmanager
def filling(path: str, access: Access, replace: bool = False) -> Iterator[str]:
    """Gives the name of an empty temporary file beside `path`; it is durable, with its mode and group, once the block has filled it.

    With `replace` it is at `path` then, as durably. Where the block raises, the temporary file is removed. Raises OSError.
    """
    temporary = temporary_of(path)
    try:
        # Made first, so that states are never readable by others.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        yield temporary
        os.chmod(temporary, access.file_mode)
        if access.gid >= 0:
            os.chown(temporary, -1, access.gid)
        _fsync(temporary)
        if replace:
            os.rename(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    if replace:
        hs_manifest.fsync_directory(os.path.dirname(path))


def entry_of(record: Record, files: list[dict[str, Any]], sglang_version: str) -> dict[str, Any]:
    """The manifest entry of a record whose files are durable. `at`: when, in seconds since 1970."""
    about = {"id": record.index, "source": record.source, "source_file": record.file, "line": record.line, "at": int(time.time())}
    about.update(hs_manifest.named(files), tokens=len(record.input_ids), sglang_version=sglang_version)
    return about


def _fsync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def files_below(output_dir: str) -> Iterator[str]:
    """Files below the format directories, and temporary files beside the manifest, relative to the output directory."""
    yield from (name for name in os.listdir(output_dir) if dumpfile.temporary_pid(name) is not None)
    for name in FORMATS:
        for directory, _directories, files in os.walk(os.path.join(output_dir, name)):
            for file in files:
                yield os.path.relpath(os.path.join(directory, file), output_dir)


def leftovers(output_dir: str) -> Iterator[str]:
    """Paths of temporary files in an output directory, as a killed extractor leaves them."""
    for file in files_below(output_dir):
        if dumpfile.temporary_pid(os.path.basename(file)) is not None:
            yield os.path.join(output_dir, file)
