# SPDX-License-Identifier: Apache-2.0
"""Server settings under which states on TP rank 0 would be wrong or missing."""

from __future__ import annotations

from typing import Any, Callable

_SWITCHED_OFF = (None, False, "", "none", "null", "disabled")


class CaptureRefused(RuntimeError):
    """Capture was asked for and cannot be right; the server must not start so."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"hidden state capture refused: {reason}; {remedy}, or unset SGLANG_HS_DUMP_DIR")
        self.reason = reason
        self.remedy = remedy


class NotCapturable(Exception):
    """One request's states cannot be proved complete: it gets an error marker."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


def _on(value: Any) -> bool:
    return value not in _SWITCHED_OFF


def _many(value: Any) -> bool:
    return value is not None and int(value) > 1


# (setting, when it is refused, what TP rank 0 would hold, the flag to change)
_REFUSED: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    ("pp_size", _many, "each pipeline stage sees its own layers", "start with --pp-size 1"),
    (
        "enable_dp_attention",
        _on,
        "TP rank 0 holds its own requests only",
        "drop --enable-dp-attention",
    ),
    (
        "dp_size",
        _many,
        "TP rank 0 of each replica would write into the same directory",
        "start with --dp-size 1",
    ),
    (
        "enable_two_batch_overlap",
        _on,
        "the layer loop does not run for the sparse layers",
        "drop --enable-two-batch-overlap",
    ),
    (
        "speculative_algorithm",
        _on,
        "forwards are verification steps",
        "drop --speculative-algorithm",
    ),
    (
        "moe_a2a_backend",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "start with --moe-a2a-backend none",
    ),
    ("enable_deepep_moe", _on, "TP rank 0 holds a shard of the tokens", "drop --enable-deepep-moe"),
    ("moe_dp_size", _many, "TP rank 0 holds a shard of the tokens", "start with --moe-dp-size 1"),
    ("attn_dp_size", _many, "TP rank 0 holds its own requests only", "start with --attn-dp-size 1"),
    ("dwdp_size", _many, "TP rank 0 is not known to hold whole states", "start with --dwdp-size 1"),
    (
        "moe_dense_tp_size",
        lambda value: value == 1,
        "TP rank 0 holds a shard of the tokens",
        "drop --moe-dense-tp-size",
    ),
    (
        "enable_attn_tp_input_scattered",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-attn-tp-input-scattered",
    ),
    (
        "enable_layernorm_sp",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-layernorm-sp",
    ),
    (
        "attn_cp_size",
        _many,
        "TP rank 0 holds a shard of the tokens",
        "start with --attn-cp-size 1",
    ),
    ("dcp_size", _many, "TP rank 0 holds a shard of the tokens", "start with --dcp-size 1"),
    (
        "enable_prefill_cp",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-prefill-cp",
    ),
    (
        "enable_prefill_context_parallel",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-prefill-context-parallel",
    ),
    (
        "enable_nsa_prefill_context_parallel",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-nsa-prefill-context-parallel",
    ),
    (
        "enable_dsa_prefill_context_parallel",
        _on,
        "TP rank 0 holds a shard of the tokens",
        "drop --enable-dsa-prefill-context-parallel",
    ),
    (
        "enable_mixed_chunk",
        _on,
        "decoding steps hide among prefill rows",
        "drop --enable-mixed-chunk",
    ),
    (
        "disaggregation_mode",
        _on,
        "prefill runs on another server",
        "start with --disaggregation-mode null",
    ),
    ("enable_pdmux", _on, "prefill is split by layers", "drop --enable-pdmux"),
    ("dllm_algorithm", _on, "forwards are denoising steps", "drop --dllm-algorithm"),
)


def check_settings(read: Callable[[str], Any]) -> None:
    """Refuse server settings that corrupt or lose states.

    `read` gives the value in effect of a server argument, None where the
    release has no such argument. Raises CaptureRefused naming the flag.
    """
    for name, refused, consequence, remedy in _REFUSED:
        value = read(name)
        if refused(value):
            raise CaptureRefused(f"{name} is {value!r} and {consequence}", remedy)
    graphs = read("cuda_graph_config")
    backend = _prefill_graph_backend(graphs)
    if _on(backend):
        raise CaptureRefused(
            f"prefill runs from CUDA graphs ({backend}) and the layer loop does not run at replay",
            "start with --disable-prefill-cuda-graph",
        )
    # Up to 0.5.13 there is no such configuration; SGLang settles these two by device and model before it loads that.
    if graphs is None and read("disable_piecewise_cuda_graph") is False:
        raise CaptureRefused(
            "disable_piecewise_cuda_graph is False, so prefill runs from CUDA graphs and the layer loop does not run at replay",
            "start with --disable-piecewise-cuda-graph",
        )
    if graphs is None and _on(read("enable_piecewise_cuda_graph")):
        raise CaptureRefused(
            "enable_piecewise_cuda_graph is True, so prefill runs from CUDA graphs and the layer loop does not run at replay",
            "drop --enable-piecewise-cuda-graph",
        )


def check_unnamed(read: Callable[[str], Any]) -> None:
    """Refuse chunked prefill and the prefix cache where requests are known by all their token ids only."""
    size = read("chunked_prefill_size")
    if size is not None and int(size) > 0:
        raise CaptureRefused(
            f"chunked_prefill_size is {size}, and this release's batches carry no rid that would hold the pieces together",
            "start with --chunked-prefill-size -1",
        )
    if read("disable_radix_cache") is False:
        raise CaptureRefused(
            "the prefix cache is on, and this release's batches carry no rid that would tell whose rows are missing",
            "start with --disable-radix-cache",
        )


def check_batch(forward_batch: Any) -> None:
    """Raise NotCapturable for a forward whose layer loop is not the whole model."""
    if getattr(forward_batch, "can_run_tbo", False):
        raise NotCapturable(
            "the batch was split by two-batch overlap",
            "start the server without --enable-two-batch-overlap",
        )


def check_complete(tensor: Any, what: str) -> None:
    """Raise NotCapturable for what SGLang marks, or hands on, as one rank's partial sum."""
    if getattr(tensor, "_sglang_needs_allreduce_fusion", False):
        raise NotCapturable(
            f"{what} is one rank's partial sum: all-reduce fusion left the rest to the next layer",
            "start the server with --enforce-disable-flashinfer-allreduce-fusion and without --enable-aiter-allreduce-fusion "
            "(0.5.9 and before have neither flag: report this release)",
        )
    if not hasattr(tensor, "shape"):
        raise NotCapturable(
            f"{what} is a {type(tensor).__name__}, not a tensor: its sum is left to the next layer",
            "start the server with --tp-size 1, or capture a model that SGLang gives its own capture argument",
        )


def check_state(tensor: Any, rows: int, width: int, what: str) -> None:
    """Raise NotCapturable unless `tensor` is a complete [rows, width] state."""
    check_complete(tensor, what)
    if tuple(tensor.shape) != (rows, width):
        raise NotCapturable(
            f"{what} has shape {list(tensor.shape)}, expected {[rows, width]}",
            "start the server without data, context or sequence parallelism",
        )


def _prefill_graph_backend(config: Any) -> Any:
    if isinstance(config, dict):
        return (config.get("prefill") or {}).get("backend")
    return getattr(getattr(config, "prefill", None), "backend", None)
