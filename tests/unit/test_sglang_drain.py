# SPDX-License-Identifier: GPL-3.0-or-later
"""How many requests a server has in flight, by what its releases answer."""

from __future__ import annotations

import json
import time

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.modules import sglang_drain


def answers(monkeypatch, **bodies):
    def request(_url, path, *_args, **_more):
        body = bodies.get(path.strip("/").replace("/", "_"))
        if body is probe.Unreachable:
            raise probe.Unreachable("gone")
        return (404, b"") if body is None else (200, json.dumps(body).encode())

    monkeypatch.setattr(probe, "request", request)


@pytest.mark.parametrize(
    "bodies, number",
    [
        ({"v1_loads": {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 3}, {"num_running_reqs": 1}]}}, 6),
        ({"get_load": [{"num_reqs": 4, "num_waiting_reqs": 1}]}, 4),
        ({}, None),
        ({"v1_loads": probe.Unreachable}, None),
    ],
)
def test_requests_in_flight(monkeypatch, bodies, number):
    answers(monkeypatch, **bodies)
    assert probe.requests_in_flight("http://x") == number


@pytest.mark.parametrize("number, left, state", [(0, 10, "idle"), (3, 10, "busy"), (3, -1, "late"), (None, 10, "idle")])
def test_states(monkeypatch, number, left, state):
    monkeypatch.setattr(probe, "requests_in_flight", lambda *_args: number)
    assert sglang_drain.look({"url": "", "api_key": "", "pid": None, "deadline": time.time() + left})["state"] == state
