# SPDX-License-Identifier: Apache-2.0
"""Settings that the extractor or the server would refuse are refused on the controller, before anything stops."""

from __future__ import annotations

import io
import json

import pytest

from hidden_state_bridge.__main__ import main


def settings(**changed):
    identity = {"dataset": "d", "weights": "w", "layers": [1, 3, 4], "final": "post_norm", "dtype": "float32"}
    identity.update({key: value for key, value in changed.items() if key in identity})
    values = {
        "schema": 1,
        "run": "",
        "identity": identity,
        "dataset": "/datasets/d",
        "share": "0-9",
        "url": "http://127.0.0.1:30000",
        "dump_dir": "/dev/shm/sglang_hs",
        "output_dir": "/out/one",
        "format": "specforge",
        "layers": identity["layers"],
        "final": identity["final"],
        "dtype": identity["dtype"],
        "hidden_size": 64,
    }
    return {**values, **changed}


def check(monkeypatch, values):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"config": values, "num_hidden_layers": 8})))
    return main(["config-check"])


def test_good_settings_pass(monkeypatch, capsys):
    assert check(monkeypatch, settings()) == 0
    assert json.loads(capsys.readouterr().out)["bytes_per_token"] == 4 * 64 * 4 + 8


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layers": [5, 3]}, "ascending"),
        ({"layers": [1, 3, 99]}, "layer 99 is out of range; the model has layers 0 to 7"),
        ({"layers": [-1, 3]}, "ascending layer numbers"),
        ({"layers": [3, 3]}, "ascending"),
        ({"final": "pre_norm"}, "format specforge needs final post_norm or both"),
        ({"dtype": "int8"}, "dtype"),
        ({"concurrency": -4}, "concurrency is -4"),
        ({"format": "pickle"}, "format"),
    ],
)
def test_bad_settings_are_named(monkeypatch, capsys, changed, said):
    assert check(monkeypatch, settings(**changed)) != 0
    assert said in capsys.readouterr().err
