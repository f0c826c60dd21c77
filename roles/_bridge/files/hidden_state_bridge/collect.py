# SPDX-License-Identifier: Apache-2.0
"""Gather the states of all hosts in one directory that a trainer loads, or in an index of where they are.

The directory has a marker, a lock, run.json and a manifest like a host's own, and `verify` reads it the same way. What is placed
is durable before its line is; the same command goes on after anything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import hs_manifest
from hs_capture import dumpfile

from . import arrow, together, vocab
from .errors import Refusal
from .formats import file_name, number_of
from .hashes import file_hash
from .merge import Merged, Source, formats_of, identity_of, merge
from .packed import PackedDataset
from .placing import Left, Placing, is_alone_as, is_as
from .store import Access, access_of, files_below
from .verify import remove

MODES = ("link", "symlink", "copy", "move", "list", "ask")
INDEX = "index.jsonl"
# What is on its way from the hosts, and the lines that each is asked for.
INCOMING = ".incoming"
WANTED = "wanted.jsonl"
LISTED_PROBLEMS = 1000


@dataclass(frozen=True)
class Request:
    """What to gather, and how.

    mode: link (hard links), symlink (relative), copy, move (from sources that are there for that alone), list (index.jsonl and
    nothing else), or ask (what a move would need: the lines in .incoming/HOST/wanted.jsonl). dataset_dir: where packed data
    sets lie. formats: empty for all there are. partial: also with records missing.
    """

    dest: str
    mode: str
    sources: list[Source]
    dataset_dir: str | None = None
    formats: tuple[str, ...] = ()
    draft_vocab_size: int = 0
    partial: bool = False
    group: str | None = None
    workers: int = 0


def read_request(values: dict[str, Any]) -> Request:
    """Check a request. Raises Refusal naming the key."""
    try:
        request = Request(
            **{**values, "sources": [Source(**item) for item in values["sources"]], "formats": tuple(values.get("formats", ()))}
        )
    except (KeyError, TypeError) as error:
        raise Refusal(f"a collection needs dest, mode and sources with host, manifest, run and place: {error}") from error
    if request.mode not in MODES:
        raise Refusal(f"mode is {request.mode!r}; it must be one of {', '.join(MODES)}")
    if not os.path.isabs(request.dest):
        raise Refusal(f"dest is {request.dest!r}; give an absolute path")
    return request


def collect(request: Request) -> dict[str, Any]:
    """Gather the states.

    Returns `{ok, changed, run, records, expected, tokens, bytes, superseded, hosts, wanted, problems}`: hosts counts the
    records used of each, wanted (mode ask) those that it has to give, problems are `{host, id, file, reason}`.
    Raises Refusal where nothing can be gathered, OSError where the destination cannot be written.
    """
    identity = identity_of(request.sources)
    run = hs_manifest.run_of(identity)
    access = access_of(request.group)
    try:
        hs_manifest.claim_directory(request.dest, run, access.directory_mode, access.gid, hs_manifest.COLLECTION)
        lock = hs_manifest.Lock(request.dest)
        try:
            provenance = {"collected_from": {source.host: source.place for source in request.sources}, "mode": request.mode}
            if request.mode != "ask":
                hs_manifest.claim_run(request.dest, identity, provenance, access.file_mode, access.gid)
            elif (known := hs_manifest.read_json(os.path.join(request.dest, hs_manifest.RUN))) and known.get("identity") != identity:
                raise Refusal(hs_manifest.other_identity(request.dest, known.get("identity"), identity))
            with tempfile.TemporaryFile(dir=request.dest) as spool:
                return _Collection(request, access, identity).gather(spool)
        finally:
            lock.close()
    except hs_manifest.ManifestError as error:
        raise Refusal(str(error)) from error


class _Collection:
    def __init__(self, request: Request, access: Access, identity: dict[str, Any]) -> None:
        self.request, self.access = request, access
        self.identity, self.run = identity, hs_manifest.run_of(identity)
        self.dataset = self._open_dataset(identity)
        self.manifest = hs_manifest.Manifest(request.dest)
        self.sources = {source.host: source for source in request.sources}
        self.problems: list[dict[str, Any]] = []
        self.changed = False

    def _open_dataset(self, identity: dict[str, Any]) -> PackedDataset | None:
        if not self.request.dataset_dir:
            return None
        path = os.path.join(self.request.dataset_dir, identity["dataset"][:16])
        if not os.path.isdir(path):
            return None
        dataset = PackedDataset(path)
        if dataset.meta["sha256"] != identity["dataset"]:
            raise Refusal(f"data set {path} has hash {dataset.meta['sha256']}, the states are of {identity['dataset']}; stage it again")
        return dataset

    def gather(self, spool: Any) -> dict[str, Any]:
        request = self.request
        listing = request.mode == "list"
        merged = merge(
            request.sources,
            {} if listing else self.manifest.entries,
            set(request.formats),
            None if request.mode == "ask" else spool,
            self._is_intact,
            fallback=not listing,
        )
        formats = {name for entry in merged.used.values() for name in formats_of(entry)}
        self._refuse(merged, formats)
        wanted: dict[str, int] = {}
        if listing:
            self._write_index(merged)
        else:
            self._name(merged, formats)
            left = self._left(merged)
            if request.mode == "ask":
                wanted = self._ask([entry for entry, _files in left if entry["id"] not in merged.kept])
            else:
                if left or self.manifest.stale or set(self.manifest.entries) - set(merged.used):
                    # What is of all records together is of those before, until it is written again.
                    together.forget(request.dest, set(together.known_of(request.dest)))
                placing = Placing(request.mode, request.sources, self.manifest, merged.kept, self.access, request.workers)
                self.problems = placing.place(left)
                self.changed = placing.changed
                self._finish(merged, formats)
        entries = merged.used.values()
        return {
            "ok": not self.problems,
            "changed": self.changed,
            "run": self.run,
            "records": len(entries),
            "expected": len(self.dataset) if self.dataset else None,
            "tokens": sum(entry["tokens"] for entry in entries),
            "bytes": sum(entry["bytes"] for entry in entries),
            "superseded": merged.superseded,
            "hosts": merged.hosts,
            "wanted": wanted,
            "problems": self.problems[:LISTED_PROBLEMS],
        }

    def _refuse(self, merged: Merged, formats: set[str]) -> None:
        """Raise Refusal for what cannot become a whole collection, before anything is placed."""
        request = self.request
        if not merged.used:
            raise Refusal("no host has a record that is done; run extract.yml first")
        needs = [name for name in ("speculators",) if name in formats and request.mode != "list"]
        needs += ["extraction_draft_vocab_size"] if request.draft_vocab_size and request.mode != "list" else []
        if needs and self.dataset is None:
            raise Refusal(
                f"{' and '.join(needs)} needs the packed data set, and it is not below {request.dataset_dir}; run stage.yml, or name the"
                " directory that holds it (extraction_collect_dataset_dir)"
            )
        if request.draft_vocab_size and not formats & {"specforge", "speculators"}:
            raise Refusal(
                "extraction_draft_vocab_size is for the formats specforge and speculators, and there is none of them; leave it at 0"
            )
        if request.mode != "list" and "speculators" in formats:
            arrow.need_package()
        if request.mode != "list" and request.draft_vocab_size:
            vocab.check(self.dataset, request.draft_vocab_size)
        if self.dataset is None and not request.partial:
            raise Refusal(
                f"whether records are missing cannot be told without the packed data set {self.identity['dataset'][:16]}, and it is not below"
                f" {request.dataset_dir}; name the directory that holds it (extraction_collect_dataset_dir), or collect what there is with"
                " extraction_collect_partial: true"
            )
        if self.dataset is not None and not request.partial and len(merged.used) < len(self.dataset):
            raise Refusal(
                f"{len(self.dataset) - len(merged.used):,} of {len(self.dataset):,} records are done on no host; run extract.yml to"
                " its end, or collect what there is with extraction_collect_partial: true"
            )

    def _name(self, merged: Merged, formats: set[str]) -> None:
        """Give speculators' files the numbers of their rows: 0 to n-1 without a hole, each where it was if it can be."""
        if "speculators" not in formats:
            return
        rows: dict[int, int] = {}
        taken: set[int] = set()
        for record, entry in self.manifest.entries.items():
            if record in merged.used:
                row = next(
                    (number_of(file["file"]) for file in hs_manifest.files_of(entry) if file["file"].startswith("speculators/")), None
                )
                if row is not None and row < len(merged.used) and row not in taken:
                    rows[record] = row
                    taken.add(row)
        free = iter(sorted(set(range(len(merged.used))) - taken))
        for record in sorted(merged.used):
            if record not in rows:
                rows[record] = next(free)
        for record, entry in merged.used.items():
            files = [dict(file) for file in hs_manifest.files_of(entry)]
            for file in files:
                if file["file"].startswith("speculators/"):
                    file["from"], file["file"] = file.get("from", file["file"]), file_name("speculators", rows[record])
            if "files" in entry:
                entry["files"] = files
            else:
                entry.update(files[0])

    def _is_intact(self, entry: dict[str, Any]) -> bool:
        """Whether the collection's own copy of a record is what its line says. Raises OSError where that cannot be told."""
        try:
            return all(file_hash(os.path.join(self.request.dest, file["file"])) == file["sha256"] for file in hs_manifest.files_of(entry))
        except OSError as error:
            # It may be readable again tomorrow, and it may be the last copy: what is not intact goes.
            if error.errno not in hs_manifest.GONE:
                raise
            return False

    def _left(self, merged: Merged) -> list[Left]:
        """The records whose line or files are not in the collection as they have to be."""
        left = []
        for record, entry in sorted(merged.used.items()):
            known = self.manifest.entries.get(record, {"files": []})
            there = (
                {(file["file"], file["sha256"]) for file in hs_manifest.files_of(known)} if known.get("host") == entry["host"] else set()
            )
            files = hs_manifest.files_of(entry)
            bring = [file for file in files if (file["file"], file["sha256"]) not in there or not self._stands(entry, file, merged.kept)]
            if bring or len(there) != len(files):
                left.append((entry, bring))
        return left

    def _stands(self, entry: dict[str, Any], file: dict[str, Any], kept: set[int]) -> bool:
        """Whether a file of the collection is of the kind that the mode makes: a copy, a hard link or a symbolic one."""
        mode, path = self.request.mode, os.path.join(self.request.dest, file["file"])
        root = self.sources[entry["host"]].root if entry["id"] not in kept else None
        # What was pulled is not the host's file itself.
        if root is None or mode == "move":
            return is_alone_as(mode, path)
        return is_as(mode, path, os.path.join(root, file.get("from", file["file"])))

    def _ask(self, left: list[dict[str, Any]]) -> dict[str, int]:
        """Write for each host the lines that it has to give."""
        wanted: dict[str, int] = {}
        for source in self.request.sources:
            lines = [entry for entry in left if entry["host"] == source.host]
            directory = os.path.join(self.request.dest, INCOMING, source.host)
            os.makedirs(directory, mode=0o700, exist_ok=True)
            hs_manifest.write_lines(os.path.join(directory, WANTED), lines)
            wanted[source.host] = len(lines)
        return wanted

    def _finish(self, merged: Merged, formats: set[str]) -> None:
        """Manifest in order, nothing else beside it, and what the trainers want to know of all records together."""
        dest, access = self.request.dest, self.access
        manifest = hs_manifest.Manifest(dest)
        gone = set(manifest.entries) - set(merged.used)
        lines = [manifest.entries[record] for record in sorted(set(manifest.entries) - gone)]
        if self.changed or gone or manifest.superseded != merged.superseded:
            hs_manifest.write_lines(os.path.join(dest, hs_manifest.MANIFEST), _chain(lines, merged), access.file_mode, access.gid)
            self.changed = True
        named = {file["file"] for entry in lines for file in hs_manifest.files_of(entry)}
        for file in list(files_below(dest)):
            ours = number_of(file) is not None or dumpfile.temporary_pid(os.path.basename(file)) is not None
            if file not in named and ours:
                self.changed |= remove(dest, file, links=True)
        if self.problems:
            return
        self._write_together(lines, formats)
        if self.request.mode == "move":
            for source in self.request.sources:
                shutil.rmtree(os.path.join(dest, INCOMING, source.host), ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(dest, INCOMING))

    def _write_together(self, lines: list[dict[str, Any]], formats: set[str]) -> None:
        """What the trainers want to know of all records together; what was damaged since and is not wanted goes."""
        dest, access, size = self.request.dest, self.access, self.request.draft_vocab_size
        whole = together.whole_of(dest)
        written: set[str] = set()
        removed: set[str] = set()
        if "speculators" in formats:
            rows = np.full(len(lines), -1, dtype=np.int64)
            for entry in lines:
                names = (file["file"] for file in hs_manifest.files_of(entry) if file["file"].startswith("speculators/"))
                rows[[number_of(name) for name in names]] = entry["id"]
            written, removed = arrow.write_arrow(dest, self.dataset, rows, whole, access)
        if size:
            written |= vocab.write_vocab(dest, formats, self.dataset, [entry["id"] for entry in lines], size, whole, access)
        for file in together.there(dest) - whole - written:
            remove(dest, file)
            removed.add(file)
        together.note(dest, whole - written - removed, written, access)
        self.changed |= bool(written or removed)

    def _write_index(self, merged: Merged) -> None:
        """One line a copy of a record, the used ones first: its manifest line, and `at`, its files as HOST:PATH."""
        places = {source.host: source.place for source in self.request.sources}
        path = os.path.join(self.request.dest, INDEX)
        before = file_hash(path) if os.path.exists(path) else ""
        lines = (
            dict(entry, at=[f"{entry['host']}:{places[entry['host']]}/{file['file']}" for file in hs_manifest.files_of(entry)])
            for entry in _chain([entry for _record, entry in sorted(merged.used.items())], merged)
        )
        hs_manifest.write_lines(path, lines, self.access.file_mode, self.access.gid)
        self.changed = file_hash(path) != before


def _chain(lines: list[dict[str, Any]], merged: Merged) -> Iterator[dict[str, Any]]:
    yield from lines
    yield from merged.second_copies()
