# SPDX-License-Identifier: Apache-2.0
"""Output formats: one module each, by the name that a configuration gives.

A format module has SUFFIX (of its files), FINAL (captured final states that it can use) and
`save(path, record, states)`, which writes one file and returns the SHA-256 of its bytes in hex.
"""

from __future__ import annotations

from . import safetensors, specforge

FORMATS = {"specforge": specforge, "safetensors": safetensors}
RECORDS_PER_DIRECTORY = 2000


def file_name(name: str, record: int) -> str:
    """Path of a record's file below the output directory: `specforge/rows_0-2000/data_7.ckpt`."""
    first = record // RECORDS_PER_DIRECTORY * RECORDS_PER_DIRECTORY
    return f"{name}/rows_{first}-{first + RECORDS_PER_DIRECTORY}/data_{record}{FORMATS[name].SUFFIX}"
