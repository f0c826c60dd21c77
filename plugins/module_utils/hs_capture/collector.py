# SPDX-License-Identifier: Apache-2.0
"""Collects the states of one forward, row range by row range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import engine
from .dumpfile import POST_NORM, PRE_NORM, layer_name
from .guards import NotCapturable, check_complete, check_state
from .settings import Settings
from .sheet import Piece

if TYPE_CHECKING:
    import torch

    from .writer import Writer


class Proof:
    """Whether what the loop gives was once seen to be what the final norm takes in.

    The patcher shows it from the source; here the first states themselves do.
    """

    # Two roundings of the state's own dtype at most lie between them.
    _ROUNDINGS = 4.0

    def __init__(self) -> None:
        self.done = False

    def check(self, last: torch.Tensor, pre_norm: torch.Tensor) -> None:
        """Compare the last layer's output with the final norm's input, both [rows, width]."""
        import torch

        given = pre_norm.float()
        difference = last.float() - given
        lengths = [torch.linalg.vector_norm(rows, dim=-1) for rows in (difference, given)]
        # A row of zeros counts as right where both are. By rows too, and the median of them: beside one massive
        # activation, everything else is small.
        shares = lengths[0] / lengths[1].clamp_min(torch.finfo(torch.float32).tiny)
        # In one transfer: each waits for the GPU.
        furthest, largest, share = torch.stack((difference.abs().max(), given.abs().max(), shares.median())).tolist()
        bound = self._ROUNDINGS * torch.finfo(last.dtype).eps
        if not (furthest <= bound * largest and share <= bound):
            raise NotCapturable(
                f"the last layer's output and what the final norm takes in differ by {furthest:.3g} of {largest:.3g}, "
                f"and in the median row by {share:.3g} of its length",
                "this model's residual stream is not what its loop hands on; report the model file",
            )
        self.done = True


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
        proof: Proof | None = None,
    ) -> None:
        self._writer = writer
        self._settings = settings
        self._layer_count = layer_count
        self._width = width
        self._rows = rows
        self._sheet = writer.reserve(pieces)
        self._proof = proof
        self._last: torch.Tensor | None = None
        self._turns = 0
        self._hook: Any = None
        self._failure: NotCapturable | None = None

    def collector(self, layer: int, own: Any) -> Any:
        """What `layer` gets as its collector: `own`, or one that records and hands on to it.

        The input of `layer` is the output of layer - 1. `own` is SGLang's
        collector where that layer is wanted there, else None.
        """
        self._turn(layer)
        if layer - 1 not in self._settings.layers:
            return own
        return LayerCollector(self, layer - 1, own)

    def callback(self, layer: int, own: Any) -> Any:
        """As :meth:`collector`, for layers that call what they are given with their input."""
        collector = self.collector(layer, own)
        return collector.call if isinstance(collector, LayerCollector) else own

    def output(self, layer: int | None, hidden: Any, residual: Any = None) -> None:
        """Take the output of `layer` at the end of its turn: hidden [+ residual], [rows, width]."""
        index = self._turn(layer)
        last = index == self._layer_count - 1
        if self._failure is not None or not (last or index in self._settings.layers):
            return
        name = layer_name(index)
        try:
            check_complete(hidden, name)
            state = hidden if residual is None else hidden + residual
            self._keep_for_proof(last, state)
        except NotCapturable as error:
            self._failure = error
        except Exception as error:
            self.fail(f"adding {name} failed: {error!r}")
        else:
            if index in self._settings.layers:
                self.record(name, state)

    def stream(self, layer: int | None, hidden: Any, forward_batch: Any) -> None:
        """Take the output of `layer` where ``forward_batch.residual_stream`` holds the residual.

        Completed by a collective: it runs on every rank, whatever failed here.
        """
        index = self._turn(layer)
        if index not in self._settings.layers:
            return
        name = layer_name(index)
        try:
            state = engine.snapshot(hidden, forward_batch)
            self._keep_for_proof(index == self._layer_count - 1, state)
        except Exception as error:
            self.fail(f"completing {name} failed: {error!r}")
        else:
            self.record(name, state)

    def watch(self, norm: Any, adds: bool = True) -> None:
        """Have `norm` say at its next call what it took in and gave: :meth:`finish` then runs.

        A norm that gives two states gave the normed one and the sum of what it
        took in, unless it `adds` nothing and hands its residual on.
        """

        def told(_norm: Any, arguments: tuple, output: Any) -> None:
            self._unhook()
            given = arguments[0] if arguments else None
            if isinstance(output, tuple):
                self.finish(output[0], output[1] if adds else given)
            else:
                self.finish(output, given)

        self._hook = norm.register_forward_hook(told)

    def finish(self, post_norm: torch.Tensor | None, pre_norm: torch.Tensor | None) -> None:
        """Take the final states [rows, width] (None for a model without a final norm) and hand all pieces to the writer."""
        wanted = self._settings.tensor_names()
        last = layer_name(self._layer_count - 1)
        if self._failure is None and self._turns != self._layer_count:
            self._failure = NotCapturable(
                f"{self._turns} of {self._layer_count} layers ran in the layer loop",
                "start the server without two-batch overlap and pipeline parallelism",
            )
        if self._last is not None and pre_norm is not None:
            self._prove(pre_norm)
        if POST_NORM in wanted:
            self.record(POST_NORM, post_norm)
        if PRE_NORM in wanted:
            self.record(PRE_NORM, pre_norm)
        if last in wanted and last not in self._sheet.taken:
            self.record(last, pre_norm)
        if self._failure is None:
            missing = [name for name in wanted if name not in self._sheet.taken]
            if missing:
                self.fail(f"the forward gave no {', '.join(missing)}")
        if self._failure is None:
            self._writer.submit(self._sheet)
        else:
            self._writer.drop(self._sheet, self._failure)

    def abandon(self) -> None:
        """Give the pieces of a forward up that never came to :meth:`finish`; nothing where it did."""
        self._unhook()
        self._writer.drop(
            self._sheet,
            NotCapturable(
                "the forward ended without passing the final norm",
                "run the patcher again, and read the log of the server on this host",
            ),
        )

    def _turn(self, layer: int | None) -> int:
        """Count a turn of the loop; the layer's number."""
        turn = self._turns
        self._turns += 1
        if layer is not None and layer != turn:
            self.fail(f"layer {layer} ran as number {turn} of the layer loop")
        return turn if layer is None else layer

    def _keep_for_proof(self, last: bool, state: torch.Tensor) -> None:
        if last and self._proof is not None and not self._proof.done:
            self._last = state.detach().clone()

    def _prove(self, pre_norm: torch.Tensor) -> None:
        if self._failure is not None:
            return
        try:
            self._proof.check(self._last, pre_norm)
        except NotCapturable as error:
            self._failure = error
        except Exception as error:
            self.fail(f"comparing the last layer's output with the final norm's input failed: {error!r}")

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

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
        """Keep an unforeseen failure, the first of a batch, for :meth:`finish`."""
        if self._failure is None:
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
        """Take the complete output [rows, width] of the layer (0.5.14 to 0.5.20)."""
        self._batch.record(layer_name(self._layer), tensor)
        # An empty packer of SGLang is falsy.
        if self._own is not None:
            self._own.append(tensor)

    def capture(self, tensor: torch.Tensor, owned: bool = False) -> None:
        """As :meth:`append` (0.5.21 and later); `owned`: SGLang writes to the tensor no more."""
        self._batch.record(layer_name(self._layer), tensor)
        if self._own is not None:
            self._own.capture(tensor, owned=owned)

    def call(self, tensor: torch.Tensor, owned: bool = False) -> None:
        """As :meth:`capture`, where SGLang's own is a function."""
        self._batch.record(layer_name(self._layer), tensor)
        if self._own is not None:
            self._own(tensor, owned=owned)
