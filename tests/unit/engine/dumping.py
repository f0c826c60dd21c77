# SPDX-License-Identifier: Apache-2.0
"""Dumps and error markers as the capture leaves them, from tensors at hand, and a small writer for tests."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from hs_capture import dumpfile
from hs_capture.budget import Budget, Layout
from hs_capture.directory import DumpDirectory
from hs_capture.fingerprints import RID_SUFFIX
from hs_capture.settings import Settings
from hs_capture.writer import Writer

OPEN: list[Writer] = []


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


def make_writer(settings: Settings, width: int, metadata: dict[str, str] | None = None, **changes: Any) -> Writer:
    """A writer of float32 states on the CPU; `changes` to its budget. Closed at the end of the test."""
    budget = {"batch": 1 << 20, "ring": 4 << 20, "directory": 4 << 20, "staging": 1 << 20, "wait_seconds": 1.0, **changes}
    layout = Layout(settings.tensor_names(), width, "float32")
    asked = settings.rid_prefix + RID_SUFFIX
    OPEN.append(Writer(DumpDirectory(settings.directory), Budget(**budget), layout, metadata or {}, "cpu", asked))
    return OPEN[-1]


def names(writer: Writer, directory: str | Path) -> list[str]:
    """What lies in the directory, its counters aside, once all is written; a file under way there is given 20 s."""
    assert writer.drain(20)
    deadline = time.monotonic() + 20
    while True:
        found = sorted(set(os.listdir(directory)) - {dumpfile.COUNTERS_NAME})
        # The counters come every second, under a temporary name at first.
        if time.monotonic() > deadline or all(dumpfile.temporary_pid(name) is None for name in found):
            return found
        time.sleep(0.01)
