# SPDX-License-Identifier: Apache-2.0
"""The layer rule: which decoder layers are captured.

A layer number k is 0-based and means the output of decoder layer k (the
residual stream that layer k+1 takes in). SGLang's own ``layers_to_capture``
counts inputs and is never used here.
"""

from __future__ import annotations


def default_layers(layer_count: int) -> list[int]:
    """The layers that EAGLE-3 trainers expect: ``[1, n//2 - 1, n - 4]``.

    Raises ValueError where the three are not distinct and ascending (n < 7).
    """
    layers = [1, layer_count // 2 - 1, layer_count - 4]
    if not 0 <= layers[0] < layers[1] < layers[2] < layer_count:
        raise ValueError(
            f"a model of {layer_count} layers has no default capture layers "
            f"({', '.join(map(str, layers))} are not distinct and ascending); name the layers"
        )
    return layers


def check_layers(layers: list[int], layer_count: int) -> list[int]:
    """Return `layers` if they are ascending, distinct and within the model.

    Raises ValueError for an empty, repeated, unordered or out-of-range list.
    """
    if not layers:
        raise ValueError("no layer is named; name at least one")
    for layer in layers:
        if not 0 <= layer < layer_count:
            raise ValueError(f"layer {layer} is out of range; the model has layers 0 to {layer_count - 1}")
    if len(set(layers)) != len(layers):
        raise ValueError(f"layers {format_layers(layers)} repeat; name each layer once")
    if layers != sorted(layers):
        raise ValueError(f"layers {format_layers(layers)} are not ascending; write {format_layers(sorted(layers))}")
    return layers


def parse_layers(text: str, layer_count: int) -> list[int]:
    """Read ``"1,3,4"``; an empty text gives :func:`default_layers`.

    Raises ValueError for anything but ascending layer numbers of the model.
    """
    if not text.strip():
        return default_layers(layer_count)
    fields = [field.strip() for field in text.split(",")]
    for field in fields:
        if not (field.isascii() and field.isdigit()):
            raise ValueError(f"layers {text!r}: {field!r} is not a layer number; write them as 1,3,4")
    return check_layers([int(field) for field in fields], layer_count)


def format_layers(layers: list[int]) -> str:
    """The inverse of :func:`parse_layers`: ``"1,3,4"``."""
    return ",".join(str(layer) for layer in layers)
