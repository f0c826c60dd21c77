# SPDX-License-Identifier: Apache-2.0
"""The few facts of the running SGLang that capture needs; the only reader of its internals."""

from __future__ import annotations

from typing import Any, Callable


def server_settings() -> Callable[[str], Any]:
    """Return a reader of server arguments in effect (None for unknown names).

    What the operator typed and what SGLang resolved it to live apart from
    0.5.15 on; the accessors changed in 0.5.19 and 0.5.20.
    """
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args as get_server_args
    record = get_server_args()
    if hasattr(record, "resolved_dict"):
        return record.resolved_dict().get
    resolved = record._resolved() if hasattr(record, "_resolved") else record
    return lambda name: getattr(resolved, name, getattr(record, name, None))


def tensor_parallel() -> tuple[int, int]:
    """Return (rank, size) of this process in tensor parallelism."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size


def sglang_version() -> str:
    """The version that SGLang reports of itself."""
    from sglang.version import __version__

    return __version__
