# SPDX-License-Identifier: Apache-2.0
"""A model file of family D in small, laid out as a wheel does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hs_patcher

PROGRAM = Path(hs_patcher.__file__)

SOURCE = '''\
# SPDX-License-Identifier: Apache-2.0
"""Inference-only DeepseekV2 model – with bytes beyond ASCII: é."""

from __future__ import annotations

import logging
from typing import (
    List,
    Optional,
)

_is_cuda = False
if _is_cuda:
    from sglang.nowhere import kernel

logger = logging.getLogger(__name__)


class DeepseekV2DecoderLayer:
    def forward(self, positions, hidden_states, forward_batch, residual, captured_last_layer_outputs=None, **kwargs):
        hidden_states, residual = self.layer_communicator.prepare_attn_and_capture_last_layer_outputs(
            hidden_states,
            residual,
            forward_batch,
            captured_last_layer_outputs=captured_last_layer_outputs,
        )
        return hidden_states, residual, None


class DeepseekV2Model:
    def __init__(self, config, prefix: str = "") -> None:
        self.config = config
        self.layers = [DeepseekV2DecoderLayer() for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size)
        self.layers_to_capture = []
        # llama_4_scaling
        self.llama_4_scaling_config = getattr(config, "llama_4_scaling", None)

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        hidden_states, residual, topk_indices = input_ids, None, None
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with self.recorder(i):
                layer = self.layers[i]
                hidden_states, residual, topk_indices = layer(
                    positions,
                    hidden_states,
                    forward_batch,
                    residual,
                    prev_topk_indices=topk_indices,
                    captured_last_layer_outputs=(
                        aux_hidden_states if i in self.layers_to_capture else None
                    ),
                )

        if not self.pp_group.is_last_rank:
            return {"hidden_states": hidden_states, "residual": residual}
        else:
            if not forward_batch.forward_mode.is_idle():
                if residual is None:
                    hidden_states = self.norm(hidden_states)
                else:
                    hidden_states, _ = self.norm(hidden_states, residual)

        if len(aux_hidden_states) == 0:
            return hidden_states
        return hidden_states, aux_hidden_states


class DeepseekV3ForCausalLM:
    pass
'''


def install(root: Path, source: str, release: str | None = "0.5.20") -> Path:
    """Lay out a package as a wheel does and return its model file."""
    package = root / "site-packages" / "sglang"
    path = package / "srt" / "models" / "deepseek_v2.py"
    path.parent.mkdir(parents=True)
    path.write_bytes(source.encode())
    if release is not None:
        (package / "_version.py").write_text(f"__version__ = version = '{release}'\n")
    return path


def program(*arguments: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-I", str(PROGRAM), *map(str, arguments)], capture_output=True, text=True)


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def listing(root: Path) -> list[tuple]:
    """Everything below `root`, so that whatever is written there shows."""
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ino) for path in root.rglob("*"))


def refused(model: Path, originals: str, **options: object) -> str:
    """The refusal of apply, before which nothing may have been touched."""
    root = model.parents[2]
    before, data = listing(root), model.read_bytes()
    with pytest.raises(hs_patcher.Refused) as refusal:
        hs_patcher.apply(model, originals=originals, **options)
    assert listing(root) == before
    assert model.read_bytes() == data
    return str(refusal.value)
