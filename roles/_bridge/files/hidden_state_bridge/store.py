# SPDX-License-Identifier: Apache-2.0
"""From dump to durable output file: what one worker thread does for one record."""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hs_manifest
from hs_capture import dumpfile

from . import dumps
from .errors import ConfigError
from .formats import FORMATS, file_name
from .packed import Record


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
    """Where and how records are written."""

    output_dir: str
    format: str
    layout: dumps.Layout
    access: Access


def make_directory(path: str, access: Access) -> None:
    """Make one directory with its mode and group; one that is there is kept. Raises OSError."""
    try:
        os.mkdir(path, access.directory_mode)
    except FileExistsError:
        return
    os.chmod(path, access.directory_mode)
    if access.gid >= 0:
        os.chown(path, -1, access.gid)
    hs_manifest.fsync_directory(os.path.dirname(path))


def store(target: Target, record: Record, rid: str, pieces: list[str]) -> dict[str, Any]:
    """Check the dump, write the record's file and make it durable; returns its manifest entry.

    The file appears under its name only when it is whole and on disk. Raises dumps.DumpRejected or OSError.
    """
    states = dumps.load(pieces, rid, record.input_ids, target.layout)
    name = file_name(target.format, record.index)
    path = os.path.join(target.output_dir, name)
    directory = os.path.dirname(path)
    make_directory(os.path.dirname(directory), target.access)
    make_directory(directory, target.access)
    temporary = os.path.join(directory, dumpfile.temporary_name(os.path.basename(path)))
    try:
        # Made first, so that states are never readable by others.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        digest = FORMATS[target.format].save(temporary, record, states)
        os.chmod(temporary, target.access.file_mode)
        if target.access.gid >= 0:
            os.chown(temporary, -1, target.access.gid)
        size = _fsync(temporary)
        os.rename(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    hs_manifest.fsync_directory(directory)
    return {
        "id": record.index,
        "source": record.source,
        "source_file": record.file,
        "line": record.line,
        "file": name,
        "bytes": size,
        "tokens": len(record.input_ids),
        "sha256": digest,
        "sglang_version": states.metadata.get("sglang_version", ""),
    }


def _fsync(path: str) -> int:
    """Make a file's content durable; returns its size in bytes."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
        return os.fstat(handle).st_size
    finally:
        os.close(handle)


def leftovers(output_dir: str) -> Iterator[str]:
    """Temporary files below the format directories, as a killed extractor leaves them."""
    for name in FORMATS:
        for directory, _directories, files in os.walk(os.path.join(output_dir, name)):
            for file in files:
                if dumpfile.temporary_pid(file) is not None:
                    yield os.path.join(directory, file)
