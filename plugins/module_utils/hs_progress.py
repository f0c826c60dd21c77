# Copyright (c) hidden_state.bridge contributors
# Apache License 2.0 (see LICENSES/Apache-2.0.txt or https://www.apache.org/licenses/LICENSE-2.0)
# SPDX-License-Identifier: Apache-2.0
"""How far an extraction is, in words and as a dict, from what its output directory tells."""

from __future__ import annotations

import os
import time

# Python 3.9 loads a module from an archive before it says __package__.
if "." in __name__:
    from . import hs_manifest
else:
    import hs_manifest


# States in which an extractor leaves its directory.
ENDED = ("done", "incomplete", "failed", "stopped")
# The capture reports every second.
SILENT_SECONDS = 15
# An extractor that has written its last status gives its lock back, and one that has just taken it says so, within this time.
LOCK_SECONDS = 1.0
# Widths of bins of time. Each divides the next, so that bins of several hosts add up.
BIN_SECONDS = (10, 60, 300, 1800, 7200, 21600, 86400)
MOST_BINS = 200


def count(number):
    """A whole number for people: `37,312`."""
    return format(int(number), ",")


def short(number):
    """A count for people: `87.8 M`, `18.4 k`, `312`."""
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= scale:
            return "%.1f%s" % (number / (1e3 if scale == 1e4 else scale), unit)
    return count(number)


def size(number):
    """Bytes for people, in powers of 1000: `5.03 TB`."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        # What would be rounded to a thousand is one of the next unit.
        if number >= 0.9995 * scale:
            value = number / scale
            return ("%.0f %s" if value >= 999.5 else "%.3g %s") % (value, unit)
    return "%d B" % number


def duration(seconds):
    """A time span for people: `1 h 17 m`, `3 m 05 s`, `12 s`."""
    seconds = int(seconds)
    if seconds >= 3600:
        return "%d h %02d m" % (seconds // 3600, seconds % 3600 // 60)
    if seconds >= 60:
        return "%d m %02d s" % (seconds // 60, seconds % 60)
    return "%d s" % seconds


def pace(finished, least=BIN_SECONDS[0]):
    """Tokens over time: `{"seconds": width of a bin, "tokens": [[start of the bin, tokens], ...]}`, bins of none left out.

    finished: pairs of a time in seconds since 1970 and tokens. least: the narrowest bins that may be.
    """
    for width in (width for width in BIN_SECONDS if width >= least):
        bins = {}
        for at, tokens in finished:
            bins[at - at % width] = bins.get(at - at % width, 0) + tokens
        if len(bins) <= MOST_BINS:
            break
    return {"seconds": width, "tokens": [list(pair) for pair in sorted(bins.items())]}


def lengths(counted):
    """Records by length, as `[[tokens at most, a power of two; records], ...]`. counted: pairs of tokens and records."""
    bins = {}
    for tokens, records in counted:
        most = 1 << max(0, tokens - 1).bit_length()
        bins[most] = bins.get(most, 0) + records
    return [list(pair) for pair in sorted(bins.items())]


def progress_line(status):
    """One line of progress from a status as the extractor writes it."""
    done, total = status.get("records_done", 0), status.get("records_total", 0)
    parts = [
        "%s/%s records (%.1f %%)" % (count(done), count(total), 100.0 * done / total if total else 100.0),
        "%s/%s tokens" % (short(status.get("tokens_done", 0)), short(status.get("tokens_total", 0))),
    ]
    if status.get("tok_s"):
        parts.append("%s tok/s" % short(status["tok_s"]))
    if status.get("state") == "running" and status.get("message"):
        parts.append(status["message"])
    elif status.get("state") == "running" and status.get("eta_s") is not None:
        parts.append("ETA %s" % duration(status["eta_s"]))
    if status.get("bytes_free") is not None:
        parts.append("%s free" % size(status["bytes_free"]))
    if status.get("failed_total"):
        parts.append("%s failed" % count(status["failed_total"]))
    return " \u00b7 ".join(parts)


def capture_line(report, now):
    """One line on what the capture in the server has written, from its counters; `now` in seconds since the epoch."""
    if not report:
        return "no capture has reported"
    parts = [
        "%s requests" % count(report["requests"]),
        "%s tokens" % short(report["tokens"]),
        "%s written, %s/s" % (size(report["bytes"]), size(report["write_bytes_per_second"])),
        "%s waiting" % size(report["directory_bytes"]),
        "%s waits for memory (%s)" % (count(report["ring_waits"]), duration(report["ring_wait_seconds"])),
        "%s given up" % count(report["drops"]),
    ]
    age = now - report["updated"]
    if age > SILENT_SECONDS:
        parts.append("silent for %s: its server was stopped or hangs" % duration(age))
    return " \u00b7 ".join(parts)


def observe(path, run=None, service="unknown", output_format=None):
    """What an output directory tells of its extraction, as a dict; nothing there is changed.

    run: the run that is asked for; another one in the directory is a `conflict`.
    service: `running`, `starting`, `stopping`, `stopped`, `failed` or `absent` as the host's service manager has it, or
    `unknown`. output_format: the formats that are asked for, one or several; files of others are a `conflict`.
    """
    known = hs_manifest.read_json(os.path.join(path, hs_manifest.RUN)) or {}
    message = hs_manifest.nameless(path) if run and not known else ""
    if run and known and known.get("run") != run:
        message = "%s holds run %s, not %s" % (path, known.get("run"), run)
    if message:
        found = _observation("failed", known, hs_manifest.Manifest(path), {}, message)
        found.update(conflict=message, done="", records_done=0, tokens_done=0, bytes=0, sources={}, lengths=[], pace=pace([]))
        return found
    alive, status, state = _look(path)
    ending, deadline = False, time.monotonic() + LOCK_SECONDS
    while alive and state in ENDED and time.monotonic() < deadline:
        ending = True
        time.sleep(0.02)
        alive, status, state = _look(path)
    state = state or ("stopped" if known else "absent")
    message = status.get("message") or ""
    if alive:
        state = "running" if status.get("state") == "running" else "starting"
    elif service in ("running", "starting") and not ending:
        # The service is up and has not taken the lock: what status.json says is of an earlier start, unless it had it just now.
        state, message = "starting", ""
    elif state in ("starting", "running"):
        state = "dead"
        message = "the extractor died; it last wrote at %s; start it again and it goes on where it was" % (
            status.get("updated_at", "an unknown time")
        )
    # An extractor that ends incomplete ends with status 1.
    elif service == "failed" and state not in ("failed", "incomplete"):
        state, message = "failed", "the extraction service failed before it could start; its log says why"
    manifest = hs_manifest.Manifest(path)
    found = _observation(state, known, manifest, status, message)
    found["conflict"] = manifest.other_format(output_format) if output_format else ""
    return found


def _look(path):
    """Whether an extractor holds the lock, the status that lies there, and the state of who wrote it (None where nobody did)."""
    alive = os.path.isdir(path) and hs_manifest.is_locked(path)
    # Read after the lock was seen free, the status is the last that its extractor wrote.
    try:
        status = hs_manifest.read_json(os.path.join(path, hs_manifest.STATUS)) or {}
    except hs_manifest.ManifestError:
        # The last one is durable. A loss of power tears only what a working extractor wrote.
        return alive, {}, "running"
    return alive, status, status.get("state")


def _observation(state, known, manifest, status, message):
    sources = {}
    for entry in manifest.entries.values():
        source = sources.setdefault(entry["source"], {"records": 0, "tokens": 0, "bytes": 0})
        source["records"] += 1
        source["tokens"] += entry["tokens"]
        source["bytes"] += entry["bytes"]
    totals = {key: sum(source[key] for source in sources.values()) for key in ("records", "tokens", "bytes")}
    shown = dict(status, state=state)
    if state not in ("starting", "running"):
        shown.update(records_done=totals["records"], tokens_done=totals["tokens"])
    line = state if state in ("absent", "starting") else progress_line(shown)
    if state == "dead":
        line = "dead since %s \u00b7 %s" % (status.get("updated_at", "an unknown time"), line)
    elif state in ENDED:
        line = "%s \u00b7 %s" % (line, state)
    if message and state in ("dead", "incomplete", "failed"):
        line = "%s: %s" % (line, message)
    return {
        "state": state,
        "line": line,
        "message": message,
        "conflict": "",
        "run": known.get("run", ""),
        "identity": known.get("identity", {}),
        "provenance": known.get("provenance", {}),
        "done": hs_manifest.encode_ranges(manifest.entries),
        "records_done": totals["records"],
        "tokens_done": totals["tokens"],
        "bytes": totals["bytes"],
        "sources": sources,
        "lengths": lengths((entry["tokens"], 1) for entry in manifest.entries.values()),
        # A manifest of an earlier release does not say when.
        "pace": pace([(entry["at"], entry["tokens"]) for entry in manifest.entries.values() if isinstance(entry.get("at"), int)]),
        # Not `failed`: in what a module returns that says whether the task did.
        "failures": status.get("failed", []),
        "status": status,
    }
