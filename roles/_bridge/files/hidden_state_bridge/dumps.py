# SPDX-License-Identifier: Apache-2.0
"""The extractor's side of the dump directory: find what belongs to a request, and check it to the last row."""

from __future__ import annotations

import asyncio
import os
import re
import stat
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hs_capture import dumpfile, expect
from hs_capture.counters import read_counters

from .errors import ConfigError

if TYPE_CHECKING:
    import torch


_LONGEST_PAUSE = 0.25
_CANARY = re.compile(r"canary-[0-9a-f]+-(\d+)-\d+-")


class DumpRejected(Exception):
    """The dump is missing or not that of the request; the message says what is wrong with it."""


@dataclass(frozen=True)
class Layout:
    """What each dump has to hold: `layers` ascending, final as in the configuration, states [t, hidden_size] of dtype."""

    layers: tuple[int, ...]
    final: str
    hidden_size: int
    dtype: str

    @property
    def layer_names(self) -> list[str]:
        """Tensor names of the layers, ascending."""
        return [dumpfile.layer_name(layer) for layer in self.layers]

    @property
    def names(self) -> list[str]:
        """Tensor names of all states."""
        return self.layer_names + list(dumpfile.FINAL_TENSORS[self.final])


def check_directory(path: str) -> None:
    """Raise ConfigError unless the dump directory is a private, writable directory of this user."""
    remedy = f"it is made by the patched server: start that with SGLANG_HS_DUMP_DIR={path}, as the extractor's user"
    try:
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"dump directory {path}: {error.strerror}; {remedy}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"dump directory {path} is a link or no directory; give the directory itself")
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"dump directory {path} belongs to user {found.st_uid}, the extractor runs as {os.geteuid()};"
            " run server and extractor as one user"
        )
    if found.st_mode & 0o022:
        raise ConfigError(f"dump directory {path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}); run: chmod 700 {path}")
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f"dump directory {path} is not writable; run: chmod 700 {path}")


def keeps_list(directory: str) -> bool:
    """Whether the server knows requests by its expect list alone (SGLang before 0.5.10)."""
    return os.path.isdir(os.path.join(directory, expect.DIRECTORY))


async def announce(directory: str, rid: str, input_ids: np.ndarray, seconds: float) -> None:
    """Put a request on the server's expect list, where it keeps one (SGLang before 0.5.10, whose batches carry no rid).

    input_ids: int32 [tokens]. Of requests with the same tokens one at a time is on the list; the others wait for it.
    Raises DumpRejected after that many seconds.
    """
    listed = os.path.join(directory, expect.DIRECTORY)
    if not keeps_list(directory):
        return
    entry = os.path.join(listed, expect.entry_name(input_ids.astype("<i8").tobytes()))
    temporary = os.path.join(listed, f".{rid}")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as stream:
            stream.write(rid)
        deadline = time.monotonic() + seconds
        while True:
            try:
                os.link(temporary, entry)
                return
            except FileExistsError:
                if time.monotonic() > deadline:
                    raise DumpRejected(f"a request with the tokens of {rid} was on the expect list for {seconds:g} s") from None
            await asyncio.sleep(0.02)
    finally:
        os.unlink(temporary)


def find(directory: str, rid: str, tokens: int) -> list[str] | None:
    """Paths of the pieces of a request, in order, once they reach `tokens`; None while some are not there.

    Raises DumpRejected where the capture left an error marker or a piece is unreadable.
    """
    marker = os.path.join(directory, dumpfile.error_name(rid))
    if os.path.exists(marker):
        try:
            error = dumpfile.read_error(marker)
        except (OSError, dumpfile.DumpError) as unreadable:
            raise DumpRejected(f"the capture left an error marker that cannot be read: {unreadable}") from unreadable
        raise DumpRejected(f"the capture gave it up: {error['reason']}; {error['remedy']}")
    pieces: list[str] = []
    start = 0
    while start < tokens:
        path = os.path.join(directory, dumpfile.dump_name(rid, start))
        if not os.path.exists(path):
            return None
        length = _tokens(path)
        if length < 1:
            raise DumpRejected(f"{os.path.basename(path)} says that it has {length} tokens")
        pieces.append(path)
        start += length
    return pieces


async def wait_for(directory: str, rid: str, tokens: int, seconds: float) -> list[str]:
    """Paths of the pieces of a request that the server has answered, in order; they are normally there by then.

    Raises DumpRejected as `find` does, where the capture says that it has nothing left to write, and after that many seconds.
    """
    answered, deadline = time.time(), time.monotonic() + seconds
    pause = 0.002
    while True:
        # The report before the look: what was in work by then is in the queue, or is there.
        report = read_counters(directory) if pause >= _LONGEST_PAUSE else {}
        pieces = find(directory, rid, tokens)
        if pieces is not None:
            return pieces
        if report.get("updated", 0) > answered and report.get("queue") == 0:
            raise DumpRejected(_never_came(directory, rid, report))
        if time.monotonic() > deadline:
            raise DumpRejected(
                f"the server answered, and {seconds:g} s later {directory} has no whole dump of {rid};"
                f" is the server patched and started with SGLANG_HS_DUMP_DIR={directory}?"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _never_came(directory: str, rid: str, report: dict[str, Any]) -> str:
    if rid in report.get("open", ()):
        return (
            f"the server answered {rid} and the forward ended without passing the final norm;"
            " run the patcher again, and read the log of the server on this host"
        )
    pieces = sum(name.startswith(f"{rid}.") for name in os.listdir(directory))
    if pieces:
        return f"the server answered {rid} and its capture left {pieces} pieces with a hole; start it with --chunked-prefill-size -1"
    if report.get("markers_lost"):
        return (
            f"the server answered {rid} and its capture gave {report['markers_lost']} requests up without a word to the extractor;"
            " read the log of the server on this host, and make room where its dumps go"
        )
    return (
        f"the server answered {rid} and its prefill did not pass the capture, which saw {report.get('forwards', 0)} forwards since its"
        " start: it ran from a CUDA graph, which skips the patched layer loop. Start the server with --disable-prefill-cuda-graph"
        " (SGLang 0.5.10 to 0.5.13: --disable-piecewise-cuda-graph)"
    )


def _tokens(path: str) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as opened:
            return int((opened.metadata() or {})["tokens"])
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise DumpRejected(f"{os.path.basename(path)} cannot be read: {error}") from error


class States:
    """The checked states of one request, in pieces as the server wrote them.

    names, layer_names: tensor names. tokens: rows. metadata: of the first piece.
    """

    def __init__(self, layout: Layout, pieces: list[tuple[dict[str, str], dict[str, torch.Tensor]]]) -> None:
        self.names = layout.names
        self.layer_names = layout.layer_names
        self.hidden_size = layout.hidden_size
        self.metadata = pieces[0][0]
        self.tokens = sum(len(tensors[dumpfile.INPUT_IDS]) for _metadata, tensors in pieces)
        self._pieces = [tensors for _metadata, tensors in pieces]

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of all states."""
        return self._pieces[0][self.names[0]].dtype

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one state, put together from its pieces, into `target` [tokens, hidden_size]."""
        start = 0
        for tensors in self._pieces:
            piece = tensors[name]
            target[start : start + len(piece)].copy_(piece)
            start += len(piece)


def load(paths: list[str], rid: str, input_ids: np.ndarray, layout: Layout) -> States:
    """Read the pieces of a request and check that they are just what was asked for.

    input_ids: int32 [tokens] that were sent. Checked: rid, offsets, token ids, total length, the very set of tensors,
    width, dtype, and that every value is finite. Raises DumpRejected naming piece, tensor, layer and row.
    """
    pieces = []
    start = 0
    for path in paths:
        name = os.path.basename(path)
        try:
            metadata, tensors = dumpfile.read_dump(path)
        except (OSError, dumpfile.DumpError) as error:
            raise DumpRejected(str(error)) from error
        if metadata["rid"] != rid or metadata["start"] != str(start):
            raise DumpRejected(f"{name} is of {metadata['rid']} from {metadata['start']}, expected {rid} from {start}")
        start += _check_piece(name, start, tensors, input_ids, layout)
        pieces.append((metadata, tensors))
    if start != len(input_ids):
        raise DumpRejected(f"{rid} has {start} tokens, {len(input_ids)} were sent")
    return States(layout, pieces)


def _check_piece(name: str, start: int, tensors: dict[str, Any], input_ids: np.ndarray, layout: Layout) -> int:
    """Check one piece against the tokens that were sent; returns its number of tokens."""
    ids = tensors[dumpfile.INPUT_IDS].numpy()
    expected = input_ids[start : start + len(ids)]
    if len(expected) != len(ids):
        raise DumpRejected(f"{name} ends at token {start + len(ids)}, {len(input_ids)} were sent")
    differing = np.flatnonzero(ids != expected)
    if len(differing):
        row = int(differing[0])
        raise DumpRejected(f"{name} has token id {ids[row]} in row {start + row}, {expected[row]} was sent ({len(differing)} differ)")
    found = sorted(set(tensors) - {dumpfile.INPUT_IDS})
    if found != sorted(layout.names):
        raise DumpRejected(
            f"{name} holds {', '.join(found)}, expected {', '.join(sorted(layout.names))};"
            " restart the server with this run's SGLANG_HS_DUMP_LAYERS and SGLANG_HS_DUMP_FINAL"
        )
    for tensor_name in layout.names:
        tensor = tensors[tensor_name]
        dtype = str(tensor.dtype).partition(".")[2]
        if tuple(tensor.shape) != (len(ids), layout.hidden_size) or dtype != layout.dtype:
            raise DumpRejected(
                f"{name}: {tensor_name} is {dtype} {list(tensor.shape)}, expected {layout.dtype} [{len(ids)}, {layout.hidden_size}]"
            )
        _check_finite(name, tensor_name, start, tensor)
    return len(ids)


def _check_finite(name: str, tensor_name: str, start: int, tensor: torch.Tensor) -> None:
    import torch

    # aminmax propagates NaN and makes one pass at memory speed; isfinite over all values takes thirty times as long.
    if all(bool(torch.isfinite(bound)) for bound in torch.aminmax(tensor)):
        return
    row, column = (int(number) for number in (~torch.isfinite(tensor)).nonzero()[0])
    raise DumpRejected(f"{name}: {tensor_name} has {float(tensor[row, column])} in row {start + row}, column {column}")


def limit(directory: str) -> int | None:
    """Bytes of dumps that the server lets wait in the directory, by its counters; None where it does not say."""
    return read_counters(directory).get("directory_limit")


def give_back(directory: str, stem: str) -> None:
    """As `remove`, once nobody reads the dumps any more: the server writes its next ones into their files."""
    for name in os.listdir(directory):
        if name.startswith(stem) and dumpfile.is_dump(name):
            try:
                dumpfile.give_back(directory, name)
            except FileNotFoundError:
                pass
    remove(directory, stem)


def remove_spares(directory: str) -> None:
    """Remove what was given back: a server that is gone takes none."""
    unlink(directory, [name for name in os.listdir(directory) if dumpfile.is_spare(name)])


def remove(directory: str, stem: str, wanted: Callable[[str], bool] = lambda name: True) -> int:
    """Remove dumps, markers and expect list entries of the rids that begin with `stem` (a rid and a dot: of that rid).

    wanted: takes a name, or an entry's rid and a dot, and says whether it is to go. Returns how many dumps and markers went.
    """
    found = [name for name in names(directory, stem) if wanted(name)]
    unlink(directory, found)
    listed = os.path.join(directory, expect.DIRECTORY)
    if os.path.isdir(listed):
        rids = {name: _rid_in(os.path.join(listed, name)) for name in os.listdir(listed)}
        unlink(listed, [name for name, rid in rids.items() if rid.startswith(stem) and wanted(rid)])
    return len(found)


def remove_left(directory: str, stem: str) -> int:
    """As `remove`, but of canaries at work."""
    return remove(directory, stem, lambda name: not _of_canary_at_work(name))


def sweep(directory: str, prefix: str, stem: str, awaited: Set[str], seconds: float) -> int:
    """Remove what takes the room of others, and return how many went.

    That is what came for rids that begin with `stem` and are not `awaited`, and what others under `prefix` have left there
    for that many seconds, canaries at work aside. Any client may send such a rid.
    """
    # The look before the comparison: whatever is awaited by then was so before its dump came.
    late = []
    for name in names(directory, prefix):
        if dumpfile.rid_of(name) not in awaited if name.startswith(stem) else _is_left(directory, name, seconds):
            late.append(name)
    unlink(directory, late)
    return len(late)


def _of_canary_at_work(name: str) -> bool:
    """Whether that is of a canary whose process lives; of one that was killed, nobody else removes it."""
    process = _CANARY.search(name)
    return process is not None and os.path.exists(f"/proc/{process[1]}")


def _is_left(directory: str, name: str, seconds: float) -> bool:
    if _of_canary_at_work(name):
        return False
    try:
        return time.time() - os.lstat(os.path.join(directory, name)).st_mtime > seconds
    except FileNotFoundError:
        return False


def names(directory: str, stem: str) -> list[str]:
    """Names of dumps, markers and fingerprints of the rids that begin with `stem`."""
    return [name for name in os.listdir(directory) if name.startswith(stem)]


def unlink(directory: str, files: list[str]) -> None:
    """Remove files by name; those that are gone are no matter."""
    for name in files:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass


def _rid_in(entry: str) -> str:
    """The rid of an expect list entry and a dot; empty where it is gone."""
    try:
        with open(os.open(entry, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", errors="replace") as stream:
            return stream.read(256) + "."
    except OSError:
        return ""
