# SPDX-License-Identifier: Apache-2.0
"""Merge the manifests of all hosts: one copy of each record is used, the others are superseded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import hs_manifest

from .errors import Refusal


@dataclass(frozen=True)
class Source:
    """One host's states: its manifest and run.json, and the directory that its lines' paths begin at (None: not on this machine).

    place: the directory as the host itself names it. done: the records that the host itself finds done, as ranges (None: not known).
    """

    host: str
    manifest: str
    run: str
    place: str
    root: str | None = None
    done: str | None = None


@dataclass
class Merged:
    """The used line of each record, with its host; `spool` holds the lines of second copies, where they are wanted.

    kept: the records whose used line is the collection's own.
    """

    used: dict[int, dict[str, Any]]
    spool: BinaryIO | None
    superseded: int = 0
    kept: set[int] = field(default_factory=set)
    hosts: dict[str, int] = field(default_factory=dict)

    def second_copies(self) -> Iterator[dict[str, Any]]:
        """The superseded lines, one at a time."""
        if self.spool is not None:
            self.spool.seek(0)
            yield from map(json.loads, self.spool)


def identity_of(sources: list[Source]) -> dict[str, Any]:
    """The identity that all sources have. Raises Refusal where they are of different runs."""
    known: dict[str, Any] | None = None
    for source in sources:
        try:
            run = hs_manifest.read_json(source.run)
        except hs_manifest.ManifestError as error:
            raise Refusal(f"{source.host}: {error}") from error
        if run is None:
            raise Refusal(
                f"{source.host}: {source.place} has no {hs_manifest.RUN}; take the host out with --limit, or mend extraction_output_dir"
            )
        if known is None:
            known = run["identity"]
        elif known != run["identity"]:
            raise Refusal(f"{source.host}: " + hs_manifest.other_identity(source.place, run["identity"], known))
    if known is None:
        raise Refusal("there is no host to collect from")
    return known


def merge(
    sources: list[Source],
    kept: dict[int, dict[str, Any]],
    formats: set[str],
    spool: BinaryIO | None,
    intact: Callable[[dict[str, Any]], bool],
    fallback: bool = True,
) -> Merged:
    """Choose one copy of each record.

    kept: the lines of records that are in the collection already. Such a copy stays while its own host is not asked or has that very
    copy; where that host has another by now, that is taken. Where it has none, nobody vouches for ours: another host's is taken first,
    and ours stays only if `intact`, which reads it, says so. Else the first host in the order of the sources gives the record.
    A line whose files are not on its host counts for nothing; with `fallback`, one that is a record's only line is used all the same,
    to be named. formats: what is taken of each record, everything where empty.
    Raises Refusal where records are not in a format that is asked for, or in other formats than those of another host.
    """
    names = {source.host for source in sources}
    merged = Merged({record: dict(entry) for record, entry in kept.items() if entry.get("host") not in names}, spool)
    merged.kept.update(merged.used)
    alike: tuple[str, set[str]] | None = None
    absent: dict[int, dict[str, Any]] = {}
    for source in sources:
        # The later line of a record is the one that counts.
        lines = {entry["id"]: entry for entry in hs_manifest.read_lines(source.manifest)}
        is_done = _done_of(source)
        for record, entry in lines.items():
            there = formats_of(entry)
            wanted = formats or there
            if wanted - there:
                raise Refusal(
                    f"{source.host}: record {record} is in the format {', '.join(sorted(there))}, not in"
                    f" {', '.join(sorted(wanted - there))}; make it with convert.yml, or leave extraction_collect_formats empty"
                )
            if alike and alike[1] != wanted:
                raise Refusal(f"{alike[0]} has the formats {', '.join(sorted(alike[1]))}, {source.host} {', '.join(sorted(wanted))}")
            alike = alike or (source.host, wanted)
            entry = dict(_cut(entry, wanted), host=source.host)
            here = kept.get(record)
            if not is_done(entry):
                if fallback and source.done is None:
                    absent.setdefault(record, entry)
            elif record not in merged.used:
                merged.used[record] = entry
            elif here is not None and here["host"] == source.host:
                _put(merged, merged.used.pop(record))
                merged.used[record] = entry
            else:
                _put(merged, entry)
    for record in sorted(set(kept) - set(merged.used)):
        if intact(kept[record]):
            merged.used[record] = dict(kept[record])
            merged.kept.add(record)
    merged.used.update((record, entry) for record, entry in absent.items() if record not in merged.used)
    for record in sorted(merged.kept):
        merged.used[record] = _alike(merged.used[record], formats, alike[1] if alike else set())
        alike = alike or (merged.used[record]["host"], formats_of(merged.used[record]))
    for entry in merged.used.values():
        merged.hosts[entry["host"]] = merged.hosts.get(entry["host"], 0) + 1
    return merged


def formats_of(entry: dict[str, Any]) -> set[str]:
    """The formats that a record is in."""
    return {file["file"].partition("/")[0] for file in hs_manifest.files_of(entry)}


def _done_of(source: Source) -> Callable[[dict[str, Any]], bool]:
    """Says whether a line's files are on the host: by what the host says is done, else by the sizes in its directory where that is seen."""
    if source.done is not None:
        done = {record for first, last in hs_manifest.decode_ranges(source.done) for record in range(first, last + 1)}
        return lambda entry: entry["id"] in done
    if source.root is None or source.root != source.place:
        return lambda entry: True
    return lambda entry: all(hs_manifest.agrees(source.root, file) for file in hs_manifest.files_of(entry))


def _cut(entry: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
    """The line with the files of the wanted formats alone."""
    files = [file for file in hs_manifest.files_of(entry) if file["file"].partition("/")[0] in wanted]
    about = {key: value for key, value in entry.items() if key not in ("files", "file", "bytes", "sha256", "from")}
    only = [{key: file[key] for key in ("file", "bytes", "sha256", "from") if key in file} for file in files]
    return {**about, **hs_manifest.named(only)}


def _alike(entry: dict[str, Any], formats: set[str], others: set[str]) -> dict[str, Any]:
    """A kept line in the formats that are asked for, or else those of the others. Raises Refusal where it is in none such."""
    there = formats_of(entry)
    wanted = formats or others or there
    if wanted - there or (wanted != there and not formats):
        raise Refusal(
            f"record {entry['id']} of {entry['host']} is in the collection in the format {', '.join(sorted(there))}, and what is collected is"
            f" in {', '.join(sorted(wanted))}; collect from {entry['host']} as well, or into a directory of its own"
        )
    return _cut(entry, wanted)


def _put(merged: Merged, entry: dict[str, Any]) -> None:
    merged.superseded += 1
    if merged.spool is not None:
        merged.spool.write(json.dumps(dict(entry, superseded=True), separators=(",", ":")).encode() + b"\n")
