# SPDX-License-Identifier: Apache-2.0
"""The one hash of whole files: of sources, of output files, of what was collected."""

from __future__ import annotations

import hashlib

BLOCK_BYTES = 1 << 22


def file_hash(path: str) -> str:
    """SHA-256 of a file, in hex. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()
