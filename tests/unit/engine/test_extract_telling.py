# SPDX-License-Identifier: Apache-2.0
"""Whom an extraction tells of itself, and a time at which it ends."""

from __future__ import annotations

import datetime
import http.server
import json
import re
import socket
import stat
import sys
import threading

import pytest
from extractor_process import RECORDS
from fake_server import FakeServer

from hidden_state_bridge import extract
from hidden_state_bridge.config import read_config
from hidden_state_bridge.notify import notify

RUNS = re.compile(r'^hidden_state_bridge_(\w+)\{run="([0-9a-f]{12})"(?:,state="(\w+)")?\} (-?[\d.]+)$')


@pytest.fixture
def listener():
    """Takes POSTs; `said` holds them, `status` is what it answers."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            server.said.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.said, server.status = [], 200
    server.url = f"http://127.0.0.1:{server.server_port}/hook?token=tell-nobody"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url_file(site, url):
    path = site.directory / "notify_url"
    path.write_text(f"{url}\n")
    return str(path)


def test_the_end_and_a_failure_are_told(site, listener):
    notify = url_file(site, listener.url)
    site.run(2, url="http://127.0.0.1:9/", dataset="/nowhere", notify_url_file=notify)
    with FakeServer(str(site.dumps)) as server:
        out = site.run(url=server.url, notify_url_file=notify)
    assert [said["event"] for said in listener.said] == ["failed", "done"]
    failed, done = listener.said
    assert failed["host"] == done["host"] == "one" and failed["run"] == done["run"] == site.config["run"]
    assert "/nowhere" in failed["message"] and f"{RECORDS}/{RECORDS} records" in done["line"]
    assert "tell-nobody" not in out


@pytest.mark.parametrize(("status", "text"), [(500, "could not be told: HTTP 500"), (0, "could not be told: ")])
def test_a_listener_that_does_not_answer_changes_nothing(site, listener, status, text):
    listener.status = status
    url = listener.url
    if not status:
        listener.shutdown()
        listener.server_close()
    with FakeServer(str(site.dumps)) as server:
        out = site.run(url=server.url, notify_url_file=url_file(site, url))
    assert text in out and "tell-nobody" not in out
    site.check_complete()


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:9/tell-nobody and a space", "http://host:tell-nobody/x", "http://[::1/tell-nobody", "http://\u20ac/tell-nobody"],
)
def test_what_is_no_address_is_said_and_not_repeated(url):
    said = notify(url, {"state": "done", "run": "r", "message": ""}, "one", "line")
    assert said and "tell-nobody" not in said


def test_an_address_that_does_not_speak_http_changes_nothing(site):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x15\x03\x01\r\n")

        threading.Thread(target=answer, daemon=True).start()
        notify_url = url_file(site, f"http://127.0.0.1:{listening.getsockname()[1]}/")
        with FakeServer(str(site.dumps)) as server:
            out = site.run(url=server.url, share="0-1", notify_url_file=notify_url)
    assert "could not be told: BadStatusLine" in out and site.status()["state"] == "done"


@pytest.mark.parametrize("url", ["file:///etc/passwd", "tell-nobody"])
def test_what_is_no_url_is_refused_and_not_repeated(site, url):
    out = site.run(2, notify_url_file=url_file(site, url))
    assert "extraction_notify_url must begin with http:// or https://" in out and url not in out


def test_metrics_are_prometheus_text(site):
    directory = site.directory / "metrics"
    directory.mkdir()
    with FakeServer(str(site.dumps)) as server:
        site.run(url=server.url, metrics_dir=str(directory))
    (path,) = directory.iterdir()
    assert path.name == f"hidden_state_bridge_{site.config['run']}.prom" and stat.S_IMODE(path.stat().st_mode) == 0o644
    lines = path.read_text().splitlines()
    found = [RUNS.match(line) for line in lines if not line.startswith("#")]
    assert all(found)
    values = {(match[1], match[3]): float(match[4]) for match in found}
    assert values["records_done", None] == values["records_total", None] == RECORDS
    assert values["state", "done"] == 1 and values["state", "running"] == 0
    names = {match[1] for match in found}
    assert names == {line.split()[2].removeprefix("hidden_state_bridge_") for line in lines if line.startswith("# TYPE")}


def test_a_metrics_directory_that_is_not_there_is_named_first(site):
    out = site.run(2, metrics_dir=str(site.directory / "none"))
    assert "metrics_dir" in out and "make it, owned by the extractor's user" in out


def test_a_metrics_directory_that_is_not_there_is_told(site, listener):
    site.run(2, metrics_dir=str(site.directory / "none"), notify_url_file=url_file(site, listener.url))
    assert [said["event"] for said in listener.said] == ["failed"] and "metrics_dir" in listener.said[0]["message"]


def test_nothing_is_begun_after_the_time(site):
    yesterday = (datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)).isoformat()
    with FakeServer(str(site.dumps)) as server:
        out = site.run(url=server.url, until=yesterday)
        assert server.requests == [] and f"stopping: it is {yesterday}" in out
        assert site.status()["state"] == "stopped" and f"{RECORDS} records are left" in site.status()["message"]
        site.run(url=server.url, until="2099-01-31T06:00:00Z")
    site.check_complete()


@pytest.mark.parametrize("until", ["tomorrow", "2026-01-31T06:00:00", "25:00"])
def test_a_time_that_is_none_is_refused(site, until):
    assert "give a time with its zone, such as 2026-01-31T06:00:00+01:00" in site.run(2, until=until)


def test_a_log_that_nobody_reads_any_more_ends_nothing(site, monkeypatch):
    """A journal that died: the work, the status and a stop do not depend on it."""

    class Broken:
        def write(self, _text):
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    with FakeServer(site.dumps) as server, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Broken())
        assert extract.run_service(read_config({**site.config, "url": server.url})) == 0
    site.check_complete()
