# SPDX-License-Identifier: Apache-2.0
"""Collects the states of one forward, row range by row range."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .dumpfile import INPUT_IDS, POST_NORM, PRE_NORM, layer_name
from .guards import NotCapturable, check_state
from .settings import Settings

if TYPE_CHECKING:
    import torch

    from .writer import Writer


@dataclass
class Piece:
    """The rows [first, last) of a forward: tokens of `rid` from offset `start`."""

    rid: str
    start: int
    first: int
    last: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


class Batch:
    """The pieces of one forward that are dumped. Made by ``Capture.begin``."""

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
        self._pieces = pieces
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
            missing = [name for name in wanted if name not in self._pieces[0].tensors]
            if missing:
                self.fail(f"the forward gave no {', '.join(missing)}")
        for piece in self._pieces:
            if self._failure is None:
                self._writer.write(piece)
            else:
                self._writer.fail(piece.rid, self._failure)
        self._pieces = []

    def record(self, name: str, tensor: torch.Tensor | None) -> None:
        """Copy the rows of each piece of `tensor` [rows, width] to the CPU.

        Copied before returning, because SGLang reuses the storage. A failure
        is kept for :meth:`finish`: it must not reach the server's answer.
        """
        if self._failure is not None:
            return
        try:
            if tensor is None:
                raise NotCapturable(f"the forward gave no {name}", "run the patcher again")
            check_state(tensor, self._rows, self._width, name)
            for piece in self._pieces:
                if name in piece.tensors:
                    raise NotCapturable(f"{name} came twice", "run the patcher again")
                piece.tensors[name] = _copy(tensor[piece.first : piece.last])
        except NotCapturable as error:
            self._failure = error
        except Exception as error:
            self.fail(f"copying {name} failed: {error!r}")

    def record_ids(self, input_ids: torch.Tensor) -> None:
        """Copy the token ids [rows] of each piece to the CPU as int64."""
        for piece in self._pieces:
            piece.tensors[INPUT_IDS] = _copy(input_ids[piece.first : piece.last]).long()

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


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.detach().to("cpu", copy=True).contiguous()
