# SPDX-License-Identifier: Apache-2.0
"""The files of a collection that are of all its records together, and what its run.json says of them.

`together` in run.json holds `bytes` and `sha256` of each, by its path. A file that it does not name was not finished.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from typing import Any

import hs_manifest

from .hashes import file_hash
from .store import Access

KEY = "together"
_OURS = re.compile(r"(vocab_mapping\.pt|speculators/(data-[0-9a-f]{16}\.arrow|state\.json|dataset_info\.json|token_freq\.pt))\Z")


def is_ours(file: str) -> bool:
    """Whether that path below a collection is of such a file."""
    return bool(_OURS.match(file))


def there(directory: str) -> set[str]:
    """Paths of such files in a collection, whether or not run.json names them. Raises OSError."""
    found = set(os.listdir(directory))
    if os.path.isdir(os.path.join(directory, "speculators")):
        found |= {f"speculators/{name}" for name in os.listdir(os.path.join(directory, "speculators"))}
    return {file for file in found if is_ours(file)}


def known_of(directory: str) -> dict[str, dict[str, Any]]:
    """What run.json says: {path: {bytes, sha256}}. Raises ManifestError."""
    known = (hs_manifest.read_json(os.path.join(directory, hs_manifest.RUN)) or {}).get(KEY)
    return known if isinstance(known, dict) else {}


def fault(directory: str, file: str, about: dict[str, Any]) -> str:
    """How a file is not as run.json says; empty where it is."""
    path = os.path.join(directory, file)
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return "is no regular file"
        if found.st_size != about.get("bytes"):
            return f"has {found.st_size} bytes, {hs_manifest.RUN} says otherwise"
        return "" if file_hash(path) == about.get("sha256") else f"its content has another SHA-256 than {hs_manifest.RUN} says"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def whole_of(directory: str) -> set[str]:
    """Paths of the files that are as run.json says, all of them read. Raises ManifestError."""
    return {file for file, about in known_of(directory).items() if not fault(directory, file, about)}


def note(directory: str, whole: set[str], written: Iterable[str], access: Access) -> None:
    """Let run.json know what was `whole` and what was written, which is durable already. Raises OSError and ManifestError."""
    before = known_of(directory)
    known = {file: before[file] for file in whole}
    for file in written:
        path = os.path.join(directory, file)
        known[file] = {"bytes": os.path.getsize(path), "sha256": file_hash(path)}
    _write(directory, before, known, access.file_mode, access.gid)


def forget(directory: str, files: set[str]) -> None:
    """Take removed files out of run.json. Raises OSError and ManifestError."""
    before = known_of(directory)
    if files & set(before):
        found = os.stat(os.path.join(directory, hs_manifest.RUN))
        left = {file: about for file, about in before.items() if file not in files}
        _write(directory, before, left, stat.S_IMODE(found.st_mode), found.st_gid)


def _write(directory: str, before: dict[str, Any], known: dict[str, Any], mode: int, gid: int) -> None:
    if known != before:
        path = os.path.join(directory, hs_manifest.RUN)
        hs_manifest.write_json(path, {**(hs_manifest.read_json(path) or {}), KEY: known}, mode, gid)
