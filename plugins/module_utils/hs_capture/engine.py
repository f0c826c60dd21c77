# SPDX-License-Identifier: Apache-2.0
"""The few facts of the running SGLang that capture needs; the only reader of its internals."""

from __future__ import annotations

from typing import Any, Callable

_FUSION = "enable_flashinfer_allreduce_fusion"
_NO_FUSION = "enforce_disable_flashinfer_allreduce_fusion"


def server_settings() -> Callable[[str], Any]:
    """Return a reader of server arguments in effect (None for unknown names).

    What the operator typed and what SGLang resolved it to live apart from
    0.5.15 on; the accessors changed in 0.5.19 and 0.5.20. Early releases keep
    a dictionary of the few arguments that models ask for.
    """
    record = _server_arguments()
    if isinstance(record, dict):
        return record.get
    if hasattr(record, "resolved_dict"):
        return record.resolved_dict().get
    resolved = record._resolved() if hasattr(record, "_resolved") else record
    return lambda name: getattr(resolved, name, getattr(record, name, None))


def switch_fusion_off() -> None:
    """Let no layer leave its all-reduce to the next one, where no flag says so (before 0.5.10).

    These releases ask their arguments at each forward, in this process; so every rank has to call it before the first one.
    """
    record = _server_arguments()
    if isinstance(record, dict):
        if _FUSION in record:
            record[_FUSION] = False
    elif hasattr(record, _FUSION) and not hasattr(record, _NO_FUSION):
        setattr(record, _FUSION, False)


def _server_arguments() -> Any:
    """The server arguments of this process, as the release keeps them."""
    try:
        from sglang.srt.runtime_context import get_server_args
    except ImportError:
        try:
            from sglang.srt.server_args import get_global_server_args as get_server_args
        except ImportError:
            from sglang.srt.managers.schedule_batch import global_server_args_dict

            return global_server_args_dict
    return get_server_args()


def tensor_parallel() -> tuple[int, int]:
    """Return (rank, size) of this process in tensor parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        return parallel.tp_rank, parallel.tp_size
    except (ImportError, AttributeError):
        pass
    try:
        from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    except ImportError:
        # The first releases of 0.4 use vLLM's.
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def batches_name_requests() -> bool:
    """Whether a forward batch carries the rids of its requests (0.5.10 and later)."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return "rids" in ForwardBatch.__dataclass_fields__


def snapshot(hidden: Any, forward_batch: Any) -> Any:
    """The complete residual stream [rows, width] behind a layer that leaves its sum to the next.

    A collective where a sum is owed: every tensor parallel rank has to call it.
    """
    from sglang.srt.layers.layer_boundary.residual import batch

    return batch.snapshot(hidden, forward_batch)


def sglang_version() -> str:
    """The version that SGLang reports of itself."""
    from sglang.version import __version__

    return __version__
