# SPDX-License-Identifier: Apache-2.0
"""The extractor's account of itself: status.json and the lines in its log."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from typing import Any

import hs_manifest
import hs_progress

from .notify import Telling
from .store import Access

WINDOW_SECONDS = 60.0
LISTED_FAILURES = 1000


class Progress:
    """Counts what is done and writes status.json.

    Rates are tokens a second: over the last minute while running, over this start once ended. `session_…` count this
    start, `seconds_total` the time that all starts of the extraction worked.
    """

    def __init__(self, output_dir: str, access: Access, run: str, telling: Telling | None = None) -> None:
        previous: dict[str, Any] = {}
        try:
            previous = hs_manifest.read_json(os.path.join(output_dir, hs_manifest.STATUS)) or {}
        except hs_manifest.ManifestError:
            # It is only what the last extractor said of itself.
            pass
        generation = previous.get("generation")
        seconds = previous.get("seconds_total")
        self._seconds_before = seconds if isinstance(seconds, (int, float)) else 0.0
        self._output_dir, self._access, self.telling = output_dir, access, telling
        self._began = time.monotonic()
        self._window: deque[tuple[float, int]] = deque()
        # Starts of this extraction so far: it keeps the rids of two starts apart.
        self.generation = generation + 1 if isinstance(generation, int) else 0
        self.status: dict[str, Any] = {
            "run": run,
            "generation": self.generation,
            "state": "starting",
            "message": "",
            "pid": os.getpid(),
            "started_at": hs_manifest.utc_now(),
            "records_done": 0,
            "records_total": 0,
            "tokens_done": 0,
            "tokens_total": 0,
            "session_records": 0,
            "session_tokens": 0,
            "session_seconds": 0.0,
            "seconds_total": self._seconds_before,
            "bytes_written": 0,
            "bytes_free": None,
            "tok_s": 0.0,
            "eta_s": None,
            "failed": [],
            "failed_total": 0,
            "failed_records": "",
        }
        self._failed: set[int] = set()

    def plan(self, records_done: int, tokens_done: int, records_total: int, tokens_total: int) -> None:
        """Set where this start begins."""
        self.status.update(records_done=records_done, tokens_done=tokens_done, records_total=records_total, tokens_total=tokens_total)

    def begin(self) -> None:
        """The rate and the seconds count from here: the first record is next."""
        self._began = time.monotonic()
        self._window.clear()
        self._window.append((self._began, 0))

    def finished(self, entry: dict[str, Any]) -> None:
        """Count a record whose manifest line is durable."""
        self.status["records_done"] += 1
        self.status["session_records"] += 1
        self.status["tokens_done"] += entry["tokens"]
        self.status["session_tokens"] += entry["tokens"]
        self.status["bytes_written"] += entry["bytes"]

    def failed(self, record: int, reason: str) -> None:
        """Count a record that failed by itself; the first thousand are listed with the reason."""
        self.status["failed_total"] += 1
        self._failed.add(record)
        if len(self.status["failed"]) < LISTED_FAILURES:
            self.status["failed"].append({"record": record, "reason": reason})

    def write(self, state: str | None = None, message: str | None = None) -> None:
        """Bring rate, free space and times up to date and replace status.json."""
        status = self.status
        if state is not None:
            status["state"] = state
        if message is not None:
            status["message"] = message
        status["updated_at"] = hs_manifest.utc_now()
        status["failed_records"] = hs_manifest.encode_ranges(self._failed)
        status["bytes_free"] = free_bytes(self._output_dir)
        self._rate()
        path = os.path.join(self._output_dir, hs_manifest.STATUS)
        ended = status["state"] not in ("starting", "running")
        hs_manifest.write_json(path, status, self._access.file_mode, self._access.gid, durable=ended)
        for wrong in self.telling.tell(status, self.line, ended) if self.telling is not None else ():
            say(wrong)

    def write_last(self, state: str, message: str) -> None:
        """As `write`; where the file system has no room even for that, the log says so."""
        try:
            self.write(state, message)
        except OSError as error:
            say(f"status.json cannot be written: {error}")

    def _rate(self) -> None:
        status = self.status
        if status["state"] not in ("running", *hs_progress.ENDED):
            return
        moment, tokens = time.monotonic(), status["session_tokens"]
        status["session_seconds"] = round(moment - self._began, 3)
        status["seconds_total"] = round(self._seconds_before + moment - self._began, 3)
        self._window.append((moment, tokens))
        while len(self._window) > 2 and moment - self._window[1][0] >= WINDOW_SECONDS:
            self._window.popleft()
        since, before = self._window[0] if status["state"] == "running" else (self._began, 0)
        rate = (tokens - before) / max(moment - since, 1e-3)
        left = status["tokens_total"] - status["tokens_done"]
        status["tok_s"] = round(rate, 1)
        status["eta_s"] = round(left / rate) if rate > 0 and status["state"] == "running" else None

    @property
    def line(self) -> str:
        """One line for the log."""
        return hs_progress.progress_line(self.status)


def say(text: str) -> None:
    """A line for the service's log; one that cannot be written ends nothing."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def free_bytes(path: str) -> int:
    """Bytes that this user can still write to the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
