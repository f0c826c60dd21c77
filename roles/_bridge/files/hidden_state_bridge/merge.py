# SPDX-License-Identifier: Apache-2.0
"""Merge the manifests of all hosts: one copy of each record is used, the others are superseded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import hs_manifest

from .errors import Refusal


@dataclass(frozen=True)
class Source:
    """One host's states: its manifest and run.json, and the directory that its lines' paths begin at (None: not on this machine).

    place: the directory as the host itself names it.
    """

    host: str
    manifest: str
    run: str
    place: str
    root: str | None = None


@dataclass
class Merged:
    """The used line of each record, with its host; `spool` holds the lines of second copies, where they are wanted."""

    used: dict[int, dict[str, Any]]
    spool: BinaryIO | None
    superseded: int = 0
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


def merge(sources: list[Source], kept: dict[int, dict[str, Any]], formats: set[str], spool: BinaryIO | None) -> Merged:
    """Choose one copy of each record.

    kept: the lines of records that are in the collection already. Such a copy stays, unless its own host has another by now; else
    the first host in the order of the sources gives the record. formats: what is taken of each record, everything where empty.
    Raises Refusal where a host's records are not in a format that is asked for, or in other formats than another's.
    """
    names = {source.host for source in sources}
    merged = Merged({record: entry for record, entry in kept.items() if entry.get("host") not in names}, spool)
    alike: tuple[str, set[str]] | None = None
    for source in sources:
        # The later line of a record is the one that counts.
        lines = {entry["id"]: entry for entry in hs_manifest.read_lines(source.manifest)}
        for record, entry in lines.items():
            there = {file["file"].partition("/")[0] for file in hs_manifest.files_of(entry)}
            wanted = formats or there
            if wanted - there:
                raise Refusal(
                    f"{source.host}: record {record} is in the format {', '.join(sorted(there))}, not in"
                    f" {', '.join(sorted(wanted - there))}; make it with convert.yml, or leave extraction_collect_formats empty"
                )
            if alike and alike[1] != wanted:
                raise Refusal(f"{alike[0]} has the formats {', '.join(sorted(alike[1]))}, {source.host} {', '.join(sorted(wanted))}")
            alike = alike or (source.host, wanted)
            files = [file for file in hs_manifest.files_of(entry) if file["file"].partition("/")[0] in wanted]
            entry = {key: value for key, value in entry.items() if key not in ("files", "file", "bytes", "sha256")}
            entry.update(hs_manifest.named(files), host=source.host)
            here = kept.get(record)
            if record not in merged.used:
                merged.used[record] = entry
            elif here is not None and here["host"] == source.host:
                _put(merged, merged.used.pop(record))
                merged.used[record] = entry
            else:
                _put(merged, entry)
    for entry in merged.used.values():
        merged.hosts[entry["host"]] = merged.hosts.get(entry["host"], 0) + 1
    return merged


def _put(merged: Merged, entry: dict[str, Any]) -> None:
    merged.superseded += 1
    if merged.spool is not None:
        merged.spool.write(json.dumps(dict(entry, superseded=True), separators=(",", ":")).encode() + b"\n")
