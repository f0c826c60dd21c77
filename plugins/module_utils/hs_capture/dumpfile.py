# SPDX-License-Identifier: Apache-2.0
"""The dump format: one safetensors file for a request and prefill piece.

A dump is named ``<rid>.<start>.safetensors`` and holds t tokens from offset
`start` of the request:

=====================  ==========  =============================================
tensor                 shape       content
=====================  ==========  =============================================
``input_ids``          [t] int64   token ids
``layer_<k>``          [t, H]      output of decoder layer k, in the model's dtype
``final_post_norm``    [t, H]      output of the final norm (where captured)
``final_pre_norm``     [t, H]      input of the final norm (where captured)
=====================  ==========  =============================================

Metadata (all strings): format, rid, start, tokens, layers, final, dtype and
what the writer adds. A request that could not be captured leaves
``<rid>.error.json`` with the reason and the remedy in place of a dump.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FORMAT = "hidden_state_bridge.dump/1"
RID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
INPUT_IDS = "input_ids"
POST_NORM = "final_post_norm"
PRE_NORM = "final_pre_norm"
FINAL_TENSORS = {
    "post_norm": (POST_NORM,),
    "pre_norm": (PRE_NORM,),
    "both": (POST_NORM, PRE_NORM),
    "none": (),
}
STATE_DTYPES = ("bfloat16", "float16", "float32")
_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)\Z")


class DumpError(ValueError):
    """A dump or error marker is not what the format says."""


def layer_name(layer: int) -> str:
    """Name of the tensor that holds the output of `layer`."""
    return f"layer_{layer}"


def check_rid(rid: str) -> str:
    """Return `rid` if a dump may carry it, else raise DumpError."""
    if not RID_PATTERN.match(rid):
        raise DumpError(f"rid {rid!r} cannot name a dump; use up to 128 letters, digits, '.', '_' and '-', a letter or digit first")
    return rid


def dump_name(rid: str, start: int) -> str:
    """File name of the piece of `rid` that begins at token `start`."""
    if start < 0:
        raise DumpError(f"rid {rid}: a piece cannot start at token {start}")
    return f"{check_rid(rid)}.{start}.safetensors"


def error_name(rid: str) -> str:
    """File name of the error marker of `rid`."""
    return f"{check_rid(rid)}.error.json"


def temporary_name(name: str, pid: int | None = None) -> str:
    """Name under which process `pid` (this one by default) writes `name`."""
    return f".{name}.tmp-{os.getpid() if pid is None else pid}"


def temporary_pid(name: str) -> int | None:
    """The process that writes the temporary file `name`; None for any other file."""
    match = _TEMPORARY.match(name)
    return int(match[1]) if match else None


def write_dump(
    directory: str | os.PathLike[str],
    rid: str,
    start: int,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str],
) -> Path:
    """Write one dump (mode 0600) under a temporary name, rename it, return its path.

    `tensors` are contiguous CPU tensors by the names of the format; `metadata`
    is what the writer adds to format, rid, start, tokens and dtype. Raises
    DumpError for tensors the format does not allow and OSError where the
    directory cannot be written.
    """
    from safetensors.torch import save_file

    target = Path(directory) / dump_name(rid, start)
    dtype = _check_tensors(target.name, tensors)
    described = {
        **metadata,
        "format": FORMAT,
        "rid": rid,
        "start": str(start),
        "tokens": str(tensors[INPUT_IDS].shape[0]),
        "dtype": dtype,
    }
    temporary = target.with_name(temporary_name(target.name))
    try:
        # Made before the library opens it, so that states are never readable by others.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        save_file(tensors, temporary, metadata=described)
        os.chmod(temporary, 0o600)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read_dump(
    path: str | os.PathLike[str],
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return (metadata, tensors) of a dump.

    Raises DumpError for a file that is torn, of another format, or whose
    metadata disagree with its name or tensors; FileNotFoundError if absent.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such dump")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            names = opened.keys()
            tensors = {name: opened.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise DumpError(f"{path}: not a whole safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise DumpError(f"{path}: format {metadata.get('format')!r}, expected {FORMAT!r}")
    try:
        start, tokens = int(metadata["start"]), int(metadata["tokens"])
        expected_name = dump_name(metadata["rid"], start)
    except (KeyError, ValueError) as error:
        raise DumpError(f"{path}: metadata without a usable rid, start or tokens") from error
    if path.name != expected_name:
        raise DumpError(f"{path}: its metadata name {expected_name}")
    dtype = _check_tensors(str(path), tensors)
    if dtype != metadata.get("dtype") or tokens != tensors[INPUT_IDS].shape[0]:
        raise DumpError(
            f"{path}: metadata say {tokens} tokens of {metadata.get('dtype')}, tensors hold {tensors[INPUT_IDS].shape[0]} of {dtype}"
        )
    return metadata, tensors


def write_error(directory: str | os.PathLike[str], rid: str, reason: str, remedy: str) -> Path:
    """Write the error marker of `rid` (mode 0600, by rename) and return its path."""
    target = Path(directory) / error_name(rid)
    temporary = target.with_name(temporary_name(target.name))
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w", encoding="utf-8") as stream:
            json.dump({"reason": reason, "remedy": remedy}, stream)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read_error(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return ``{"reason": ..., "remedy": ...}``; raise DumpError for anything else."""
    try:
        marker = json.loads(Path(path).read_text(encoding="utf-8"))
        return {"reason": str(marker["reason"]), "remedy": str(marker["remedy"])}
    except (KeyError, TypeError, ValueError) as error:
        raise DumpError(f"{path}: not an error marker ({error})") from error


def _check_tensors(where: str, tensors: dict[str, torch.Tensor]) -> str:
    """Check names, shapes and dtypes; return the dtype that all states share."""
    ids = tensors.get(INPUT_IDS)
    if ids is None or ids.dim() != 1 or str(ids.dtype) != "torch.int64":
        raise DumpError(f"{where}: {INPUT_IDS} has to be [t] int64")
    shapes, dtypes = set(), set()
    for name, tensor in tensors.items():
        if name == INPUT_IDS:
            continue
        if name not in (POST_NORM, PRE_NORM) and not re.match(r"layer_\d+\Z", name):
            raise DumpError(f"{where}: unknown tensor {name!r}")
        shapes.add(tuple(tensor.shape))
        dtypes.add(str(tensor.dtype).partition(".")[2])
    if len(shapes) != 1 or len(dtypes) != 1:
        raise DumpError(f"{where}: states of unlike shape or dtype ({sorted(shapes)}, {sorted(dtypes)})")
    shape, dtype = shapes.pop(), dtypes.pop()
    if len(shape) != 2 or shape[0] != ids.shape[0] or shape[0] == 0:
        raise DumpError(f"{where}: states {list(shape)} for {ids.shape[0]} token ids")
    if dtype not in STATE_DTYPES:
        raise DumpError(f"{where}: states of dtype {dtype}; known are {', '.join(STATE_DTYPES)}")
    return dtype
