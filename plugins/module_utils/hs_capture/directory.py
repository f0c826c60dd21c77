# SPDX-License-Identifier: Apache-2.0
"""The dump directory: private, never a link, and held by a descriptor so that no rename can steer a write."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import stat
import threading

from .dumpfile import is_dump, is_spare, temporary_name, temporary_pid
from .guards import CaptureRefused, NotCapturable

logger = logging.getLogger(__name__)

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(path: str) -> int:
    """Make `path` (mode 0700) or check that it is a private directory of this user; returns its descriptor.

    Raises CaptureRefused for a link, another's directory, one open to others, or one that cannot be written.
    """
    try:
        if not os.path.lexists(path):
            os.makedirs(os.path.dirname(path.rstrip("/")), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        # With a slash at its end the name of a link would be followed.
        descriptor = os.open(path.rstrip("/") or "/", _OPEN)
    except OSError as error:
        if os.path.lexists(path) and error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise CaptureRefused(
                f"the dump directory {path} is a link or a file",
                "let SGLANG_HS_DUMP_DIR name a directory",
            ) from error
        raise CaptureRefused(
            f"the dump directory {path} cannot be made or opened ({error.strerror})",
            "let SGLANG_HS_DUMP_DIR name a directory that the server's user may make",
        ) from error
    try:
        _check(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: str, found: os.stat_result) -> None:
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


class Handle:
    """A descriptor of the directory; closed when the last thread that uses it lets go."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        found = os.fstat(descriptor)
        self.identity = (found.st_dev, found.st_ino)

    def __del__(self) -> None:
        os.close(self.descriptor)


class DumpDirectory:
    """The directory under `path`. Thread-safe. Raises CaptureRefused as `open_directory` does.

    `owner`: the process that dumps, which removes what an earlier one left there;
    other ranks open the directory while it writes.
    """

    def __init__(self, path: str, owner: bool = True) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._serials = itertools.count()
        # A pid is unique in its namespace only, and ranks in several containers may share the directory.
        self._token = secrets.token_hex(8)
        self._handle = Handle(open_directory(path))
        for name in os.listdir(self._handle.descriptor) if owner else ():
            pid = temporary_pid(name)
            if is_spare(name) or (pid is not None and not _writes(pid)):
                self.remove(name, self._handle)

    def handle(self) -> Handle:
        """The directory that lies under the path.

        After it was removed, moved or replaced, the one there is opened (or
        made) with all checks, and NotCapturable raised once: what waited in the
        old one is gone. Raises CaptureRefused while there is none that can be used.
        """
        with self._lock:
            if self._is_there():
                return self._handle
            self._handle = Handle(open_directory(self.path))
        logger.error("the dump directory %s was removed or replaced; dumps that waited there are lost", self.path)
        raise self.gone()

    def gone(self) -> NotCapturable:
        """The error of what lay, or was being written, in a directory that does not lie under the path any more."""
        return NotCapturable(
            f"the dump directory {self.path} was removed or replaced while the server ran",
            "leave it alone while the server runs",
        )

    def current(self) -> Handle | None:
        """The directory that was opened, None where it does not lie under the path any more."""
        with self._lock:
            return self._handle if self._is_there() else None

    def _is_there(self) -> bool:
        try:
            found = os.lstat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._handle.identity

    def waiting(self, handle: Handle) -> list[tuple[int, str]]:
        """Bytes and name of each dump that lies there, files given back included."""
        found = []
        with os.scandir(handle.descriptor) as entries:
            for entry in entries:
                if is_spare(entry.name) or is_dump(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_size, entry.name))
        return found

    def usable_bytes(self) -> int:
        """Bytes that dumps may take: what the file system has left for this user, and what dumps hold already."""
        found = os.fstatvfs(self._handle.descriptor)
        return found.f_bavail * found.f_frsize + sum(size for size, _name in self.waiting(self._handle))

    def put(self, name: str, content: bytes, handle: Handle) -> None:
        """Write a small file (mode 0600) by rename. Raises OSError."""
        temporary = self.temporary()
        descriptor = self.make(temporary, handle)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(content)
            os.replace(temporary, name, src_dir_fd=handle.descriptor, dst_dir_fd=handle.descriptor)
        except BaseException:
            self.remove(temporary, handle)
            raise

    def temporary(self) -> str:
        """A name for a file under way that no other thread or process uses."""
        return temporary_name(f"{self._token}-{next(self._serials)}")

    def make(self, name: str, handle: Handle) -> int:
        """Descriptor of an empty file (mode 0600) that was not there before."""
        return os.open(name, _MAKE, 0o600, dir_fd=handle.descriptor)

    def remove(self, name: str, handle: Handle) -> None:
        """Remove a file; one that is gone, or cannot be removed, is left to the next start."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=handle.descriptor)


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
