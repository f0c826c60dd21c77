# SPDX-License-Identifier: Apache-2.0
"""What the environment of the server asks to be captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .dumpfile import FINAL_TENSORS, RID_PATTERN, layer_name
from .guards import CaptureRefused
from .layers import parse_layers

DUMP_DIR = "SGLANG_HS_DUMP_DIR"
DUMP_LAYERS = "SGLANG_HS_DUMP_LAYERS"
DUMP_FINAL = "SGLANG_HS_DUMP_FINAL"
DUMP_RID_PREFIX = "SGLANG_HS_DUMP_RID_PREFIX"
DEFAULT_FINAL = "post_norm"
DEFAULT_RID_PREFIX = "hsb-"


@dataclass(frozen=True)
class Settings:
    """One capture: where dumps go, what they hold, whose requests they are."""

    directory: str
    layers: tuple[int, ...]
    final: str
    rid_prefix: str

    def tensor_names(self) -> tuple[str, ...]:
        """Names of the state tensors in each dump."""
        return tuple(map(layer_name, self.layers)) + FINAL_TENSORS[self.final]


def read_settings(environment: Mapping[str, str], layer_count: int) -> Settings:
    """Read the ``SGLANG_HS_DUMP_*`` variables; an empty one counts as unset.

    Raises CaptureRefused, naming the variable, for a value that is not usable.
    """
    directory = environment.get(DUMP_DIR, "")
    if not directory.startswith("/"):
        raise CaptureRefused(f"{DUMP_DIR}={directory!r} is not an absolute path", f"give {DUMP_DIR} one")
    try:
        layers = parse_layers(environment.get(DUMP_LAYERS, ""), layer_count)
    except ValueError as error:
        raise CaptureRefused(str(error), f"correct {DUMP_LAYERS}") from error
    final = environment.get(DUMP_FINAL) or DEFAULT_FINAL
    if final not in FINAL_TENSORS:
        raise CaptureRefused(
            f"{DUMP_FINAL}={final!r} is unknown",
            f"set {DUMP_FINAL} to one of {', '.join(FINAL_TENSORS)}",
        )
    prefix = environment.get(DUMP_RID_PREFIX) or DEFAULT_RID_PREFIX
    if not RID_PATTERN.match(prefix):
        raise CaptureRefused(
            f"{DUMP_RID_PREFIX}={prefix!r} cannot begin a rid",
            f"set {DUMP_RID_PREFIX} to letters, digits, '.', '_' and '-' such as " + DEFAULT_RID_PREFIX,
        )
    return Settings(directory, tuple(layers), final, prefix)
