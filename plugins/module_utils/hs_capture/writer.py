# SPDX-License-Identifier: Apache-2.0
"""Puts finished pieces and error markers into the dump directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat

from .collector import Piece
from .dumpfile import temporary_pid, write_dump, write_error
from .guards import CaptureRefused, NotCapturable

logger = logging.getLogger(__name__)


def open_directory(path: str) -> None:
    """Make `path` (mode 0700) or check that it is a private directory of this user.

    Leftovers of writers that are gone are removed. Raises CaptureRefused for a
    link, another's directory, one open to others, or one that cannot be written.
    """
    try:
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path.rstrip("/")), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        found = os.lstat(path)
    except OSError as error:
        raise CaptureRefused(
            f"the dump directory {path} cannot be made ({error.strerror})",
            "let SGLANG_HS_DUMP_DIR name a directory that the server's user may make",
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise CaptureRefused(
            f"the dump directory {path} is a link or a file",
            "let SGLANG_HS_DUMP_DIR name a directory",
        )
    if found.st_uid != os.geteuid():
        raise CaptureRefused(
            f"the dump directory {path} belongs to uid {found.st_uid}, the server runs as uid {os.geteuid()}",
            "remove it or let SGLANG_HS_DUMP_DIR name another",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise CaptureRefused(
            f"the dump directory {path} is open to other users (mode {stat.S_IMODE(found.st_mode):04o})",
            f"run: chmod 700 {path}",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise CaptureRefused(f"the dump directory {path} is not writable", f"run: chmod 700 {path}")
    for name in os.listdir(path):
        pid = temporary_pid(name)
        if pid is not None and not _writes(pid):
            os.unlink(os.path.join(path, name))


class Writer:
    """Writes pieces as they come; a failure becomes an error marker and a log line."""

    def __init__(self, directory: str, metadata: dict[str, str]) -> None:
        self._directory = directory
        self._metadata = metadata

    def write(self, piece: Piece) -> None:
        """Write one piece whose tensors are all there."""
        try:
            write_dump(self._directory, piece.rid, piece.start, piece.tensors, self._metadata)
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            self.fail(
                piece.rid,
                NotCapturable(
                    f"the dump could not be written: {error}",
                    f"make room in {self._directory}" if full else "read the log of the server on this host",
                ),
            )

    def fail(self, rid: str, error: NotCapturable) -> None:
        """Leave an error marker for `rid`; never raises."""
        logger.error("hidden states of %s are not dumped: %s", rid, error)
        try:
            write_error(self._directory, rid, error.reason, error.remedy)
        except Exception:
            logger.exception("the error marker of %s could not be written", rid)


def _writes(pid: int) -> bool:
    """Whether another process `pid` is alive (this one has not begun to write)."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
