# SPDX-License-Identifier: Apache-2.0
"""The gate between a patched model and the capture: opened once, asked once a forward."""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from typing import Any

from . import engine
from .collector import Batch
from .dumpfile import RID_PATTERN
from .guards import NotCapturable, check_batch, check_settings
from .layers import format_layers
from .settings import Settings, read_settings
from .sheet import Piece
from .writer import Writer, open_writer

logger = logging.getLogger(__name__)

# Requests in flight are bounded by the scheduler far below this.
_REMEMBERED_REQUESTS = 65536
_FAILED = -1


def open_capture(model: Any, *, patch_version: str, family: str) -> Capture | None:
    """Open the capture that the environment asks for; called when the model is built.

    Every rank checks the server's settings, only TP rank 0 captures: the others
    get None. Raises CaptureRefused, which stops the server, with the remedy.
    """
    settings = read_settings(os.environ, model.config.num_hidden_layers)
    check_settings(engine.server_settings())
    rank, size = engine.tensor_parallel()
    if rank != 0:
        return None
    metadata = {
        "layers": format_layers(list(settings.layers)),
        "final": settings.final,
        "sglang_version": engine.sglang_version(),
        "patch_version": patch_version,
        "family": family,
        "tp_size": str(size),
    }
    logger.info(
        "capturing layers %s and final %s of requests %s* into %s",
        metadata["layers"],
        settings.final,
        settings.rid_prefix,
        settings.directory,
    )
    return Capture(
        settings,
        open_writer(settings, metadata, model.config.hidden_size, engine.server_settings()),
        model.config.num_hidden_layers,
        model.config.hidden_size,
    )


class Capture:
    """Chooses, for each forward, the rows that are dumped."""

    def __init__(self, settings: Settings, writer: Writer, layer_count: int, hidden_size: int) -> None:
        self._settings = settings
        self._writer = writer
        self._layer_count = layer_count
        self._hidden_size = hidden_size
        # rid -> where its next piece starts, or _FAILED once a piece is lost.
        self._next_start: OrderedDict[str, int] = OrderedDict()
        self._warned = False

    def begin(self, forward_batch: Any) -> Batch | None:
        """Return the batch to collect into, None for a forward that dumps nothing.

        Never raises: what cannot be captured gets an error marker.
        """
        self._writer.abandon()
        # By name: values of the enumeration shift between releases, and
        # is_extend() also holds for verification and mixed steps.
        if forward_batch.forward_mode.name != "EXTEND" or not forward_batch.rids:
            return None
        wanted = [rid for rid in forward_batch.rids if self._wants(rid)]
        if not wanted:
            return None
        try:
            return self._begin(forward_batch, Counter(wanted))
        except NotCapturable as error:
            failure = error
        except Exception as error:
            logger.exception("the capture of a forward could not begin")
            failure = NotCapturable(
                f"the capture could not begin: {error!r}",
                "read the log of the server on this host",
            )
        for rid in dict.fromkeys(wanted):
            self._fail(rid, failure)
        return None

    def _wants(self, rid: Any) -> bool:
        if not isinstance(rid, str) or not rid.startswith(self._settings.rid_prefix):
            return False
        if RID_PATTERN.match(rid):
            return True
        if not self._warned:
            self._warned = True
            logger.warning("rid %.200r cannot name a dump: it and its like are not dumped", rid)
        return False

    def _begin(self, forward_batch: Any, wanted: Counter[str]) -> Batch | None:
        check_batch(forward_batch)
        rids = forward_batch.rids
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
            if rid in wanted:
                piece = self._piece(rid, start, first, length, wanted[rid])
                if piece is not None:
                    pieces.append(piece)
            first += length
        if not pieces:
            return None
        batch = Batch(self._writer, self._settings, self._layer_count, self._hidden_size, rows, pieces)
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
