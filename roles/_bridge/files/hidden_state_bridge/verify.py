# SPDX-License-Identifier: Apache-2.0
"""Read output files back against the manifest."""

from __future__ import annotations

import hashlib
import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hs_manifest
from hs_capture import dumpfile

from .errors import Refusal
from .formats import FORMATS

BLOCK_BYTES = 1 << 22


def file_hash(path: str) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def _hash_problem(output_dir: str, entry: dict[str, Any]) -> dict[str, Any] | None:
    try:
        same = file_hash(os.path.join(output_dir, entry["file"])) == entry["sha256"]
        reason = None
        if not same:
            reason = "its content has another SHA-256 than the manifest says; remove it, and the next extraction writes it again"
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    return {"id": entry["id"], "file": entry["file"], "reason": reason} if reason else None


def verify(output_dir: str, sample: int | None, seed: int = 0) -> dict[str, Any]:
    """Check one host's output directory; nothing is changed.

    Every name and size is checked, and the content of `sample` files (chosen by seed; None for all) is hashed.
    Returns `{ok, checked, records, tokens, bytes, running, problems: [{id, file, reason}]}`: checked is the number of
    files hashed. While an extractor is at work (`running`), files that are not in the manifest yet are no problem.
    Raises Refusal where there is no manifest of ours.
    """
    if not os.path.exists(os.path.join(output_dir, hs_manifest.MARKER)):
        raise Refusal(f"{output_dir} has no {hs_manifest.MARKER}; give one host's output directory of an extraction")
    if sample is not None and sample < 0:
        raise Refusal(f"a sample of {sample} files makes no sense; give 0 or more")
    running = hs_manifest.is_locked(output_dir)
    manifest = hs_manifest.Manifest(output_dir)
    problems: list[dict[str, Any]] = []

    def add(record: int | None, file: str, reason: str) -> None:
        problems.append({"id": record, "file": file, "reason": reason})

    for number in manifest.broken:
        add(None, hs_manifest.MANIFEST, f"line {number} is not valid")
    if manifest.torn and not running:
        add(None, hs_manifest.MANIFEST, f"its last line is torn ({manifest.torn} bytes); the next extraction mends it")
    for record in manifest.repeated:
        add(record, hs_manifest.MANIFEST, "the record has more than one line")
    for record, file in manifest.stale.items():
        found = os.path.join(output_dir, file)
        there = f"has {os.lstat(found).st_size} bytes, the manifest says otherwise" if os.path.lexists(found) else "is missing"
        add(record, file, f"{there}; the next extraction writes it again")
    if not running:
        known = {entry["file"] for entry in manifest.entries.values()} | set(manifest.stale.values())
        for file in _files(output_dir):
            if file not in known:
                left = dumpfile.temporary_pid(os.path.basename(file)) is not None
                add(None, file, "left by an extractor that was killed" if left else "is not in the manifest")
    entries = list(manifest.entries.values())
    chosen = entries if sample is None or sample >= len(entries) else random.Random(seed).sample(entries, sample)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        problems += filter(None, pool.map(lambda entry: _hash_problem(output_dir, entry), chosen))
    return {
        "ok": not problems,
        "checked": len(chosen),
        "records": len(entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "bytes": sum(entry["bytes"] for entry in entries),
        "running": running,
        "problems": problems,
    }


def _files(output_dir: str) -> list[str]:
    """Files below the format directories, relative to the output directory."""
    found = []
    for name in FORMATS:
        for directory, _directories, files in os.walk(os.path.join(output_dir, name)):
            found += [os.path.relpath(os.path.join(directory, file), output_dir) for file in files]
    return sorted(found)
