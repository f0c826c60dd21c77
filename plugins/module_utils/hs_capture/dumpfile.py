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

Beside them the directory may hold ``<rid>.<start>.fp<rank>`` (fingerprints),
``capture.json`` (the capture's counters), files under way and files given back
for use again; the latter two begin with a dot.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
FINGERPRINT_FORMAT = "hidden_state_bridge.fingerprint/1"
FINGERPRINT_VALUES = 4
COUNTERS_NAME = "capture.json"
COUNTERS_FORMAT = "hidden_state_bridge.capture/1"
ID_BYTES = 8


class StateType(NamedTuple):
    """How safetensors names a dtype, and bytes of a value."""

    code: str
    bytes: int


STATE_DTYPES = {"bfloat16": StateType("BF16", 2), "float16": StateType("F16", 2), "float32": StateType("F32", 4)}
_SUFFIX = ".safetensors"
_ERROR = ".error.json"
_NAME = re.compile(rf"(.+?)(?:\.\d+(?:{re.escape(_SUFFIX)}|\.fp\d+)|{re.escape(_ERROR)})\Z")
_TEMPORARY = re.compile(r"\..+\.tmp-(\d+)\Z")
_SPARE = re.compile(r"\.spare-\d+\Z")
_STATE_NAME = re.compile(rf"(layer_\d+|{POST_NORM}|{PRE_NORM})\Z")
# Far below the kernel's limit of 1,024.
_PARTS_AT_ONCE = 256


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
    return f"{check_rid(rid)}.{start}{_SUFFIX}"


def error_name(rid: str) -> str:
    """File name of the error marker of `rid`."""
    return f"{check_rid(rid)}{_ERROR}"


def fingerprint_name(rid: str, start: int, rank: int) -> str:
    """File name of what tensor parallel rank `rank` says of the piece of `rid` that begins at token `start`."""
    return f"{check_rid(rid)}.{start}.fp{rank}"


def rid_of(name: str) -> str:
    """The rid, which may hold dots, of a dump, error marker or file of fingerprints; empty for any other name."""
    match = _NAME.match(name)
    return match[1] if match else ""


def temporary_name(name: str, pid: int | None = None) -> str:
    """Name under which process `pid` (this one by default) writes `name`."""
    return f".{name}.tmp-{os.getpid() if pid is None else pid}"


def temporary_pid(name: str) -> int | None:
    """The process that writes the temporary file `name`; None for any other file."""
    match = _TEMPORARY.match(name)
    return int(match[1]) if match else None


def encode_header(
    rid: str,
    start: int,
    tokens: int,
    states: Sequence[str],
    width: int,
    dtype: str,
    metadata: Mapping[str, str],
) -> bytes:
    """The beginning of a dump, up to its data: token ids int64 [tokens], then `states` in order, each [tokens, width].

    `metadata` is what the writer adds to format, rid, start, tokens and dtype. Raises DumpError for what the format
    does not allow.
    """
    where = dump_name(rid, start)
    if tokens < 1:
        raise DumpError(f"{where}: states for {tokens} token ids")
    if dtype not in STATE_DTYPES:
        raise DumpError(f"{where}: states of dtype {dtype}; known are {', '.join(STATE_DTYPES)}")
    for name in states:
        if not _STATE_NAME.match(name):
            raise DumpError(f"{where}: unknown tensor {name!r}")
    described = {"format": FORMAT, "rid": rid, "start": str(start), "tokens": str(tokens), "dtype": dtype}
    header: dict[str, Any] = {"__metadata__": {**metadata, **described}}
    end = tokens * ID_BYTES
    header[INPUT_IDS] = {"dtype": "I64", "shape": [tokens], "data_offsets": [0, end]}
    code, size = STATE_DTYPES[dtype]
    for name in states:
        first, end = end, end + tokens * width * size
        header[name] = {"dtype": code, "shape": [tokens, width], "data_offsets": [first, end]}
    return frame(header)


def encode_fingerprint(rid: str, start: int, rank: int, tokens: int, values: Mapping[str, bytes]) -> bytes:
    """A file of fingerprints, a safetensors file too: by state float32 [tokens, FINGERPRINT_VALUES], given as bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": FINGERPRINT_FORMAT, "rid": rid, "start": str(start), "rank": str(rank)}}
    end = 0
    for name, data in values.items():
        first, end = end, end + len(data)
        header[name] = {"dtype": "F32", "shape": [tokens, FINGERPRINT_VALUES], "data_offsets": [first, end]}
    return frame(header) + b"".join(values.values())


def frame(header: Mapping[str, Any]) -> bytes:
    """The beginning of a safetensors file: length and JSON of `header`, padded so that the data are aligned."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_all(descriptor: int, parts: Sequence[bytes | memoryview]) -> int:
    """Write `parts` one after another from the start of a file; returns their bytes. Raises OSError.

    The interpreter is free for other threads while the kernel copies.
    """
    left = [view for view in (memoryview(part).cast("B") for part in parts) if view.nbytes]
    position = 0
    while left:
        written = os.pwritev(descriptor, left[:_PARTS_AT_ONCE], position)
        position += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if left:
            left[0] = left[0][written:]
    return position


def is_dump(name: str) -> bool:
    """Whether a file is a whole dump, by its name."""
    return name.endswith(_SUFFIX) and not name.startswith(".")


def is_spare(name: str) -> bool:
    """Whether a file was given back for the next dump."""
    return _SPARE.match(name) is not None


def give_back(directory: str | os.PathLike[str], name: str) -> None:
    """Give the dump `name`, which nobody reads any more, back to the server, which writes its next dump into it.

    The pages are in memory already, so this costs a quarter of what new ones do. Whoever still has the file mapped
    sees the next dump: unlink instead where that may be. Raises OSError.
    """
    path = os.path.join(directory, name)
    os.rename(path, os.path.join(directory, f".spare-{os.lstat(path).st_ino}"))


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


def encode_error(reason: str, remedy: str) -> bytes:
    """The content of an error marker."""
    return json.dumps({"reason": reason, "remedy": remedy}).encode()


def read_fingerprint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The fingerprints in a file by state, numpy float32 [t, FINGERPRINT_VALUES]. Raises DumpError, FileNotFoundError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            if (opened.metadata() or {}).get("format") != FINGERPRINT_FORMAT:
                raise DumpError(f"{path}: not a file of fingerprints")
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DumpError(f"{path}: not a whole file of fingerprints ({error})") from error


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
        if not _STATE_NAME.match(name):
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
