# SPDX-License-Identifier: Apache-2.0
"""The tensor parallel ranks that dump nothing, but take part in SGLang's collectives and write fingerprints."""

from __future__ import annotations

import logging
from typing import Any, Callable

from . import engine

logger = logging.getLogger(__name__)


class Follower:
    """Stands for ``Capture`` on ranks other than 0.

    `wanted` says which requests of a forward rank 0 dumps, where that needs a
    collective of all ranks (else None). `fingerprints` is a ``Capture`` that
    writes those of the requests that ask for them.
    """

    def __init__(self, wanted: Callable[[Any], list[str]] | None, layers: tuple[int, ...], fingerprints: Any = None) -> None:
        self._wanted = wanted
        self._layers = layers
        self._fingerprints = fingerprints

    def begin(self, forward_batch: Any) -> Any:
        """Return a batch to follow exactly where rank 0 has one; None where there is nothing to do.

        What decides is the same on all ranks: the mode and the rids of the
        forward, never the state of a ring or a disk.
        """
        batch = self._fingerprints.begin(forward_batch) if self._fingerprints is not None else None
        if batch is not None or self._wanted is None:
            return batch
        return FollowerBatch(self._layers) if self._wanted(forward_batch) else None

    def close(self) -> None:
        """Nothing: it holds no memory and no thread."""


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

    def callback(self, layer: int, own: Any) -> Any:
        """A callback where rank 0 has one: SGLang makes an all-reduce before a layer with one, and none before the others."""
        return _ignore if own is None and layer - 1 in self._layers else own

    def output(self, layer: int | None, hidden: Any, residual: Any = None) -> None:
        """Nothing: no collective is needed."""

    def finish(self, post_norm: Any, pre_norm: Any) -> None:
        """Nothing: the final state is complete on every rank."""

    def watch(self, norm: Any, adds: bool = True) -> None:
        """Nothing, as :meth:`finish`."""


def _ignore(tensor: Any, owned: bool = False) -> None:
    """A callback that takes nothing."""
