# SPDX-License-Identifier: Apache-2.0
"""The gate between a patched model and the capture: opened once, asked once a forward."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import Any

from . import engine
from .collector import Batch, Proof
from .dumpfile import FINAL_TENSORS, RID_PATTERN
from .expect import ExpectList
from .fingerprints import RID_SUFFIX, FingerprintWriter
from .follower import Follower, FollowerBatch
from .guards import CaptureRefused, NotCapturable, check_batch, check_settings, check_unnamed
from .layers import format_layers
from .settings import DUMP_FINAL, Settings, read_settings
from .sheet import Piece
from .writer import Writer, open_writer

logger = logging.getLogger(__name__)

# Requests in flight are bounded by the scheduler far below this.
_REMEMBERED_REQUESTS = 65536
_FAILED = -1
# The shapes whose states SGLang completes by a collective: its snapshot, or what it does for a layer with a callback.
_COLLECTIVE = ("stream", "keyword-stream")


# The model of this process, and what was opened for it.
_opened: tuple[Any, Capture | Follower] | None = None


def open_capture(model: Any, layers: str, norm: str | None, *, patch_version: str, family: str) -> Capture | Follower:
    """Open the capture that the environment asks for; called when the model is built.

    `layers` and `norm` name the model's decoder layers and its final norm (None: it has none).
    Every rank checks the server's settings, only TP rank 0 captures: the
    others get a Follower. Called again for the same model, by a class that
    inherits from one that is patched too, it opens anew for the loop of that
    class. Raises CaptureRefused, which stops the server, with the remedy; also
    for a second model.
    """
    global _opened
    if _opened is not None:
        known, earlier = _opened
        if known is not model:
            raise CaptureRefused(
                f"{type(known).__name__} and {type(model).__name__} of one process would dump into the same directory",
                "take the patch out of the model file that is not to be captured (hs_patcher.py revert)",
            )
        _opened = None
        earlier.close()
    opened = _open(model, layers, norm, patch_version, family)
    _opened = model, opened
    return opened


def _open(model: Any, layers: str, norm: str | None, patch_version: str, family: str) -> Capture | Follower:
    layer_count, width = len(getattr(model, layers)), _width(model, norm and getattr(model, norm))
    settings = read_settings(os.environ, layer_count)
    if norm is None and FINAL_TENSORS[settings.final]:
        raise CaptureRefused(f"{DUMP_FINAL} is {settings.final}, and this model has no final norm", f"set {DUMP_FINAL}=none")
    check_settings(engine.server_settings())
    engine.switch_fusion_off()
    rank, size = engine.tensor_parallel()
    # The head has the lowest ranks. Files of ranks on other nodes would lie where nobody reads or removes them.
    beside = size // max(1, int(engine.server_settings()("nnodes") or 1))
    if rank != 0:
        wanted = Requests(settings.rid_prefix).wanted if family in _COLLECTIVE else None
        prints = None
        if rank < beside and engine.batches_name_requests():
            asked = replace(settings, rid_prefix=settings.rid_prefix + RID_SUFFIX)
            prints = Capture(asked, FingerprintWriter(settings.directory, rank), layer_count, width)
        return Follower(wanted, settings.layers, prints)
    metadata = {
        "layers": format_layers(list(settings.layers)),
        "final": settings.final,
        "sglang_version": engine.sglang_version(),
        "patch_version": patch_version,
        "family": family,
        "tp_size": str(size),
        "tp_ranks_on_host": str(beside),
    }
    logger.info(
        "capturing layers %s and final %s of requests %s* into %s",
        metadata["layers"],
        settings.final,
        settings.rid_prefix,
        settings.directory,
    )
    named = engine.batches_name_requests()
    if not named:
        check_unnamed(engine.server_settings())
    writer = open_writer(settings, metadata, width, engine.server_settings())
    return Capture(
        settings,
        writer,
        layer_count,
        width,
        None if named else ExpectList(settings.directory),
        follows=family in _COLLECTIVE and size > 1,
    )


def _width(model: Any, norm: Any) -> int:
    """Width of the residual stream: what the final norm takes in."""
    weight = getattr(norm, "weight", None)
    if weight is not None:
        return int(weight.shape[-1])
    shape = getattr(norm, "normalized_shape", None)
    return int(shape[-1]) if shape else int(model.config.hidden_size)


class Requests:
    """Which requests of a forward are dumped: a pure function of what every rank sees."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._warned = False

    def wanted(self, forward_batch: Any, rids: list[Any] | None = None) -> list[str]:
        """The rids to dump of a forward, [] for any forward but a prefill."""
        # By name: values of the enumeration shift between releases, and
        # is_extend() also holds for verification and mixed steps.
        if forward_batch.forward_mode.name != "EXTEND":
            return []
        if rids is None:
            rids = getattr(forward_batch, "rids", None)
        return [rid for rid in rids or () if self._wants(rid)]

    def _wants(self, rid: Any) -> bool:
        if not isinstance(rid, str) or not rid.startswith(self._prefix):
            return False
        if RID_PATTERN.match(rid):
            return True
        if not self._warned:
            self._warned = True
            logger.warning("rid %.200r cannot name a dump: it and its like are not dumped", rid)
        return False


class Capture:
    """Chooses, for each forward, the rows that are dumped."""

    def __init__(
        self,
        settings: Settings,
        writer: Writer,
        layer_count: int,
        width: int,
        expected: ExpectList | None = None,
        *,
        follows: bool = False,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._layer_count = layer_count
        self._width = width
        self._requests = Requests(settings.rid_prefix)
        self._expected = expected
        # Whether the other ranks take part in what a batch does.
        self._follows = follows
        # rid -> where its next piece starts, or _FAILED once a piece is lost.
        self._next_start: OrderedDict[str, int] = OrderedDict()
        self._open: Batch | None = None
        self._proof = Proof()

    def begin(self, forward_batch: Any) -> Batch | FollowerBatch | None:
        """Return the batch to collect into, None for a forward that dumps nothing.

        Never raises: what cannot be captured gets an error marker.
        """
        if self._open is not None:
            self._open.abandon()
            self._open = None
        try:
            rids = self._rids(forward_batch)
        except Exception:
            logger.exception("the expect list could not be read")
            return None
        wanted = self._requests.wanted(forward_batch, rids)
        if not wanted:
            return None
        # Rids whose failure is told already.
        failed: set[str] = set()
        try:
            self._open = self._begin(forward_batch, rids, Counter(wanted), failed)
        except NotCapturable as error:
            failure = error
        except Exception as error:
            logger.exception("the capture of a forward could not begin")
            failure = NotCapturable(
                f"the capture could not begin: {error!r}",
                "read the log of the server on this host",
            )
        else:
            return self._open or self._follower()
        for rid in dict.fromkeys(wanted):
            if rid not in failed:
                self._fail(rid, failure)
        return self._follower()

    def close(self) -> None:
        """Write what is left, and let go of memory and threads; nothing may begin behind it."""
        self._writer.close()

    def _follower(self) -> FollowerBatch | None:
        """What rank 0 does in a forward whose states it gives up: the others count on its part."""
        return FollowerBatch(self._settings.layers) if self._follows else None

    def _rids(self, forward_batch: Any) -> list[Any] | None:
        """The rids of a prefill's requests, None for any other forward."""
        if forward_batch.forward_mode.name != "EXTEND":
            return None
        if self._expected is None:
            return forward_batch.rids
        lengths = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        return self._expected.rids(forward_batch.input_ids, lengths)

    def _begin(self, forward_batch: Any, rids: list[Any], wanted: Counter[str], failed: set[str]) -> Batch | None:
        check_batch(forward_batch)
        lengths = [int(length) for length in forward_batch.extend_seq_lens_cpu]
        starts = [int(start) for start in forward_batch.extend_prefix_lens_cpu]
        rows = sum(lengths)
        input_ids = forward_batch.input_ids
        if not len(rids) == len(lengths) == len(starts) or input_ids.shape[0] != rows:
            raise NotCapturable(
                f"{len(rids)} requests of {rows} tokens came as {len(lengths)} lengths, "
                f"{len(starts)} offsets and {input_ids.shape[0]} rows",
                "start the server without data, context or sequence parallelism",
            )
        pieces = []
        first = 0
        for rid, start, length in zip(rids, starts, lengths):
            if rid in wanted and rid not in failed:
                piece = self._piece(rid, start, first, length, wanted[rid])
                if piece is None:
                    failed.add(rid)
                else:
                    pieces.append(piece)
            first += length
        if not pieces:
            return None
        batch = Batch(self._writer, self._settings, self._layer_count, self._width, rows, pieces, self._proof)
        batch.record_ids(input_ids)
        return batch

    def _piece(self, rid: str, start: int, first: int, length: int, times: int) -> Piece | None:
        """The piece of one request, or None (with an error marker) where it is not whole."""
        expected = self._next_start.get(rid, 0)
        if start > 0 and expected == _FAILED:
            return None
        if times > 1:
            self._fail(rid, NotCapturable("the rid came twice in one batch", "use a rid once"))
            return None
        if start not in (0, expected):
            self._fail(
                rid,
                NotCapturable(
                    f"the piece starts at token {start} and {max(expected, 0)} tokens were seen: the rest came from the prefix cache",
                    "start the server with --disable-radix-cache",
                ),
            )
            return None
        self._remember(rid, start + length)
        return Piece(rid, start, first, first + length)

    def _fail(self, rid: str, error: NotCapturable) -> None:
        self._remember(rid, _FAILED)
        self._writer.fail(rid, error)

    def _remember(self, rid: str, start: int) -> None:
        self._next_start[rid] = start
        self._next_start.move_to_end(rid)
        if len(self._next_start) > _REMEMBERED_REQUESTS:
            self._next_start.popitem(last=False)
