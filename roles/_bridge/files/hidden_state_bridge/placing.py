# SPDX-License-Identifier: Apache-2.0
"""How files come into a collection: they are made beside their places, renames put them there, and then their lines are written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hs_manifest

from .errors import Refusal
from .merge import Source
from .remedy import COLLECTED, remedy_of
from .store import Access, filling, make_directories, temporary_of

COPY_BYTES = 1 << 22
BATCH = 256

# The line of a record, and those of its files that have to be brought.
Left = tuple[dict[str, Any], list[dict[str, Any]]]
# The line, and for each of these files where it lies until a rename, its name, and its SHA-256.
Staged = tuple[dict[str, Any], list[tuple[str, str, str]]]


class CannotPlace(Exception):
    """A file cannot be placed; the message says why."""


def is_as(mode: str, path: str, source: str) -> bool:
    """Whether the file at `path` is what `mode` makes of `source`; where the source is gone, a file of the right kind will do."""
    try:
        link = stat.S_ISLNK(os.lstat(path).st_mode)
        if link != (mode == "symlink"):
            return False
        same = os.path.samestat(os.stat(path), os.stat(source))
    except OSError:
        return os.path.exists(path) and not os.path.lexists(source)
    # A file that was written again has another inode.
    return same == (mode in ("link", "symlink"))


def is_alone_as(mode: str, path: str) -> bool:
    """As `is_as` where the source is not seen: what is to be a copy shares its content with no other name."""
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return mode == "symlink"
    return mode in ("link", "symlink") or found.st_nlink == 1


def _free_temporary(target: str) -> str:
    """The name of the temporary file beside `target`, with nothing there."""
    temporary = temporary_of(target)
    if os.path.lexists(temporary):
        os.unlink(temporary)
    return temporary


def stage(mode: str, source: str, file: dict[str, Any], target: str, access: Access) -> str:
    """Make what `mode` makes of `source` beside `target`; returns its path, to be renamed.

    file: `bytes` and `sha256` of the source. Raises CannotPlace, and Refusal or OSError for what is wrong with all of them.
    """
    if not hs_manifest.agrees("", dict(file, file=source)):
        raise CannotPlace(f"{source} is missing, or has another size than its manifest says")
    if mode == "copy":
        with filling(target, access) as temporary:
            if _copy(source, temporary) != file["sha256"]:
                raise CannotPlace(f"{source} has another SHA-256 than its manifest says")
        return temporary
    if mode == "move":
        os.chmod(source, access.file_mode)
        if access.gid >= 0:
            os.chown(source, -1, access.gid)
        return source
    temporary = _free_temporary(target)
    if mode == "symlink":
        os.symlink(os.path.relpath(os.path.realpath(source), os.path.realpath(os.path.dirname(target))), temporary)
    else:
        _link(source, temporary)
    return temporary


def stage_own(mode: str, path: str, file: dict[str, Any], target: str, access: Access) -> str:
    """As `stage`, of a file that is in the collection already: under another name, or as a link that the mode does not make.

    What is at `path` stays, so that its line holds until that of the other name is written.
    """
    if not is_alone_as(mode, path):
        return stage("link" if mode == "link" else "copy", os.path.realpath(path), file, target, access)
    temporary = _free_temporary(target)
    try:
        os.link(path, temporary, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        return stage("symlink" if mode == "symlink" else "copy", os.path.realpath(path), file, target, access)
    return temporary


class Placing:
    """Puts records where they belong, and then into the manifest, some at a time.

    kept: the records that are brought from the collection itself. changed: whether there was anything to do.
    """

    def __init__(
        self, mode: str, sources: list[Source], manifest: hs_manifest.Manifest, kept: set[int], access: Access, workers: int = 0
    ) -> None:
        self.mode, self.manifest, self.kept, self.access = mode, manifest, kept, access
        self.dest = manifest.path
        self.workers = workers or min(8, os.cpu_count() or 1)
        self.sources = {source.host: source for source in sources}
        self.pulled = {source.host: _pulled(source.root) for source in sources} if mode == "move" else {}
        self.changed = False

    def place(self, left: list[Left]) -> list[dict[str, Any]]:
        """Place what is left; returns the problems, `{host, id, file, reason}`. Raises Refusal and OSError."""
        self.changed = self.manifest.repair(self.access.file_mode, self.access.gid)
        named = {file["file"]: record for record, entry in self.manifest.entries.items() for file in hs_manifest.files_of(entry)}
        problems = []
        for first in range(0, len(left), BATCH):
            some = left[first : first + BATCH]
            for directory in sorted({os.path.dirname(file["file"]) for _entry, files in some for file in files}):
                make_directories(self.dest, directory, self.access)
            try:
                with ThreadPoolExecutor(self.workers) as pool:
                    staged = list(pool.map(self._stage, some))
                self._put([item for item in staged if isinstance(item, tuple)], named)
            except BaseException:
                for _entry, files in some:
                    self._unstage(files)
                raise
            problems += [item for item in staged if isinstance(item, dict)]
        return problems

    def _stage(self, item: Left) -> Staged | dict[str, Any]:
        """Make a record's files beside their places: all of them, or none, and the problem."""
        entry, files = item
        staged = []
        for file in files:
            origin, target = file.get("from", file["file"]), os.path.join(self.dest, file["file"])
            try:
                if entry["id"] in self.kept:
                    origin = _beside(self.manifest.entries[entry["id"]], file)["file"]
                    temporary = stage_own(self.mode, os.path.join(self.dest, origin), file, target, self.access)
                else:
                    temporary = stage(self.mode, self._source_of(entry["host"], origin, file["sha256"]), file, target, self.access)
            except CannotPlace as problem:
                self._unstage(files)
                return {"host": entry["host"], "id": entry["id"], "file": origin, "reason": self._reason(entry, str(problem))}
            staged.append((temporary, file["file"], file["sha256"]))
        return entry, staged

    def _source_of(self, host: str, name: str, sha256: str) -> str:
        """Where a host's file is. Raises CannotPlace where it cannot be had."""
        source = self.sources[host]
        if source.root is None:
            raise CannotPlace(f"{source.place} cannot be seen from this machine")
        if self.mode == "move" and (name, sha256) not in self.pulled[host]:
            raise CannotPlace(f"{source.place}/{name} was not pulled as its line has it; see what the pull of {host} says")
        return os.path.join(source.root, name)

    def _reason(self, entry: dict[str, Any], problem: str) -> str:
        if entry["id"] in self.kept:
            return f"{problem}; {COLLECTED.commands}"
        source = self.sources[entry["host"]]
        if source.root is None:
            return problem
        return f"{problem}; {remedy_of(source.place, hs_manifest.read_json(source.run)).commands}, then collect again"

    def _unstage(self, files: list[dict[str, Any]]) -> None:
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary_of(os.path.join(self.dest, file["file"])))

    def _put(self, placed: list[Staged], named: dict[str, int]) -> None:
        """Rename files into their places, and write their lines. named: the record of each file before."""
        access, entries = self.access, self.manifest.entries
        # A file that is replaced is in no line meanwhile.
        contents = {file: sha256 for _entry, files in placed for _temporary, file, sha256 in files}
        replaced = {
            record
            for record in {named[file] for file in contents if file in named} & set(entries)
            if any(contents.get(file["file"], file["sha256"]) != file["sha256"] for file in hs_manifest.files_of(entries[record]))
        }
        if replaced:
            self.manifest.repair(access.file_mode, access.gid, without=replaced)
        for _entry, files in placed:
            for temporary, file, _sha256 in files:
                os.rename(temporary, os.path.join(self.dest, file))
        for directory in sorted({os.path.dirname(file) for file in contents}):
            hs_manifest.fsync_directory(os.path.join(self.dest, directory))
        writer = hs_manifest.ManifestWriter(self.dest, access.file_mode, access.gid)
        try:
            writer.append([entry for entry, _files in placed])
        finally:
            writer.close()
        entries.update((entry["id"], entry) for entry, _files in placed)
        self.changed |= bool(placed)


def _beside(entry: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """The file of a line in the format of another one."""
    name = file["file"].partition("/")[0]
    return next(other for other in hs_manifest.files_of(entry) if other["file"].partition("/")[0] == name)


def _pulled(root: str | None) -> set[tuple[str, str]]:
    """Names and hashes of what states_fetch pulled into `root`, by the manifest that it leaves there."""
    path = os.path.join(root or "", hs_manifest.MANIFEST)
    if not os.path.exists(path):
        return set()
    return {(file["file"], file["sha256"]) for entry in hs_manifest.read_lines(path) for file in hs_manifest.files_of(entry)}


def _copy(source: str, target: str) -> str:
    """Copy a file's content; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as reader, open(target, "wb") as writer:
        for block in iter(lambda: reader.read(COPY_BYTES), b""):
            digest.update(block)
            writer.write(block)
    return digest.hexdigest()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise
        raise Refusal(f"{source} cannot be linked to {target}: {error.strerror}; take extraction_collect_mode symlink or copy") from error
