# SPDX-License-Identifier: Apache-2.0
"""How much memory and room a capture may take: on the GPU, in the host's ring, in the dump directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

from .dumpfile import ID_BYTES, INPUT_IDS, STATE_DTYPES
from .guards import CaptureRefused

MAX_BYTES = "SGLANG_HS_DUMP_MAX_BYTES"
WAIT_SECONDS = "SGLANG_HS_DUMP_WAIT_SECONDS"
DEFAULT_WAIT_SECONDS = 10.0
# SGLang's own default of --max-prefill-tokens.
_PREFILL_TOKENS = 16384
_SHARE_OF_FREE = 0.9
_RING_BATCHES = 4
# A state waits on the GPU for its copy to the host: two of them there keep the copy engine busy.
_STAGED_STATES = 2
_STAGED_MOST = 512 << 20


@dataclass(frozen=True)
class Layout:
    """What a row holds: `names` of the states, each `width` values of `dtype`, and the token id."""

    names: tuple[str, ...]
    width: int
    dtype: str

    @property
    def state_bytes(self) -> int:
        """Bytes of a row of one state."""
        return self.width * STATE_DTYPES[self.dtype].bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a dump."""
        return ID_BYTES + len(self.names) * self.state_bytes

    def place(self, name: str, rows: int) -> int:
        """Where a tensor begins in host memory for `rows` rows: the token ids are first, states follow in order."""
        if name == INPUT_IDS:
            return 0
        return _aligned(rows * ID_BYTES) + self.names.index(name) * _aligned(rows * self.state_bytes)

    def block_bytes(self, rows: int) -> int:
        """Bytes of host memory for `rows` rows."""
        return _aligned(rows * ID_BYTES) + len(self.names) * _aligned(rows * self.state_bytes)


@dataclass(frozen=True)
class Budget:
    """Bytes at most. batch: a full prefill batch. ring and directory together are the cap."""

    batch: int
    ring: int
    directory: int
    staging: int
    wait_seconds: float


def _aligned(size: int) -> int:
    """Of tensors in host memory, for the copies."""
    return -(-size // 64) * 64


def prefill_tokens(read: Callable[[str], Any]) -> int:
    """Tokens of a full prefill batch under the server arguments that `read` gives."""
    chunk = read("chunked_prefill_size")
    return chunk if chunk and chunk > 0 else read("max_prefill_tokens") or _PREFILL_TOKENS


def plan(environment: Mapping[str, str], layout: Layout, tokens: int, free: int, where: str) -> Budget:
    """Divide the cap. Dumps may take `free` bytes on the file system of `where`, `tokens` are a full prefill batch.

    Raises CaptureRefused for a variable that is no number and a cap below two full prefill batches.
    """
    seconds = _number(environment, WAIT_SECONDS, DEFAULT_WAIT_SECONDS)
    cap = int(_number(environment, MAX_BYTES, int(free * _SHARE_OF_FREE)))
    batch = tokens * layout.row_bytes
    if cap < 2 * batch:
        given = f"{MAX_BYTES}={cap}" if environment.get(MAX_BYTES) else f"{where} has {free} bytes free or in dumps, and {cap} of them"
        raise CaptureRefused(
            f"{given} cannot hold two prefill batches ({tokens} tokens x {layout.row_bytes} bytes x 2 = {2 * batch})",
            f"set {MAX_BYTES} to that at least, make room in {where}, or lower --max-prefill-tokens",
        )
    block = layout.block_bytes(tokens)
    ring = min(_RING_BATCHES * block, max(block, cap // 4))
    return Budget(
        batch=batch,
        ring=ring,
        directory=cap - ring,
        staging=min(_STAGED_STATES * tokens * layout.state_bytes, _STAGED_MOST),
        wait_seconds=seconds,
    )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise CaptureRefused(f"{name}={text!r} is not a number above 0", f"correct {name}")
    return value
