# Copyright (c) hidden_state.bridge contributors
# Apache License 2.0 (see LICENSES/Apache-2.0.txt or https://www.apache.org/licenses/LICENSE-2.0)
# SPDX-License-Identifier: Apache-2.0
"""Owner of an extraction's output directory: marker, lock, run.json, manifest.jsonl and status.json.

The extractor writes them and everything else (planner, verify, status) reads them through this module.
It needs nothing but the standard library, so it runs under any Python 3.9+ of a host.

A line is a record. With one output format it has `file`, `bytes` and `sha256`; with several, `files` lists these three for each
format, and `bytes` is their sum. In a collection it also has `host`, and a line with `superseded` is of a copy that is not there.
A record is *done* when the manifest has a valid line for it and its files exist with that line's sizes.
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
# What a marker says of its directory: one host's states, or those of all hosts.
EXTRACTION = "extraction"
COLLECTION = "collection"
RUN_FORMAT = "hidden_state_bridge.run/1"
GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # after any other error a file may be there

_ENTRY_FIELDS = {"id": int, "source": str, "line": int, "bytes": int, "tokens": int}
_FILE_FIELDS = {"file": str, "bytes": int, "sha256": str}


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
    pairs, previous = [], -1
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
    handle, temporary = tempfile.mkstemp(".tmp-%d" % os.getpid(), ".%s." % os.path.basename(path), os.path.dirname(path))
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


def claim_directory(path, run, mode=0o700, gid=-1, kind=EXTRACTION):
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
        ours = ".%s." % MARKER
        foreign = sorted(name for name in os.listdir(path) if name != LOCK and not name.startswith(ours))
        if foreign:
            text = "output directory %s is not empty and has no %s of ours (it holds %s); choose another directory"
            raise ManifestError(text % (path, MARKER, ", ".join(foreign[:5])))
    elif marker.get("kind") != kind:
        ours = "%s %s" % ("an" if kind == EXTRACTION else "a", kind)
        raise ManifestError("output directory %s is marked as %r, not as %s" % (path, marker.get("kind"), ours))
    try:
        os.chmod(path, mode)
        if gid >= 0:
            os.chown(path, -1, gid)
        if marker is None:
            write_json(os.path.join(path, MARKER), {"kind": kind, "run": run}, mode & 0o660, gid)
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
        if nameless(path):
            raise ManifestError(nameless(path))
        known = {"format": RUN_FORMAT, "run": run_of(identity), "identity": identity, "provenance": provenance, "earlier": []}
        write_json(name, known, mode, gid)
    elif canonical_json(known.get("identity")) != canonical_json(identity):
        raise ManifestError(other_identity(path, known.get("identity"), identity))
    elif known.get("provenance") != provenance:
        known.update(earlier=known.get("earlier", []) + [known.get("provenance")], provenance=provenance)
        write_json(name, known, mode, gid)
    return known


def nameless(path):
    """Why nobody can tell of which run the lines of a manifest are; empty where run.json is there, or there are no lines."""
    manifest = os.path.join(path, MANIFEST)
    if os.path.exists(os.path.join(path, RUN)) or not os.path.exists(manifest) or next(read_lines(manifest), None) is None:
        return ""
    text = "output directory %s holds a %s and no %s that says of which run it is; bring that back, or choose another directory"
    return text % (path, MANIFEST, RUN)


def other_identity(path, there, ours):
    """The message for an output directory of another run."""
    text = "output directory %s holds another run: %s; this run is %s; give it an output directory of its own"
    return text % (path, canonical_json(there).decode(), canonical_json(ours).decode())


def _valid(value, fields):
    return isinstance(value, dict) and all(value.get(key).__class__ is kind for key, kind in fields.items())


def _entry(line):
    """The manifest line as a dict, or None where it is not a valid one."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    files = files_of(entry) if _valid(entry, _ENTRY_FIELDS) and entry["id"] >= 0 else None
    if not isinstance(files, list) or not files or not all(_valid(file, _FILE_FIELDS) for file in files):
        return None
    plain = not any({"", ".", ".."} & set(str(name or "").split("/")) for file in files for name in (file["file"], file.get("from", "-")))
    return entry if plain and sum(file["bytes"] for file in files) == entry["bytes"] else None


def files_of(entry):
    """The record's files, each with `file`, `bytes` and `sha256`: one for each format, whose name its path begins with."""
    return entry.get("files", [entry])


def named(files):
    """The part of a line that names files."""
    return dict(files[0]) if len(files) == 1 else {"files": files, "bytes": sum(file["bytes"] for file in files)}


def read_lines(path):
    """The valid lines of a manifest file, in order, whatever lies on the disk; one at a time. Raises OSError."""
    with open(path, "rb") as stream:
        for line in stream:
            entry = _entry(line) if line.endswith(b"\n") else None
            if entry is not None:
                yield entry


def agrees(path, file, follow=False):
    """Whether a file of the manifest is a regular one below `path` with the size that it says; follow: links may lead to it. Raises OSError."""
    try:
        found = (os.stat if follow else os.lstat)(os.path.join(path, file["file"]))
    except OSError as error:
        if error.errno not in GONE:
            raise
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == file["bytes"]


class Manifest:
    """What the manifest of an output directory says, held against the files there. Raises OSError.

    entries: {record: line} of the done records, in the order of the manifest.
    torn: bytes of an unfinished last line. broken: numbers of lines that are not valid.
    stale: {record: line} with a line but without all its files of their sizes. repeated: records with more than one line
    (the later line wins if its files agree). superseded: number of lines of second copies. In a collection files may be links.
    """

    def __init__(self, path):
        self.path = path
        follow = (read_json(os.path.join(path, MARKER)) or {}).get("kind") == COLLECTION
        self.entries, self.stale = {}, {}
        self.broken, self.repeated = [], []
        self.torn = self.superseded = 0
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
                if entry.get("superseded"):
                    self.superseded += 1
                    continue
                record = entry["id"]
                if record in self.entries or record in self.stale:
                    self.repeated.append(record)
                if all(agrees(path, file, follow) for file in files_of(entry)):
                    self.entries[record] = entry
                    self.stale.pop(record, None)
                elif record not in self.entries:
                    self.stale[record] = entry

    def other_format(self, names):
        """Why files in these output formats (a name, or several) cannot join those that are there; empty where they can."""
        names = {names} if isinstance(names, str) else set(names)
        for entry in self.entries.values():
            formats = {file["file"].partition("/")[0] for file in files_of(entry)}
            if formats != names:
                text = "output directory %s holds files of the format %s, and this run writes %s; give it an output directory of its own,"
                text += " or make one format from the other with convert.yml"
                return text % (self.path, ", ".join(sorted(formats)), ", ".join(sorted(names)))
        return ""

    def repair(self, mode=0o600, gid=-1, without=()):
        """Rewrite the file with one line for each done record, but for the records in `without`; returns whether that was needed.

        Only the holder of the lock may call it.
        """
        without = set(without) & set(self.entries)
        if not (self.torn or self.broken or self.stale or self.repeated or without):
            return False
        for record in without:
            del self.entries[record]
        write_lines(os.path.join(self.path, MANIFEST), self.entries.values(), mode, gid)
        return True


def write_lines(path, entries, mode=0o600, gid=-1):
    """Put a manifest of these lines in the place of what is there. Only the holder of the lock may call it."""
    temporary = os.path.join(os.path.dirname(path), ".%s.tmp-%d" % (os.path.basename(path), os.getpid()))
    with open(temporary, "wb") as stream:
        os.fchmod(stream.fileno(), mode)
        if gid >= 0:
            os.fchown(stream.fileno(), -1, gid)
        for entry in entries:
            stream.write(_line(entry))
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, path)
    fsync_directory(os.path.dirname(path))


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
