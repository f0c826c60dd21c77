# SPDX-License-Identifier: Apache-2.0
"""Put beside SGLang by a test: writes `hidden + residual` as its layer loop holds it on TP rank 0.

Each call leaves `<n>.npz` in $HS_NAIVE_SUM_DIR: layer, ids [rows], lengths [requests], sums [rows, width] float32.
"""

import itertools
import os

import numpy
import torch

_numbers = itertools.count()


def record(layer, hidden, residual, forward_batch):
    """Write one layer's sum; `residual` is None where the loop holds none."""
    if torch.distributed.get_rank() != 0 or forward_batch.forward_mode.name != "EXTEND":
        return
    # From 0.5.21 on the loop may hold a handle, and the residual lies in the batch.
    contribution = getattr(hidden, "contribution", None)
    if contribution is not None:
        hidden = contribution.value
    if residual is None:
        residual = forward_batch.residual_stream.residual
    numpy.savez(
        os.path.join(os.environ["HS_NAIVE_SUM_DIR"], f"{next(_numbers)}.npz"),
        layer=layer,
        ids=forward_batch.input_ids.numpy(),
        lengths=numpy.array(forward_batch.extend_seq_lens_cpu),
        sums=(hidden + residual).float().numpy(),
    )
