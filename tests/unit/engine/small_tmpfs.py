# SPDX-License-Identifier: Apache-2.0
"""A file system that is soon full."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[None]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", path], check=False, stderr=subprocess.PIPE)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def remount(path: Path, option: str) -> None:
    """Mount the file system anew, `ro` or `rw`; while a writer has a file open there it is busy, for 20 s at most."""
    deadline = time.monotonic() + 20
    command, environment = ["mount", "-o", f"remount,{option}", path], {**os.environ, "LC_ALL": "C"}
    while (done := subprocess.run(command, check=False, env=environment, capture_output=True, text=True)).returncode:
        assert "busy" in done.stderr and time.monotonic() < deadline, done.stderr
        time.sleep(0.01)


def fill(path: Path) -> None:
    """Let the file `path` take every block that its file system has free."""
    with path.open("ab", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
