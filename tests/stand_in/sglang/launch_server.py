# SPDX-License-Identifier: GPL-3.0-or-later
"""python -m sglang.launch_server --model-path DIR --port N [flags of SGLang]

STAND_IN says how it behaves, STAND_IN_CAPTURE how it behaves while SGLANG_HS_DUMP_DIR is set: words such as `health=503`,
`generate=hang`, `die=20` (seconds), `ready=3` (seconds until it listens), `deaf` (to SIGTERM), `orphan` (leaves its worker behind),
`dumps` (leaves dumps as a capture does, by tests/unit/engine/fake_server.py on PYTHONPATH), `refuse=20` (400 for requests of so many
tokens), `hold=FILE` (while it is there, no request of an extraction is answered).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SWITCHES = {
    "--disable-radix-cache",
    "--disable-prefill-cuda-graph",
    "--enforce-disable-flashinfer-allreduce-fusion",
    "--trust-remote-code",
    "--enable-mixed-chunk",
    "--enable-dp-attention",
}
VALUES = {
    "--model-path",
    "--host",
    "--port",
    "--tp",
    "--chunked-prefill-size",
    "--api-key",
    "--config",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
}


def parse(words: list[str]) -> dict[str, str]:
    """Flags and their values; exit status 2 for one that is not known, as argparse does it."""
    found, rest = {}, list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name in SWITCHES:
            found[name] = "true"
        elif name in VALUES:
            found[name] = value if equals else rest.pop(0)
        else:
            print(f"launch_server.py: error: unrecognized arguments: {name}", file=sys.stderr)
            sys.exit(2)
    return found


def behaviour() -> dict[str, str]:
    words = os.environ.get("STAND_IN", "").split()
    if os.environ.get("SGLANG_HS_DUMP_DIR"):
        words += os.environ.get("STAND_IN_CAPTURE", "").split()
    return {name: value for name, _equals, value in (word.partition("=") for word in words)}


class Handler(BaseHTTPRequestHandler):
    flags: dict[str, str] = {}
    does: dict[str, str] = {}

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.flags.get("--api-key")
        # SGLang leaves these to probes that know no key.
        if key and not self.path.startswith("/health") and self.headers.get("Authorization") != f"Bearer {key}":
            return self.answer(401, {})
        if self.path == "/health":
            return self.answer(int(self.does.get("health", "200")), None)
        if self.path == "/generate":
            if self.does.get("generate") == "hang":
                time.sleep(3600)
            if "dumps" in self.does and b'"rid"' in body:
                return self.capture(json.loads(body))
            return self.answer(200, {"output_ids": [0], "pid": os.getpid()})
        if self.path == "/server_info":
            info = {
                "version": "0.5.20",
                "disable_radix_cache": "--disable-radix-cache" in self.flags,
                "chunked_prefill_size": int(self.flags.get("--chunked-prefill-size", "8192")),
                "api_key": key,
            }
            return self.answer(200, info)
        if self.path == "/v1/loads":
            return self.answer(200, {"loads": [{"num_running_reqs": int(self.does.get("busy", "0")), "num_waiting_reqs": 0}]})
        return self.answer(404, {})

    do_POST = do_GET

    def capture(self, request: dict) -> None:
        while "-canary-" not in request["rid"] and os.path.exists(self.does.get("hold", "")):
            time.sleep(0.1)
        if len(request["input_ids"]) == int(self.does.get("refuse", "-1")):
            return self.answer(400, {"error": {"message": "asked to refuse it"}})
        from fake_server import FakeServer

        FakeServer(os.environ["SGLANG_HS_DUMP_DIR"]).dump(request["rid"], request["input_ids"], "ok")
        return self.answer(200, {"meta_info": {"id": request["rid"], "finish_reason": {"type": "length"}}})

    def answer(self, status: int, body: dict | None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: object) -> None:
        """Silent."""


def main() -> None:
    flags, does = parse(sys.argv[1:]), behaviour()
    if not os.path.isfile(os.path.join(flags["--model-path"], "config.json")):
        sys.exit(f"OSError: Can't load the configuration of '{flags['--model-path']}'")
    if "--config" in flags:
        with open(flags["--config"], encoding="utf-8") as stream:
            flags["--api-key"] = stream.read().partition("api-key:")[2].strip()
    print(f"server_args=ServerArgs({flags})", flush=True)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100000)"])

    def end(*_args: object) -> None:
        if "orphan" not in does:
            worker.kill()
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in does else end)
    if "die" in does:

        def die() -> None:
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr, flush=True)
            worker.kill()
            os._exit(1)

        threading.Timer(float(does["die"]), die).start()
    time.sleep(float(does.get("ready", "0.2")))
    Handler.flags, Handler.does = flags, does
    if "dumps" in does:
        os.makedirs(os.environ["SGLANG_HS_DUMP_DIR"], mode=0o700, exist_ok=True)
    if flags.get("--node-rank", "0") != "0":
        worker.wait()
    try:
        server = ThreadingHTTPServer((flags.get("--host", "127.0.0.1"), int(flags["--port"])), Handler)
    except OSError as error:
        worker.kill()
        sys.exit(str(error))
    server.serve_forever()


if __name__ == "__main__":
    main()
