# SPDX-License-Identifier: Apache-2.0
"""Read output files back against the manifest, and put back into the plan what is not as it says."""

from __future__ import annotations

import os
import random
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hs_manifest
from hs_capture import dumpfile

from . import together
from .errors import ConfigError, Refusal
from .formats import number_of
from .hashes import file_hash
from .remedy import Remedy, remedy_in
from .store import files_below

THREADS = 8


def verify(output_dir: str, sample: int | None, seed: int = 0, repair: bool = False, mend: bool = False) -> dict[str, Any]:
    """Check one host's output directory, or a collection.

    Every name and size is checked, and the files of `sample` records (chosen by seed; None for all) are hashed.
    Returns `{ok, checked, records, tokens, bytes, running, problems: [{id, file, reason}], repaired, writer}`: checked is the number
    of records' files that were hashed, writer the playbook that makes the files of records again. Files of all records together are
    always read. While an extractor is at work (`running`), files that are not in the manifest yet are no problem.

    With `repair`, records with a missing, truncated or changed file lose their line and their files, and what is not in the
    manifest and named like a file of ours is removed: `repaired` lists them, `problems` what is left. `mend` does that without the
    changed ones, as each start of an extractor does, and nothing while one is at work. Else nothing is changed. What may be read
    later stays a problem. Raises Refusal where there is no manifest of ours, and with `repair` while an extractor is at work;
    ConfigError with either where files lie without a manifest; OSError where a file cannot be looked at.
    """
    marker = hs_manifest.read_json(os.path.join(output_dir, hs_manifest.MARKER))
    if marker is None:
        raise Refusal(f"{output_dir} has no {hs_manifest.MARKER}; give one host's output directory of an extraction")
    if sample is not None and sample < 0:
        raise Refusal(f"a sample of {sample} files makes no sense; give 0 or more")
    collection = marker.get("kind") == hs_manifest.COLLECTION
    if marker.get("kind") not in (hs_manifest.EXTRACTION, hs_manifest.COLLECTION):
        raise Refusal(
            f"{output_dir} is marked as {marker.get('kind')!r}: nothing says what its files have to be; give an output directory of an"
            " extraction, or a collection"
        )
    lock = None
    try:
        remedy = remedy_in(output_dir, marker["kind"])
        lock = hs_manifest.Lock(output_dir) if repair or (mend and not hs_manifest.is_locked(output_dir)) else None
        running = lock is None and hs_manifest.is_locked(output_dir)
        manifest = hs_manifest.Manifest(output_dir)
        problems = _of_the_manifest(manifest, running, remedy, collection)
        if not running:
            problems += _extra(manifest, remedy, collection)
        repaired = _repair(manifest, problems, collection) if lock is not None and not repair else []
        if not running:
            problems += _of_all_together(manifest, remedy)
        entries = list(manifest.entries.values())
        chosen = entries if sample is None or sample >= len(entries) else random.Random(seed).sample(entries, sample)
        files = [(entry["id"], file) for entry in chosen for file in hs_manifest.files_of(entry)]
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
            hashed = list(filter(None, pool.map(lambda item: _hash_problem(output_dir, *item, remedy), files)))
        problems += [problem for problem, unread in hashed if not unread]
        repaired += _repair(manifest, problems, collection) if repair else []
        problems += [problem for problem, unread in hashed if unread]
    except hs_manifest.ManifestError as error:
        raise Refusal(str(error)) from error
    finally:
        if lock is not None:
            lock.close()
    entries = manifest.entries.values()
    return {
        "ok": not problems,
        "checked": len(files),
        "records": len(entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "bytes": sum(entry["bytes"] for entry in entries),
        "running": running,
        "problems": problems,
        "repaired": repaired,
        "writer": remedy.writer,
    }


def _problem(record: int | None, file: str, reason: str) -> dict[str, Any]:
    return {"id": record, "file": file, "reason": reason}


def _hash_problem(output_dir: str, record: int, file: dict[str, Any], remedy: Remedy) -> tuple[dict[str, Any], bool] | None:
    """What is wrong with a file's content, and whether that is unknown because reading failed."""
    unread, way = False, f"{remedy.repair} puts it back into the plan"
    try:
        if file_hash(os.path.join(output_dir, file["file"])) == file["sha256"]:
            return None
        reason = "its content has another SHA-256 than the manifest says"
    except OSError as error:
        # A bad sector gives EIO, and so does a cable or a mount that comes back: only people can tell, so nothing is removed for it.
        unread = error.errno not in hs_manifest.GONE
        if unread:
            way = "see to the file system and the permissions; where it stays so, remove the file"
        reason = f"cannot be read: {error.strerror}"
    return _problem(record, file["file"], f"{reason}; {way}, and {remedy.again}"), unread


def _of_all_together(manifest: hs_manifest.Manifest, remedy: Remedy) -> list[dict[str, Any]]:
    """Files of all records together that are not as run.json says."""
    faults = {file: together.fault(manifest.path, file, about) for file, about in together.known_of(manifest.path).items()}
    return [_problem(None, file, f"{fault}; {remedy.again}") for file, fault in sorted(faults.items()) if fault]


def _of_the_manifest(manifest: hs_manifest.Manifest, running: bool, remedy: Remedy, follow: bool) -> list[dict[str, Any]]:
    """Lines that are not valid, and files that are missing or have another size."""
    problems = [_problem(None, hs_manifest.MANIFEST, f"line {number} is not valid") for number in manifest.broken]
    if manifest.torn and not running:
        text = f"its last line is torn ({manifest.torn} bytes); {remedy.maker} mends it"
        problems.append(_problem(None, hs_manifest.MANIFEST, text))
    problems += [_problem(record, hs_manifest.MANIFEST, "the record has more than one line") for record in manifest.repeated]
    for record, entry in manifest.stale.items():
        for file in hs_manifest.files_of(entry):
            if hs_manifest.agrees(manifest.path, file, follow):
                continue
            found = os.path.join(manifest.path, file["file"])
            there = f"has {os.lstat(found).st_size} bytes, the manifest says otherwise" if os.path.lexists(found) else "is missing"
            problems.append(_problem(record, file["file"], f"{there}; {remedy.again}"))
    return problems


def _extra(manifest: hs_manifest.Manifest, remedy: Remedy, collection: bool) -> list[dict[str, Any]]:
    """Files below the format directories that no line names, and those of all records of a collection that run.json does not."""
    lines = [*manifest.entries.values(), *manifest.stale.values()]
    known = {file["file"] for entry in lines for file in hs_manifest.files_of(entry)}
    known |= set(together.known_of(manifest.path))
    problems = []
    for file in sorted({*files_below(manifest.path), *(together.there(manifest.path) if collection else ())}):
        if file in known:
            continue
        if together.is_ours(file):
            problems.append(_problem(None, file, f"is not in {hs_manifest.RUN}; {remedy.again}"))
        else:
            left = dumpfile.temporary_pid(os.path.basename(file)) is not None
            problems.append(_problem(None, file, "left by an extractor that was killed" if left else "is not in the manifest"))
    return problems


def _repair(manifest: hs_manifest.Manifest, problems: list[dict[str, Any]], links: bool) -> list[dict[str, Any]]:
    """Mend what can be mended, and take it out of `problems`; returns it. Lines go first: a line never names what is known to be bad."""
    records = {problem["id"] for problem in problems if problem["file"] != hs_manifest.MANIFEST} - {None}
    bad = [manifest.entries.get(record) or manifest.stale[record] for record in sorted(records)]
    need_manifest(manifest.path)
    path = os.path.join(manifest.path, hs_manifest.MANIFEST)
    if os.path.exists(path):
        found = os.stat(path)
        manifest.repair(stat.S_IMODE(found.st_mode), found.st_gid, without=records)
    removable = {file["file"] for entry in bad for file in hs_manifest.files_of(entry)}
    removable |= {problem["file"] for problem in problems if problem["id"] is None and _is_ours(problem["file"])}
    kept = {file for file in sorted(removable) if not remove(manifest.path, file, links)}
    together.forget(manifest.path, removable - kept)
    repaired = [p for p in problems if p["file"] not in kept and (p["file"] in removable or p["file"] == hs_manifest.MANIFEST)]
    problems[:] = [problem for problem in problems if problem not in repaired]
    return repaired


def need_manifest(output_dir: str) -> None:
    """Raise ConfigError where records' files lie in an output directory without a manifest: an extractor makes it before the first file."""
    if os.path.lexists(os.path.join(output_dir, hs_manifest.MANIFEST)):
        return
    count = sum(number_of(file) is not None for file in files_below(output_dir))
    if count:
        raise ConfigError(
            f"{output_dir} holds {count:,} files of records, and no {hs_manifest.MANIFEST} that names them; bring it back, or remove the"
            " files to begin anew"
        )


def remove_unnamed(manifest: hs_manifest.Manifest) -> int:
    """Remove temporary files and files of records that no line names, as a crash leaves them; returns how many of the latter.

    Another host may have got their records since. Only the holder of the lock may call it. Raises ConfigError without a manifest, OSError.
    """
    need_manifest(manifest.path)
    named = {file["file"] for entry in manifest.entries.values() for file in hs_manifest.files_of(entry)}
    removed = [file for file in list(files_below(manifest.path)) if file not in named and _is_ours(file) and remove(manifest.path, file)]
    return sum(number_of(file) is not None for file in removed)


def _is_ours(file: str) -> bool:
    return number_of(file) is not None or together.is_ours(file) or dumpfile.temporary_pid(os.path.basename(file)) is not None


def remove(output_dir: str, file: str, links: bool = False) -> bool:
    """Remove a regular file (with `links`, also a link) below the output directory, never through a link to a directory.

    Returns whether it is gone, durably. Raises OSError.
    """
    *directories, name = file.split("/")
    handle = os.open(output_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for directory in directories:
            below = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
            os.close(handle)
            handle = below
        mode = os.lstat(name, dir_fd=handle).st_mode
        if not (stat.S_ISREG(mode) or (links and stat.S_ISLNK(mode))):
            return False
        os.unlink(name, dir_fd=handle)
        os.fsync(handle)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return False
    except OSError as error:
        if error.errno not in hs_manifest.GONE:
            raise
        return False
    finally:
        os.close(handle)
    return True
