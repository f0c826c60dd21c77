# SPDX-License-Identifier: Apache-2.0
"""Puts dumps into the directory, never more bytes than it may hold, and into files given back where there are some."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Sequence

from .budget import MAX_BYTES
from .counters import Counters
from .directory import DumpDirectory, Handle
from .dumpfile import is_spare, write_all
from .guards import NotCapturable

_SCAN_SECONDS = 0.02
_IDLE_SECONDS = 2.0
# Files given back hold memory that a burst of dumps left behind.
_SPARE_SHARE = 4


class Spool:
    """The dumps that wait in `directory`: `limit` bytes at most, files given back included. Thread-safe.

    Who writes waits for room up to `seconds`, then the request is given up;
    further ones at once, until there is room again.
    """

    def __init__(self, directory: DumpDirectory, limit: int, seconds: float, counters: Counters) -> None:
        self._directory = directory
        self.limit = limit
        self._seconds = seconds
        self._counters = counters
        self._lock = threading.Lock()
        self._waiting = self._under_way = 0
        # (bytes, name), ascending.
        self._spare: list[tuple[int, str]] = []
        self._scanned_at = self._published_at = -_IDLE_SECONDS
        self._stalled = False

    def publish(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """Write `parts` as the dump `name` by rename (mode 0600); returns its bytes.

        Raises NotCapturable and CaptureRefused as the directory does and for want of room, and OSError.
        """
        size = sum(memoryview(part).nbytes for part in parts)
        handle = self._directory.handle()
        self._admit(size, handle)
        try:
            self._write(name, parts, size, handle)
        except BaseException:
            with self._lock:
                self._under_way -= size
            raise
        with self._lock:
            self._under_way -= size
            self._waiting += size
            self._published_at = time.monotonic()
        # What was moved away meanwhile took the dump along; handle() says so to one thread alone.
        if self._directory.handle() is not handle:
            raise self._directory.gone()
        return size

    def tidy(self, handle: Handle) -> int:
        """Let go of files given back once no dump was written for a while; returns the bytes that wait."""
        with self._lock:
            self._scan(handle)
            if time.monotonic() - self._published_at > _IDLE_SECONDS:
                self._drop_spare(0, handle)
            return self._waiting

    def _admit(self, size: int, handle: Handle) -> None:
        """Take `size` bytes of the limit."""
        deadline = time.monotonic() + self._seconds
        waited = False
        while True:
            with self._lock:
                used = self._waiting + self._under_way
                if used + size > self.limit:
                    self._scan(handle)
                    used = self._waiting + self._under_way
                # A single dump larger than the limit may pass alone.
                if used + size <= self.limit or used == 0:
                    self._under_way += size
                    self._stalled = False
                    self._drop_spare(max(0, self.limit - used - size), handle)
                    return
                if self._stalled or time.monotonic() > deadline:
                    self._stalled = True
                    raise NotCapturable(
                        f"{used} bytes of dumps wait in {self._directory.path}, whose limit is {self.limit}, and none was taken"
                        f" away for {self._seconds:g} s",
                        f"see that the extractor runs, or raise {MAX_BYTES}",
                    )
            if not waited:
                waited = True
                self._counters.add(room_waits=1)
            time.sleep(_SCAN_SECONDS)

    def _scan(self, handle: Handle) -> None:
        """Count anew what lies in the directory; the lock is held."""
        found = self._directory.waiting(handle)
        self._waiting = sum(size for size, name in found if not is_spare(name))
        self._spare = sorted((size, name) for size, name in found if is_spare(name))
        self._scanned_at = time.monotonic()
        self._drop_spare(self.limit // _SPARE_SHARE, handle)

    def _drop_spare(self, keep: int, handle: Handle) -> None:
        """Remove files given back until they hold `keep` bytes; the lock is held."""
        held = sum(size for size, _name in self._spare)
        while held > keep:
            size, name = self._spare.pop(0)
            held -= size
            self._directory.remove(name, handle)

    def _write(self, name: str, parts: Sequence[bytes | memoryview], size: int, handle: Handle) -> None:
        temporary = self._directory.temporary()
        descriptor = self._reuse(size, temporary, handle)
        fresh = descriptor is None
        if descriptor is None:
            descriptor = self._directory.make(temporary, handle)
        try:
            try:
                write_all(descriptor, parts)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                with self._lock:
                    self._drop_spare(0, handle)
                write_all(descriptor, parts)
            if not fresh:
                os.ftruncate(descriptor, size)
            os.replace(temporary, name, src_dir_fd=handle.descriptor, dst_dir_fd=handle.descriptor)
        except BaseException:
            self._directory.remove(temporary, handle)
            raise
        finally:
            os.close(descriptor)

    def _reuse(self, size: int, temporary: str, handle: Handle) -> int | None:
        """Descriptor of a file given back, under the name `temporary`; None where there is none."""
        with self._lock:
            if not self._spare and time.monotonic() - self._scanned_at > _SCAN_SECONDS:
                self._scan(handle)
            if not self._spare:
                return None
            # The smallest that is large enough: what is cut off or added costs new pages.
            place = min(bisect.bisect_left(self._spare, (size, "")), len(self._spare) - 1)
            _size, name = self._spare.pop(place)
        with contextlib.suppress(OSError):
            os.rename(name, temporary, src_dir_fd=handle.descriptor, dst_dir_fd=handle.descriptor)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle.descriptor)
            found = os.fstat(descriptor)
            # One that has another name too is still someone's.
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return descriptor
            os.close(descriptor)
        self._directory.remove(temporary, handle)
        return None
