# SPDX-License-Identifier: Apache-2.0
"""The tensor parallel ranks that capture nothing, but take part in SGLang's collectives."""

from __future__ import annotations

import logging
from typing import Any, Callable

from . import engine

logger = logging.getLogger(__name__)


class Follower:
    """Stands for ``Capture`` on ranks other than 0 where capture needs a collective."""

    def __init__(self, wanted: Callable[[Any], list[str]], layers: tuple[int, ...]) -> None:
        self._wanted = wanted
        self._layers = layers

    def begin(self, forward_batch: Any) -> FollowerBatch | None:
        """Return a batch to follow exactly where rank 0 has one.

        What decides is the same on all ranks: the mode and the rids of the
        forward, never the state of a ring or a disk.
        """
        return FollowerBatch(self._layers) if self._wanted(forward_batch) else None


class FollowerBatch:
    """One forward on a rank that captures nothing: it completes sums with rank 0."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = layers
        self._turns = 0

    def stream(self, layer: int | None, hidden: Any, forward_batch: Any) -> None:
        """Take part in the snapshot of a captured layer."""
        index = self._turns if layer is None else layer
        self._turns += 1
        if index in self._layers:
            try:
                engine.snapshot(hidden, forward_batch)
            except Exception:
                # Raised on every rank alike, where rank 0 makes an error marker of it.
                logger.exception("the snapshot of layer %d failed", index)

    def collector(self, layer: int, own: Any) -> Any:
        """SGLang's own collector, untouched."""
        return own

    callback = collector

    def output(self, layer: int | None, hidden: Any, residual: Any = None) -> None:
        """Nothing: no collective is needed."""

    def finish(self, post_norm: Any, pre_norm: Any) -> None:
        """Nothing: the final state is complete on every rank."""

    def watch(self, norm: Any) -> None:
        """Nothing, as :meth:`finish`."""
