# SPDX-License-Identifier: Apache-2.0
"""The patcher in a child process: as another user, killed or failing at any of its steps."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Callable

# What audit hooks see of changes to files; os.fsync has no event and is wrapped.
CHANGES = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink"),
    *("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr"),
}
KILLED = -signal.SIGKILL
NOBODY = 65534


def forked(work: Callable[[], object], user: int | None = None) -> tuple[int, str]:
    """(0, what `work` returned), (1, what it raised) or (-signal, "") of a child process, run as `user`."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status, said = 1, ""
        try:
            os.close(readable)
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            said, status = str(work()), 0
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            with contextlib.suppress(OSError), open(writable, "w", encoding="utf-8") as stream:
                stream.write(said)
            os._exit(status)
    os.close(writable)
    with open(readable, encoding="utf-8") as stream:
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status), said


def at_step(number: int, strike: Callable[[], None], work: Callable[[], object]) -> int:
    """Do `work`, call `strike` before its change `number` to the disk, and return how many changes there were.

    Hooks cannot be taken away again: for a child process alone.
    """
    seen = 0

    def step(event: str, arguments: tuple) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in CHANGES:
            seen += 1
            if seen == number:
                strike()

    flush = os.fsync

    def fsync(handle: int) -> None:
        step("os.utime", ())
        flush(handle)

    os.fsync = fsync
    sys.addaudithook(step)
    work()
    done, seen = seen, sys.maxsize >> 1
    return done


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def imports(model: Path) -> str:
    """Import the model and, where it is beside it, the runtime, as the server does; "" or what went wrong."""

    def work() -> str:
        for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.path.insert(0, str(model.parents[3]))
        sys.dont_write_bytecode = True
        os.environ["SGLANG_HS_DUMP_DIR"] = "/nowhere"
        import importlib

        patched = importlib.import_module(f"sglang.srt.models.{model.stem}")
        if hasattr(patched, "_hs_open") or os.path.lexists(model.parents[1] / "hs_capture"):
            runtime = importlib.import_module("sglang.srt.hs_capture")
            assert callable(runtime.open_capture)
        return ""

    status, said = forked(work)
    return said if status == 0 else f"exit status {status}: {said}"
