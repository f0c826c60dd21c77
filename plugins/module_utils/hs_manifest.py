# Copyright (c) hidden_state.bridge contributors
# Apache License 2.0 (see LICENSES/Apache-2.0.txt or https://www.apache.org/licenses/LICENSE-2.0)
# SPDX-License-Identifier: Apache-2.0
"""Owner of an extraction's output directory: marker, lock, run.json, manifest.jsonl and status.json.

The extractor writes them and everything else (planner, verify, status) reads them through this module.
It needs nothing but the standard library, so it runs under any Python 3.9+ of a host.

A record is *done* when the manifest has a valid line for it and its file exists with that line's size.
The extractor is *alive* when it holds the lock; status.json only says what it did last.
"""

from __future__ import annotations

import datetime
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time

MARKER = ".hidden_state_bridge"
LOCK = ".lock"
RUN = "run.json"
MANIFEST = "manifest.jsonl"
STATUS = "status.json"
RUN_FORMAT = "hidden_state_bridge.run/1"

_ENTRY_FIELDS = {"id": int, "source": str, "line": int, "file": str, "bytes": int, "tokens": int, "sha256": str}


class ManifestError(Exception):
    """The output directory cannot be used; the message names the path and the remedy."""


def canonical_json(value):
    """Bytes of `value` as JSON with sorted keys and no spaces: what hashes are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def run_of(identity):
    """The run's name: the first 12 hex digits of the SHA-256 of its identity."""
    return hashlib.sha256(canonical_json(identity)).hexdigest()[:12]


def utc_now():
    """The time as `2026-01-31T12:00:00Z`."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def encode_ranges(numbers):
    """Record numbers as text, sorted and without repeats: `[0, 1, 2, 7]` gives `"0-2,7"`."""
    pairs = []
    for number in sorted(set(numbers)):
        if pairs and number == pairs[-1][1] + 1:
            pairs[-1][1] = number
        else:
            pairs.append([number, number])
    return ",".join(str(first) if first == last else "%d-%d" % (first, last) for first, last in pairs)


def decode_ranges(text):
    """The (first, last) pairs of `"0-2,7"`: `[(0, 2), (7, 7)]`.

    Raises ManifestError unless the ranges ascend and do not overlap.
    """
    pairs = []
    previous = -1
    for part in text.split(",") if text.strip() else []:
        first, dash, last = part.strip().partition("-")
        if not (part.isascii() and first.isdigit() and (last.isdigit() or not dash)):
            raise ManifestError("%r is not a range of records such as 0-5,7,9-12" % part)
        pair = (int(first), int(last if dash else first))
        if pair[0] <= previous or pair[1] < pair[0]:
            raise ManifestError("the ranges of records do not ascend at %r" % part)
        previous = pair[1]
        pairs.append(pair)
    return pairs


def fsync_directory(path):
    """Make renames and new names in the directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path, value, mode=0o600, gid=-1, durable=True):
    """Replace the file at once: readers see the old content or all of the other one."""
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".%s.tmp-" % os.path.basename(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            os.fchmod(handle, mode)
            if gid >= 0:
                os.fchown(handle, -1, gid)
            json.dump(value, stream, sort_keys=True, indent=1)
            stream.write("\n")
            stream.flush()
            if durable:
                os.fsync(handle)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        fsync_directory(os.path.dirname(path))


def read_json(path):
    """The object in the file, or None where there is no such file. Raises ManifestError for anything else."""
    try:
        with open(path, encoding="utf-8") as stream:
            value = json.load(stream)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ManifestError("%s cannot be read: %s" % (path, error)) from error
    if not isinstance(value, dict):
        raise ManifestError("%s holds no JSON object" % path)
    return value


def claim_directory(path, run, mode=0o700, gid=-1):
    """Make the output directory, or take one that is empty or carries this run's marker.

    A link, a directory with foreign content and one of another run are refused (ManifestError).
    """
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.lexists(path):
            os.mkdir(path, mode)
    except OSError as error:
        raise ManifestError("output directory %s cannot be made: %s" % (path, error.strerror)) from error
    if os.path.islink(path) or not os.path.isdir(path):
        raise ManifestError("output directory %s is a link or no directory; give the directory itself" % path)
    marker = read_json(os.path.join(path, MARKER))
    if marker is None:
        # A marker that was being written when its writer died leaves only its temporary file.
        ours = ".%s.tmp-" % MARKER
        foreign = sorted(name for name in os.listdir(path) if name != LOCK and not name.startswith(ours))
        if foreign:
            raise ManifestError(
                "output directory %s is not empty and has no %s of ours (it holds %s); choose another directory"
                % (path, MARKER, ", ".join(foreign[:5]))
            )
    elif marker.get("kind") != "extraction":
        raise ManifestError("output directory %s is marked as %r, not as an extraction" % (path, marker.get("kind")))
    try:
        os.chmod(path, mode)
        if gid >= 0:
            os.chown(path, -1, gid)
        if marker is None:
            write_json(os.path.join(path, MARKER), {"kind": "extraction", "run": run}, mode & 0o660, gid)
    except OSError as error:
        raise ManifestError("output directory %s is not writable: %s" % (path, error.strerror)) from error


class Lock:
    """The exclusive lock on an output directory; it lives as long as the process that holds it."""

    def __init__(self, path, patience=2.0):
        """Take the lock, or raise ManifestError after `patience` seconds (a reader's probe holds it for an instant)."""
        name = os.path.join(path, LOCK)
        try:
            self._handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
        except OSError as error:
            raise ManifestError("lock %s cannot be opened: %s" % (name, error.strerror)) from error
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES) or time.monotonic() > deadline:
                    os.close(self._handle)
                    raise ManifestError(
                        "%s is locked by another extractor; only one may write there: stop it, or let it finish" % path
                    ) from error
            time.sleep(0.05)

    def close(self):
        """Give the lock back."""
        os.close(self._handle)


def is_locked(path):
    """Whether an extractor lives in that output directory."""
    try:
        handle = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return True
    finally:
        os.close(handle)
    return False


def claim_run(path, identity, provenance, mode=0o600, gid=-1):
    """Write run.json, or check that it is of the same identity (ManifestError shows both otherwise).

    Identity: data set, weights, layers, norm, dtype. Provenance (host, release, flags) may differ between
    starts; what it was before is kept under `earlier`.
    """
    name = os.path.join(path, RUN)
    known = read_json(name)
    if known is None:
        known = {"format": RUN_FORMAT, "run": run_of(identity), "identity": identity, "provenance": provenance}
        known["earlier"] = []
        write_json(name, known, mode, gid)
    elif canonical_json(known.get("identity")) != canonical_json(identity):
        raise ManifestError(other_identity(path, known.get("identity"), identity))
    elif known.get("provenance") != provenance:
        known["earlier"] = known.get("earlier", []) + [known.get("provenance")]
        known["provenance"] = provenance
        write_json(name, known, mode, gid)
    return known


def other_identity(path, there, ours):
    """The message for an output directory of another run."""
    return "output directory %s holds another run: %s; this run is %s; give it an output directory of its own" % (
        path,
        canonical_json(there).decode(),
        canonical_json(ours).decode(),
    )


def _entry(line):
    """The manifest line as a dict, or None where it is not a valid one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or any(entry.get(key).__class__ is not kind for key, kind in _ENTRY_FIELDS.items()):
        return None
    parts = entry["file"].split("/")
    if entry["id"] < 0 or "" in parts or ".." in parts or "." in parts:
        return None
    return entry


def _agrees(path, entry):
    try:
        found = os.lstat(os.path.join(path, entry["file"]))
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == entry["bytes"]


class Manifest:
    """What the manifest of an output directory says, held against the files there.

    entries: {record: line} of the done records, in the order of the manifest.
    torn: bytes of an unfinished last line. broken: numbers of lines that are not valid.
    stale: {record: file} with a line but without a file of that size. repeated: records with more than one line
    (the later line wins if its file agrees).
    """

    def __init__(self, path):
        self.path = path
        self.entries = {}
        self.broken = []
        self.torn = 0
        self.repeated = []
        self.stale = {}
        try:
            stream = open(os.path.join(path, MANIFEST), "rb")
        except FileNotFoundError:
            return
        with stream:
            for number, line in enumerate(stream, 1):
                if not line.endswith(b"\n"):
                    self.torn = len(line)
                    break
                entry = _entry(line)
                if entry is None:
                    self.broken.append(number)
                    continue
                record = entry["id"]
                if record in self.entries or record in self.stale:
                    self.repeated.append(record)
                if _agrees(path, entry):
                    self.entries[record] = entry
                    self.stale.pop(record, None)
                elif record not in self.entries:
                    self.stale[record] = entry["file"]

    def other_format(self, name):
        """Why files of the output format `name` cannot join those that are there; empty where they can."""
        others = sorted({entry["file"].partition("/")[0] for entry in self.entries.values()} - {name})
        if not others:
            return ""
        return "output directory %s holds files of the format %s, and this run writes %s; give it an output directory of its own" % (
            self.path,
            ", ".join(others),
            name,
        )

    def repair(self, mode=0o600, gid=-1):
        """Rewrite the file with one line for each done record; returns whether that was needed.

        Only the holder of the lock may call it.
        """
        if not (self.torn or self.broken or self.stale or self.repeated):
            return False
        temporary = os.path.join(self.path, ".%s.tmp-%d" % (MANIFEST, os.getpid()))
        with open(temporary, "wb") as stream:
            os.fchmod(stream.fileno(), mode)
            if gid >= 0:
                os.fchown(stream.fileno(), -1, gid)
            for entry in self.entries.values():
                stream.write(_line(entry))
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(temporary, os.path.join(self.path, MANIFEST))
        fsync_directory(self.path)
        return True


def _line(entry):
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


class ManifestWriter:
    """Appends lines; each call is durable when it returns. Entries must be of files that are durable already."""

    def __init__(self, path, mode=0o600, gid=-1):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._handle = os.open(os.path.join(path, MANIFEST), flags, mode)
        os.fchmod(self._handle, mode)
        if gid >= 0:
            os.fchown(self._handle, -1, gid)
        fsync_directory(path)

    def append(self, entries):
        """Append one line an entry, then fsync. Raises OSError (a short write is repaired at the next start)."""
        data = memoryview(b"".join(_line(entry) for entry in entries))
        while data:
            data = data[os.write(self._handle, data) :]
        os.fsync(self._handle)

    def close(self):
        """Close the file."""
        os.close(self._handle)
