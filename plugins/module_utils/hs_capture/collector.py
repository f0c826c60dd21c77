# SPDX-License-Identifier: Apache-2.0
"""Collects the states of one forward, row range by row range."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .dumpfile import POST_NORM, PRE_NORM, layer_name
from .guards import NotCapturable, check_state
from .settings import Settings
from .sheet import Piece

if TYPE_CHECKING:
    import torch

    from .writer import Writer


logger = logging.getLogger(__name__)


class Batch:
    """The pieces of one forward that are dumped. Made by ``Capture.begin``.

    Raises NotCapturable where there is no memory for them.
    """

    def __init__(
        self,
        writer: Writer,
        settings: Settings,
        layer_count: int,
        width: int,
        rows: int,
        pieces: list[Piece],
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._layer_count = layer_count
        self._width = width
        self._rows = rows
        self._sheet = writer.reserve(pieces)
        self._failure: NotCapturable | None = None

    def collector(self, layer: int, own: Any) -> Any:
        """What `layer` gets as its collector: `own`, or one that records and hands on to it.

        The input of `layer` is the output of layer - 1. `own` is SGLang's
        collector where that layer is wanted there, else None.
        """
        if layer - 1 not in self._settings.layers:
            return own
        return LayerCollector(self, layer - 1, own)

    def finish(self, post_norm: torch.Tensor, pre_norm: torch.Tensor | None) -> None:
        """Take the final states [rows, width] and hand all pieces to the writer."""
        wanted = self._settings.tensor_names()
        last = layer_name(self._layer_count - 1)
        if POST_NORM in wanted:
            self.record(POST_NORM, post_norm)
        if PRE_NORM in wanted:
            self.record(PRE_NORM, pre_norm)
        if last in wanted:
            self.record(last, pre_norm)
        if self._failure is None:
            missing = [name for name in wanted if name not in self._sheet.taken]
            if missing:
                self.fail(f"the forward gave no {', '.join(missing)}")
        try:
            if self._failure is None:
                self._writer.submit(self._sheet)
            else:
                self._writer.drop(self._sheet, self._failure)
        except Exception:
            logger.exception("the states of a forward could not be handed over")

    def record(self, name: str, tensor: torch.Tensor | None) -> None:
        """Copy the rows of each piece of `tensor` [rows, width].

        The tensor may be overwritten afterwards in its stream. A failure is
        kept for :meth:`finish`: it must not reach the server's answer.
        """
        if self._failure is not None:
            return
        try:
            if tensor is None:
                raise NotCapturable(f"the forward gave no {name}", "run the patcher again")
            check_state(tensor, self._rows, self._width, name)
            self._sheet.copy(name, tensor)
        except NotCapturable as error:
            self._failure = error
        except Exception as error:
            self.fail(f"copying {name} failed: {error!r}")

    def record_ids(self, input_ids: torch.Tensor) -> None:
        """Copy the token ids [rows] of each piece, as int64."""
        try:
            self._sheet.copy_ids(input_ids)
        except Exception as error:
            self.fail(f"copying the token ids failed: {error!r}")

    def fail(self, reason: str) -> None:
        """Keep an unforeseen failure for :meth:`finish`."""
        self._failure = NotCapturable(reason, "read the log of the server on this host")


class LayerCollector:
    """List-like stand-in for SGLang's collector: it records, then hands on."""

    def __init__(self, batch: Batch, layer: int, own: Any) -> None:
        self._batch = batch
        self._layer = layer
        self._own = own
        # SGLang clones for a collector without this attribute: needed only
        # when what comes behind keeps the tensor itself.
        self.copies_on_append = own is None or getattr(own, "copies_on_append", False)

    def append(self, tensor: torch.Tensor) -> None:
        """Take the complete output [rows, width] of the layer."""
        self._batch.record(layer_name(self._layer), tensor)
        # An empty packer of SGLang is falsy.
        if self._own is not None:
            self._own.append(tensor)
