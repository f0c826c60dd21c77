# SPDX-License-Identifier: GPL-3.0-or-later
"""A prefill that never passes the patched layer loop is named at once, and never waited for in vain."""

from __future__ import annotations

import asyncio
import time

import pytest

from capture import capturing, make_records
from cases import WITH_RIDS, parameters
from hidden_state_bridge.dumps import DumpRejected, wait_for
from hs_capture.settings import DEFAULT_RID_PREFIX
from source_edits import forward_as_from_a_graph

RECORDED_TOKENS = 48
LONG = make_records([RECORDED_TOKENS + 52], 31, "long")
SHORT, SHORT_RID = [9, 77, 301, 44, 5, 18], f"{DEFAULT_RID_PREFIX}short"
# Seconds in which the extractor would give up.
PATIENCE = 120
CASES = [(release, 1) for release in WITH_RIDS]


@pytest.mark.parametrize("release, tp_size", parameters(CASES, CASES[-1]))
def test_a_forward_from_a_graph_is_named(engine_of, tmp_path, release, tp_size):
    engine = engine_of(release)
    forward_as_from_a_graph(engine, RECORDED_TOKENS)
    with capturing(engine, "deepseek_v3", tp_size, tmp_path) as running:
        # The hook is there: a batch that is too large for the graph passes it.
        assert set(running.take(LONG).dumps) == set(LONG)
        assert running.server.generate(SHORT, SHORT_RID)["output_ids"] == []
        begun = time.monotonic()
        with pytest.raises(DumpRejected, match=r"did not pass the capture, which saw \d+ forwards .* --disable-prefill-cuda-graph"):
            asyncio.run(wait_for(str(running.dumps), SHORT_RID, len(SHORT), PATIENCE))
        assert time.monotonic() - begun < PATIENCE
        assert set(running.take(make_records([RECORDED_TOKENS + 1], 32, "after")).errors) == set()
