# SPDX-License-Identifier: Apache-2.0
"""What brings a record back whose files are not as its line says: another playbook for each kind of directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import hs_manifest


@dataclass(frozen=True)
class Remedy:
    """Parts of messages. repair: what takes the record's line away; writer: what then makes its files again; maker: a run of that."""

    repair: str
    writer: str
    maker: str
    verb: str = "writes"

    @property
    def again(self) -> str:
        return f"{self.maker} {self.verb} it again"

    @property
    def commands(self) -> str:
        return f"run {self.repair} and {self.writer}"


EXTRACTED = Remedy("verify.yml -e verify_repair=true", "extract.yml", "the next extraction")
COLLECTED = Remedy("verify --repair", "collect.yml", "the next collection", "brings")


def remedy_of(directory: str, run: dict[str, Any] | None) -> Remedy:
    """That of a host's own directory, by its run.json: files that were converted are not the extraction's to write."""
    if not ((run or {}).get("provenance") or {}).get("converted_from"):
        return EXTRACTED
    above = os.path.dirname(os.path.normpath(directory))
    return Remedy(f"{EXTRACTED.repair} -e extraction_output_dir={above}", "convert.yml", "the next convert.yml")


def remedy_in(directory: str, kind: str) -> Remedy:
    """That of a directory on this machine whose marker says `kind`. Raises ManifestError."""
    if kind == hs_manifest.COLLECTION:
        return COLLECTED
    return remedy_of(directory, hs_manifest.read_json(os.path.join(directory, hs_manifest.RUN)))
