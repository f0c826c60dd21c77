# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a patched SGLang server: `POST /generate` that leaves dumps as the capture runtime does.

It stands in for the HTTP layer, the scheduler, the model and the capture: no model runs, a state is a plain function of
token, position and layer (see `expected_state`), and faults are played on demand. What the real server does is covered
by the end-to-end test.
"""

from __future__ import annotations

import asyncio
import collections
import threading
from pathlib import Path
from typing import Callable

import dumping
import torch
from aiohttp import web

from hs_capture import dumpfile
from hs_capture.fingerprints import RID_SUFFIX, Signs

LAYERS = (1, 3, 4)
HIDDEN = 8
FINAL = 99


def expected_state(input_ids: list[int], layer: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """State [tokens, HIDDEN] of a layer, FINAL for the final one: different in every row, column and layer."""
    ids = torch.tensor(input_ids, dtype=torch.float32)[:, None]
    position = torch.arange(len(input_ids), dtype=torch.float32)[:, None]
    return (layer * 1000 + ids + position / 128 + torch.arange(HIDDEN) / 16).to(dtype)


class FakeServer:
    """Serves on a free port in a thread. `behave(rid, input_ids, tries)` names the fault to play, or `ok`.

    tries: how often this record was asked for, from 0. Faults: ok, pieces, ids, nan, inf, layer, width, dtype, short,
    hole, marker, none, silent (all ranks but 0), and any number as text, which is the HTTP status answered.
    """

    # Tensor parallel ranks of a host, each of which leaves fingerprints, on how many hosts, and whether they hold partial sums.
    ranks = 1
    nodes = 1
    partial = False

    def __init__(self, dump_dir: str, behave: Callable[[str, list[int], int], str] | None = None, delay: float = 0.0):
        self.dump_dir, self.delay = dump_dir, delay
        self.behave = behave or (lambda rid, input_ids, tries: "ok")
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self._tries: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._ready = threading.Event()

    def __enter__(self) -> FakeServer:
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 0}
        rid, input_ids = body["rid"], body["input_ids"]
        self.requests.append(rid)
        self.headers.append(dict(request.headers))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay)
            fault = self.behave(rid, input_ids, self._tries[tuple(input_ids)])
            self._tries[tuple(input_ids)] += 1
            if fault.isdecimal():
                return web.json_response({"error": {"message": f"asked to answer {fault}"}}, status=int(fault))
            self.dump(rid, input_ids, fault)
        finally:
            self.in_flight -= 1
        return web.json_response({"meta_info": {"id": rid, "finish_reason": {"type": "length"}}})

    def dump(self, rid: str, input_ids: list[int], fault: str) -> None:
        """Leave what a capture leaves for one request."""
        if fault == "marker":
            dumping.write_error(self.dump_dir, rid, "prefix cache hit", "start with --disable-radix-cache")
        if fault in ("marker", "none"):
            return
        half = len(input_ids) // 2 if fault in ("pieces", "hole") and len(input_ids) > 1 else 0
        bounds = [(0, half), (half, len(input_ids))] if half else [(0, len(input_ids))]
        if fault == "short":
            bounds = [(0, len(input_ids) + 1)]
            input_ids = input_ids + [0]
        for first, last in bounds:
            if fault == "hole" and first:
                continue
            self._write(rid, input_ids, first, last, fault)

    def _write(self, rid: str, input_ids: list[int], first: int, last: int, fault: str) -> None:
        dtype = torch.bfloat16 if fault == "dtype" else torch.float32
        tensors = {"input_ids": torch.tensor(input_ids[first:last], dtype=torch.int64)}
        for layer in LAYERS:
            tensors[f"layer_{layer}"] = expected_state(input_ids, layer, dtype)[first:last].clone()
        tensors["final_post_norm"] = expected_state(input_ids, FINAL, dtype)[first:last].clone()
        if fault == "ids":
            tensors["input_ids"][-1] += 1
        if fault == "nan":
            tensors["layer_3"][-1, 2] = float("nan")
        if fault == "inf":
            tensors["final_post_norm"][0, 5] = float("inf")
        if fault == "layer":
            tensors["layer_5"] = tensors.pop("layer_4")
        if fault == "width":
            tensors = {k: v if k == "input_ids" else v[:, :-1].contiguous() for k, v in tensors.items()}
        metadata = {"layers": ",".join(map(str, LAYERS)), "final": "post_norm", "tp_size": str(self.ranks * self.nodes)}
        metadata["tp_ranks_on_host"] = str(self.ranks)
        metadata.update(sglang_version="0.5.20", patch_version="1", family="D")
        dumping.write_dump(self.dump_dir, rid, first, tensors, metadata)
        if rid.startswith(f"hsb-{RID_SUFFIX}"):
            for rank in range(self.ranks):
                if fault != "silent" or rank == 0:
                    self._write_fingerprints(rid, first, rank, tensors)

    def _write_fingerprints(self, rid: str, start: int, rank: int, tensors: dict[str, torch.Tensor]) -> None:
        signs = Signs()
        share = 1 + rank / 50 if self.partial else 1.0
        values = {name: (signs.project(tensor) * share).numpy().tobytes() for name, tensor in tensors.items() if name != "input_ids"}
        content = dumpfile.encode_fingerprint(rid, start, rank, len(tensors["input_ids"]), values)
        (Path(self.dump_dir) / dumpfile.fingerprint_name(rid, start, rank)).write_bytes(content)
