# SPDX-License-Identifier: Apache-2.0
"""Dumps and error markers as the capture leaves them, from tensors at hand."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hs_capture import dumpfile


def write_dump(directory: str | Path, rid: str, start: int, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Path:
    """Write one dump; `tensors` are the token ids [t] int64 and states [t, width] by the names of the format."""
    states = {name: tensor for name, tensor in tensors.items() if name != dumpfile.INPUT_IDS}
    first = next(iter(states.values()))
    dtype = str(first.dtype).partition(".")[2]
    header = dumpfile.encode_header(rid, start, len(first), list(states), first.shape[1], dtype, metadata)
    data = [tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in (tensors[dumpfile.INPUT_IDS], *states.values())]
    target = Path(directory) / dumpfile.dump_name(rid, start)
    temporary = target.with_name(dumpfile.temporary_name(target.name))
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    dumpfile.write_all(descriptor, [header, *data])
    os.close(descriptor)
    os.replace(temporary, target)
    return target


def write_error(directory: str | Path, rid: str, reason: str, remedy: str) -> Path:
    """Write the error marker of `rid`."""
    target = Path(directory) / dumpfile.error_name(rid)
    target.write_bytes(dumpfile.encode_error(reason, remedy))
    return target
