# SPDX-License-Identifier: GPL-3.0-or-later
"""One probe of a server: the process, /health, a real request, its settings; and what its log suggests."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.modules import sglang_health

INFO = {"version": "0.5.20", "disable_radix_cache": True, "chunked_prefill_size": -1, "api_key": "secret"}


class Stand(ThreadingHTTPServer):
    """A server with settable answers that keeps what it was asked; like SGLang it asks for its key everywhere but at /health."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers = {"/health": (200, b""), "/generate": (200, b"{}"), "/server_info": (200, json.dumps(INFO).encode())}
        self.asked = []
        self.key = ""


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        self.server.asked.append((self.path, self.headers.get("Authorization"), self.rfile.read(length)))
        status, body = self.server.answers.get(self.path, (404, b""))
        if self.server.key and not self.path.startswith("/health") and self.headers.get("Authorization") != "Bearer " + self.server.key:
            status, body = 401, b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_args):
        """Silent."""


@pytest.fixture
def stand():
    with Stand() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def look(server, **changed):
    params = {
        "url": "http://127.0.0.1:%d" % server.server_port,
        "name": "",
        "manager": "supervisor",
        "state_dir": "/nowhere",
        "pid": None,
        "since": None,
        "api_key": "",
        "generate": True,
        "capture": False,
        "arguments": ["--chunked-prefill-size", "-1"],
        "request_timeout": 2,
    }
    return sglang_health.look(dict(params, **changed))


def test_ready(stand):
    found = look(stand, api_key="secret")
    assert found["state"] == "ready" and found["server"]["version"] == "0.5.20"
    assert "secret" not in json.dumps(found)
    assert {header for _path, header, _body in stand.asked} == {"Bearer secret"}


def test_the_real_request_has_no_rid(stand):
    look(stand)
    (body,) = [body for path, _header, body in stand.asked if path == "/generate"]
    assert "rid" not in json.loads(body)


def test_no_proxy_is_used(stand, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert look(stand)["state"] == "ready"


def test_without_the_real_request(stand):
    assert look(stand, generate=False)["state"] == "ready"
    assert "/generate" not in {path for path, _header, _body in stand.asked}


def test_nobody_listens(stand):
    found = look(stand, url="http://127.0.0.1:1")
    assert (found["state"], found["line"]) == ("waiting", "loading, no answer yet")


def test_warming_up(stand):
    stand.answers["/health"] = (503, b"")
    found = look(stand)
    assert (found["state"], found["line"]) == ("waiting", "warming up, /health answers 503")


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("key", ["", "wrong"])
def test_wrong_key(stand, key, generate):
    stand.key = "right"
    found = look(stand, api_key=key, generate=generate)
    assert found["state"] == "failed" and "sglang_server_api_key" in found["message"]
    assert look(stand, api_key="right", generate=generate)["state"] == "ready"


def test_whether_a_key_is_refused(stand):
    url = "http://127.0.0.1:%d" % stand.server_port
    assert not probe.refuses_key(url, "any")
    stand.key = "right"
    assert probe.refuses_key(url) and probe.refuses_key(url, "wrong") and not probe.refuses_key(url, "right")
    assert not probe.refuses_key("http://127.0.0.1:1", "any")


def test_healthy_but_deaf(stand):
    stand.answers["/generate"] = (500, b"scheduler is dead")
    found = look(stand)
    assert found["state"] == "waiting" and "scheduler is dead" in found["line"]


def test_older_releases_have_another_path(stand):
    stand.answers["/get_server_info"] = stand.answers.pop("/server_info")
    assert look(stand)["state"] == "ready"


def test_settings_that_corrupt_states(stand):
    stand.answers["/server_info"] = (200, json.dumps(dict(INFO, disable_radix_cache=False)).encode())
    assert look(stand)["state"] == "ready"
    found = look(stand, capture=True)
    assert found["state"] == "failed" and "--disable-radix-cache" in found["message"]
    assert len(found["problems"]) == 1


# -- the process ----------------------------------------------------------------------------------------


def service(monkeypatch, state, pid=None, detail="", log=()):
    monkeypatch.setattr(sq, "query", lambda *_args: {"state": state, "pid": pid, "since": 1.0, "detail": detail})
    monkeypatch.setattr(sq, "log_tail", lambda *_args, **_more: list(log))


def test_a_living_process_is_waited_for(stand, monkeypatch):
    service(monkeypatch, "running", os.getpid())
    assert look(stand, name="sglang", pid=os.getpid(), url="http://127.0.0.1:1")["state"] == "waiting"


def test_a_dead_process_ends_the_wait(stand, monkeypatch):
    service(monkeypatch, "failed", detail="exit status 1", log=["...", "error: unrecognized arguments: --no-such-flag"])
    found = look(stand, name="sglang", pid=2**22 + 1)
    assert found["state"] == "failed"
    assert found["message"].startswith("the server's process %d died (exit status 1). Hint: " % (2**22 + 1))
    assert "take it out of the server's arguments" in found["message"]
    assert found["log_tail"][-1].endswith("--no-such-flag")


def test_the_list_of_all_settings_is_no_hint(stand, monkeypatch):
    log = ["[2026] server_args={'trust_remote_code': False, 'api_key': 'secret'}", "x" * 1000]
    service(monkeypatch, "failed", log=log)
    found = look(stand, name="sglang", pid=2**22 + 1)
    assert "trust" not in found["message"] and "secret" not in json.dumps(found) and found["log_tail"] == ["x" * 400]


def test_a_process_that_the_manager_started_again_is_another_one(stand, monkeypatch):
    service(monkeypatch, "running", os.getpid())
    assert look(stand, name="sglang", pid=2**22 + 1)["state"] == "failed"


def test_another_process_on_the_port_is_not_taken_for_the_server(stand, monkeypatch, child):
    service(monkeypatch, "running", child.pid)
    found = look(stand, name="sglang", pid=child.pid)
    assert found["state"] == "failed" and "held by process %d" % os.getpid() in found["message"]


def test_a_process_on_another_address_is_not_in_the_way(stand, monkeypatch, child):
    service(monkeypatch, "running", child.pid)
    assert look(stand, name="sglang", pid=child.pid, url="http://127.0.0.2:%d" % stand.server_port)["state"] == "waiting"


def test_the_key_of_a_server_below_a_wrapper(stand, monkeypatch, child):
    server = {"argv": ["python", "-m", "sglang.launch_server", "--api-key", "of-its-own"]}
    monkeypatch.setattr(sglang_health.hp, "process", lambda pid: {"argv": ["sh"]} if pid == child.pid else server)
    look(stand, pid=child.pid)
    assert {header for _path, header, _body in stand.asked} == {"Bearer of-its-own"}


def test_the_key_of_a_server_that_was_found(stand, monkeypatch, tmp_path):
    monkeypatch.setattr(sglang_health.hp, "process", lambda _pid: {"argv": ["python", "--api-key", "of-its-own"]})
    look(stand, pid=os.getpid())
    assert {header for _path, header, _body in stand.asked} == {"Bearer of-its-own"}


def test_a_stopped_service_is_not_waited_for(stand, monkeypatch):
    service(monkeypatch, "stopped")
    assert look(stand, name="sglang")["state"] == "failed"


@pytest.mark.parametrize(
    "line, advice",
    [
        ("launch_server.py: error: unrecognized arguments: --disable-piecewise-cuda-graph", "does not know --disable-piecewise"),
        ("sglang serve: error: argument --tp-size: invalid int value: 'x'", "--tp-size has a value"),
        ("[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use", "port is taken"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "GPU memory"),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=-2.4", "--mem-fraction-static"),
        ("ValueError: Please pass the argument `trust_remote_code=True`", "--trust-remote-code"),
        ("OSError: Can't load the configuration of '/nowhere'", "sglang_server_model"),
        ("OSError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nowhere'.", "sglang_server_model"),
        (
            "OSError: Repo id must use alphanumeric chars, '-', '_' or '.'. The name cannot start or end with '-': '/nowhere'.",
            "server_model",
        ),
        ("RuntimeError: SGLANG_HS_DUMP_LAYERS: layer 9 is out of range", "capture setting"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp", "NCCL"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "--attention-backend"),
        ("ModuleNotFoundError: No module named 'sgl_kernel'", "sgl_kernel"),
        ("PermissionError: [Errno 13] Permission denied: '/models'", "may not use /models"),
        ("all is well", ""),
    ],
)
def test_hints(line, advice):
    hint = probe.hint(["Traceback", line])
    assert advice in hint and bool(advice) == bool(hint)
