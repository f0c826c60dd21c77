# SPDX-License-Identifier: Apache-2.0
"""What the capture has done so far: ``capture.json``, written by the server and read by whoever asks."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from .dumpfile import COUNTERS_FORMAT, COUNTERS_NAME

_NAMES = (
    "forwards",
    "requests",
    "pieces",
    "tokens",
    "bytes",
    "ring_waits",
    "ring_wait_seconds",
    "room_waits",
    "drops",
    "markers_lost",
)


class Counters:
    """Sums since the start; thread-safe. `fixed` goes into every report as it is.

    forwards: that held a request to dump. requests, tokens, bytes: of written dumps (pieces: their files). ring_waits,
    ring_wait_seconds: how often and long a forward waited for host memory.
    room_waits: how often a writer waited for the directory. drops: error
    markers. markers_lost: of those, the ones that could not be written.
    """

    def __init__(self, **fixed: Any) -> None:
        self._fixed = {"format": COUNTERS_FORMAT, "pid": os.getpid(), "started": round(time.time(), 3), **fixed}
        self._sums = dict.fromkeys(_NAMES, 0)
        self._lock = threading.Lock()
        self._reported = dict(self._sums)
        self._reported_at = time.monotonic()

    def add(self, **amounts: float) -> None:
        """Add to sums by name."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def __getitem__(self, name: str) -> float:
        with self._lock:
            return self._sums[name]

    def report(self, **present: Any) -> bytes:
        """The content of ``capture.json``; `present` goes in as it is, write_bytes_per_second is the rate since the last one."""
        with self._lock:
            sums = dict(self._sums)
        now = time.monotonic()
        rate = (sums["bytes"] - self._reported["bytes"]) / max(now - self._reported_at, 1e-3)
        self._reported, self._reported_at = sums, now
        sums["ring_wait_seconds"] = round(sums["ring_wait_seconds"], 3)
        described = {**self._fixed, **sums, "write_bytes_per_second": round(rate), **present}
        return json.dumps(described).encode()


def read_counters(directory: str) -> dict[str, Any]:
    """What the capture reported last in its dump directory, by name; empty where it does not."""
    try:
        with open(os.path.join(directory, COUNTERS_NAME), encoding="utf-8") as stream:
            report = json.load(stream)
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) and report.get("format") == COUNTERS_FORMAT else {}
