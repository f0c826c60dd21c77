# SPDX-License-Identifier: Apache-2.0
"""Capture of hidden states inside a patched SGLang model.

The package lies beside SGLang's ``models`` directory as ``sglang.srt.hs_capture``
and is imported only when ``SGLANG_HS_DUMP_DIR`` is set. Importing it needs the
standard library alone: torch and safetensors are imported inside functions.

A patched model file uses these names and no others: :func:`open_capture`,
:meth:`Capture.begin`, and of :class:`Batch` collector, callback, output,
stream, finish and watch.
"""

from __future__ import annotations

from .capture import Capture, open_capture
from .collector import Batch
from .guards import CaptureRefused

__all__ = ["Batch", "Capture", "CaptureRefused", "open_capture"]
