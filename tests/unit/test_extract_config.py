# SPDX-License-Identifier: Apache-2.0
"""The extractor's configuration and its HTTP call, which need no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import json

import numpy as np
import pytest
from aiohttp import web

import hs_manifest
from hidden_state_bridge.__main__ import main
from hidden_state_bridge.client import Client, RecordRefused, RequestFailed, ServerAway
from hidden_state_bridge.config import need_packages, read_config
from hidden_state_bridge.errors import ConfigError
from hidden_state_bridge.formats import FORMATS, file_name, number_of

IDENTITY = {"dataset": "d", "weights": "w", "layers": [1, 3, 4], "final": "post_norm", "dtype": "bfloat16"}
CONFIG = {
    "schema": 1,
    "run": hs_manifest.run_of(IDENTITY),
    "identity": IDENTITY,
    "dataset": "/data",
    "share": "0-9",
    "url": "http://127.0.0.1:30000",
    "dump_dir": "/dev/shm/x",
    "output_dir": "/out",
    "format": "specforge",
    "layers": [1, 3, 4],
    "final": "post_norm",
    "hidden_size": 7168,
    "dtype": "bfloat16",
}


def test_bytes_a_token_are_those_of_the_design():
    config = read_config(CONFIG)
    assert config.bytes_per_token == 57_344 + 8
    assert config.rid_stem == f"hsb-{config.run}-"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema": 2}, "schema 2, this extractor reads 1"),
        ({"sahre": "0"}, "unknown setting sahre"),
        ({"concurrency": 0}, "concurrency is 0; it must be a whole number of at least 1"),
        ({"concurrency": "16"}, "concurrency is '16'"),
        ({"retries": True}, "retries is True"),
        ({"request_timeout": 0}, "request_timeout is 0; it must be a number of seconds above 0"),
        ({"url": "127.0.0.1:30000"}, "it must begin with http:// or https://"),
        (
            {"format": "parquet"},
            "it must be one of specforge, speculators, modelopt, safetensors, safetensors_zstd, or a list of some of them",
        ),
        ({"format": []}, "or a list of some of them"),
        ({"format": ["specforge", 1]}, "or a list of some of them"),
        ({"format": ["specforge", "specforge"]}, "name each format once"),
        ({"format": ["specforge", "speculators"]}, "format speculators needs final pre_norm or both, not post_norm"),
        ({"format": "modelopt", "final": "pre_norm"}, "format modelopt needs final post_norm or both, not pre_norm"),
        ({"layers": [3, 1]}, "it must be a list of ascending layer numbers"),
        ({"layers": [1, 1, 2]}, "it must be a list of ascending layer numbers"),
        ({"layers": []}, "it must be a list of ascending layer numbers"),
        ({"layers": [1, 3, 5]}, "identity.layers is [1, 3, 4] and layers [1, 3, 5]"),
        ({"final": "pre_norm"}, "format specforge needs final post_norm or both, not pre_norm"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"run": "0" * 12}, "by its identity it is"),
        ({"identity": []}, "identity must be an object"),
        ({"output_dir": None}, "output_dir is None; it must be text"),
        ({"group": 5}, "group is 5; it must be text or null"),
    ],
)
def test_a_bad_configuration_is_refused(change, text):
    with pytest.raises(ConfigError) as caught:
        read_config({**CONFIG, **change})
    assert text in str(caught.value)


def test_missing_settings_and_files_end_with_status_2(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"lacks dataset, url"):
        read_config({key: value for key, value in CONFIG.items() if key not in ("url", "dataset")})
    assert main(["extract", "--config", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    assert main(["extract", "--config", str(bad)]) == 2
    bad.write_text(json.dumps({**CONFIG, "group": "no-such-group", "output_dir": str(tmp_path / "out")}))
    assert main(["extract", "--config", str(bad)]) == 2
    assert "group 'no-such-group' does not exist on this host" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_lie_in_directories_of_two_thousand():
    assert file_name("specforge", 0) == "specforge/rows_0-2000/data_0.ckpt"
    assert file_name("specforge", 1999) == "specforge/rows_0-2000/data_1999.ckpt"
    assert file_name("safetensors", 37311) == "safetensors/rows_36000-38000/data_37311.safetensors"
    assert file_name("modelopt", 2000) == "modelopt/rows_2000-4000/data_2000.pt"
    # The trainer counts on one flat directory.
    assert file_name("speculators", 37311) == "speculators/hidden_states/hs_37311.safetensors"
    for name in FORMATS:
        assert number_of(file_name(name, 37311)) == 37311
    for path in (
        "specforge/rows_0-2000/data_2000.ckpt",
        "specforge/data_7.ckpt",
        "specforge/rows_0-2000/data_07.ckpt",
        "other/data_7.ckpt",
    ):
        assert number_of(path) is None


def test_several_formats_have_their_bytes_and_their_package(monkeypatch):
    one = read_config({**CONFIG, "format": ["specforge"]})
    two = read_config({**CONFIG, "format": ["specforge", "safetensors_zstd"]})
    assert read_config(CONFIG).formats == one.formats == ("specforge",)
    assert two.output_bytes_per_token == 2 * one.output_bytes_per_token and two.bytes_per_token == one.bytes_per_token
    need_packages(two.formats)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    need_packages(one.formats)
    with pytest.raises(ConfigError, match="needs the Python package zstandard in .*python.*; install it there, or take safetensors"):
        need_packages(two.formats)
    # The controller checks the settings, and needs no package of the hosts.
    assert read_config({**CONFIG, "format": "safetensors_zstd"}).formats == ("safetensors_zstd",)


async def _ask(answer, api_key=None, timeout=5.0):
    """One prefill against a server that answers so; returns the body it was sent."""
    seen = {}

    async def generate(request):
        seen.update(await request.json(), authorization=request.headers.get("Authorization"))
        return await answer()

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Client(f"http://127.0.0.1:{runner.addresses[0][1]}/", api_key, timeout, 1) as client:
            await client.prefill("hsb-x-1-0", np.array([5, 6], dtype=np.int32))
    finally:
        await runner.cleanup()
    return seen


def ask(answer, **options):
    """Run `_ask` with an answer given as status and JSON, or as a coroutine function."""
    if isinstance(answer, tuple):
        status, body = answer

        async def coroutine():
            return web.json_response(body, status=status)

        return asyncio.run(_ask(coroutine, **options))
    return asyncio.run(_ask(answer, **options))


def test_the_request():
    sent = ask((200, {"text": ""}), api_key="k")
    assert sent == {
        "input_ids": [5, 6],
        "rid": "hsb-x-1-0",
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "authorization": "Bearer k",
    }


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, RecordRefused),
        (413, RecordRefused),
        (422, RecordRefused),
        (401, ConfigError),
        (404, ConfigError),
        (429, RequestFailed),
        (500, RequestFailed),
        (502, ServerAway),
        (503, ServerAway),
    ],
)
def test_what_a_status_means(status, error):
    with pytest.raises(error, match=rf"HTTP {status} from http.*: too long, too bad"):
        ask((status, {"error": {"message": "too long,\n too bad"}}))


def test_an_abort_a_timeout_and_a_cut_answer():
    with pytest.raises(RequestFailed, match="aborted the request: no room"):
        ask((200, {"meta_info": {"finish_reason": {"type": "abort", "message": "no room"}}}))

    async def late():
        await asyncio.sleep(5)

    with pytest.raises(RequestFailed, match=r"no answer from http://127\.0\.0\.1:\d+ within 0\.1 s"):
        ask(late, timeout=0.1)


def test_no_server():
    async def attempt():
        async with Client("http://127.0.0.1:9", None, 5, 1) as client:
            await client.prefill("hsb-x-1-0", np.array([5], dtype=np.int32))

    with pytest.raises(ServerAway, match="Cannot connect"):
        asyncio.run(attempt())
