# SPDX-License-Identifier: Apache-2.0
"""Finite or not: every place, dtype and kind of value is found, and the largest finite ones are not."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
import torch
from fake_server import HIDDEN, LAYERS, FakeServer

from hidden_state_bridge import dumps
from hs_capture import dumpfile

IDS = np.arange(9, dtype=np.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [(0, 0), (4, 3), (8, HIDDEN - 1)])
def test_a_value_that_is_not_finite_is_found_with_its_row(dtype, value, place):
    state = torch.full((9, HIDDEN), torch.finfo(dtype).max, dtype=dtype)
    state[3] = torch.finfo(dtype).min
    dumps._check_finite("x", "layer_1", 100, state)
    state[place] = value
    with pytest.raises(dumps.DumpRejected, match=rf"layer_1 has {value} in row {100 + place[0]}, column {place[1]}$"):
        dumps._check_finite("x", "layer_1", 100, state)


def test_a_dump_of_another_request_is_refused(tmp_path):
    layout = dumps.Layout(LAYERS, "post_norm", HIDDEN, "float32")
    FakeServer(str(tmp_path)).dump("hsb-a-1-0", IDS.tolist(), "pieces")
    pieces = dumps.find(str(tmp_path), "hsb-a-1-0", 9)
    assert [path.rsplit(".", 2)[1] for path in pieces] == ["0", "4"]
    assert dumps.load(pieces, "hsb-a-1-0", IDS, layout).metadata["sglang_version"] == "0.5.20"
    for paths, rid, text in [
        (pieces, "hsb-a-2-0", "expected hsb-a-2-0 from 0"),
        (pieces[1:], "hsb-a-1-0", "from 4, expected hsb-a-1-0 from 0"),
        (pieces[:1], "hsb-a-1-0", "has 4 tokens, 9 were sent"),
    ]:
        with pytest.raises(dumps.DumpRejected, match=text):
            dumps.load(paths, rid, IDS, layout)


def test_a_dump_that_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "hsb-a-1-0.0.safetensors").write_bytes(b"no")
    with pytest.raises(dumps.DumpRejected, match=r"hsb-a-1-0\.0\.safetensors cannot be read"):
        dumps.find(str(tmp_path), "hsb-a-1-0", 9)
    (tmp_path / "hsb-a-1-0.error.json").write_text("{")
    with pytest.raises(dumps.DumpRejected, match="an error marker that cannot be read"):
        dumps.find(str(tmp_path), "hsb-a-1-0", 9)


def report(directory, **present):
    content = {"format": dumpfile.COUNTERS_FORMAT, "updated": time.time() + 60, "forwards": 3, "queue": 0, "markers_lost": 0, **present}
    (directory / "capture.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("present", "fault", "text"),
    [
        ({}, "none", r"did not pass the capture, which saw 3 forwards .* CUDA graph.*--disable-prefill-cuda-graph .*--disable-piecewise"),
        ({}, "hole", "left 1 pieces with a hole; start it with --chunked-prefill-size -1"),
        ({"markers_lost": 2}, "none", "gave 2 requests up without a word"),
        ({"open": ["hsb-a-1-0"]}, "none", "the forward ended without passing the final norm; run the patcher again, and read the log"),
        ({"open": ["hsb-a-1-0"]}, "hole", "the forward ended without passing the final norm"),
        ({"open": ["hsb-a-1-1"]}, "none", "CUDA graph"),
        ({"queue": 1, "open": ["hsb-a-1-0"]}, "none", "has no whole dump"),
        ({"queue": 1}, "none", r"0\.6 s later .* has no whole dump of hsb-a-1-0; is the server patched"),
        ({"updated": 0}, "none", "has no whole dump"),
        ({"format": "another"}, "none", "has no whole dump"),
    ],
)
def test_what_never_comes_is_named_as_soon_as_the_capture_is_known_to_be_idle(tmp_path, present, fault, text):
    FakeServer(str(tmp_path)).dump("hsb-a-1-0", IDS.tolist(), fault)
    report(tmp_path, **present)
    patience = 0.6 if "no whole" in text else 600
    with pytest.raises(dumps.DumpRejected, match=text):
        asyncio.run(dumps.wait_for(str(tmp_path), "hsb-a-1-0", 9, patience))


def test_a_dump_that_is_late_is_waited_for(tmp_path):
    report(tmp_path, queue=1)
    late = threading.Timer(1, FakeServer(str(tmp_path)).dump, ("hsb-a-1-0", IDS.tolist(), "ok"))
    late.start()
    assert len(asyncio.run(dumps.wait_for(str(tmp_path), "hsb-a-1-0", 9, 60))) == 1
    late.join()


def test_the_servers_limit_is_read_from_its_counters(tmp_path):
    assert dumps.limit(str(tmp_path)) is None
    for text in ("{", "[]", "{}", '{"directory_limit": 7}'):
        (tmp_path / "capture.json").write_text(text)
        assert dumps.limit(str(tmp_path)) is None
    report(tmp_path, directory_limit=7)
    assert dumps.limit(str(tmp_path)) == 7


def test_what_was_read_is_given_back(tmp_path):
    FakeServer(str(tmp_path)).dump("hsb-a-1-0", IDS.tolist(), "pieces")
    FakeServer(str(tmp_path)).dump("hsb-a-1-0", IDS.tolist(), "marker")
    FakeServer(str(tmp_path)).dump("hsb-a-10-0", IDS.tolist(), "ok")
    dumps.give_back(str(tmp_path), "hsb-a-1-0.")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [dumpfile.is_spare(name) for name in names] == [True, True, False]
    assert names[2] == "hsb-a-10-0.0.safetensors"
    dumps.remove_spares(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["hsb-a-10-0.0.safetensors"]
