# SPDX-License-Identifier: Apache-2.0
"""Output formats: one module each, by the name that a configuration gives.

A format module has PLACE (path of a record's file below the format's directory), FINAL (captured final states that it can
use), KEEPS (the final state that its files hold, or None for whatever was captured),
`save(path, record, states)`, which writes one file and returns the SHA-256 of its bytes in hex, and
`load(path, layer_names)`, which gives a file's content back as files.Stored, by memory map where it can. It raises
OSError, or whatever the reader of a damaged file raises.
"""

from __future__ import annotations

import re

from . import modelopt, safetensors, safetensors_zstd, specforge, speculators

FORMATS = {
    "specforge": specforge,
    "speculators": speculators,
    "modelopt": modelopt,
    "safetensors": safetensors,
    "safetensors_zstd": safetensors_zstd,
}
RECORDS_PER_DIRECTORY = 2000


def file_name(name: str, number: int) -> str:
    """Path of a record's file below the output directory: `specforge/rows_0-2000/data_7.ckpt`."""
    first = number // RECORDS_PER_DIRECTORY * RECORDS_PER_DIRECTORY
    return f"{name}/{FORMATS[name].PLACE}".format(number=number, first=first, last=first + RECORDS_PER_DIRECTORY)


def number_of(path: str) -> int | None:
    """The number for which `file_name` gives that path, or None for a path that it never gives."""
    name = path.partition("/")[0]
    found = re.search(r"_([0-9]{1,12})\.[a-z.]+$", path)
    if name not in FORMATS or not found or file_name(name, int(found[1])) != path:
        return None
    return int(found[1])


def unfit(formats: tuple[str, ...], final: str) -> str:
    """Why these formats cannot be written from that captured final state; empty where they can."""
    for name in formats:
        accepted = FORMATS[name].FINAL
        if final not in accepted:
            return f"format {name} needs final {' or '.join(accepted)}, not {final}"
    return ""
