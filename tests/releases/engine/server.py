# SPDX-License-Identifier: GPL-3.0-or-later
"""One SGLang server on this machine's CPU: start, requests, stop."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path

import yaml

import sglang_flags
from engines import ROOT, Engine

# Seconds. A start takes 10 to 40 on two idle cores, and minutes on a busy machine.
START, STOP, ANSWER = 300, 60, 120
SHOWN_LINES = 40


class ServerError(Exception):
    """The server did not do as asked; the message ends with the last lines of its log."""


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def free_port() -> int:
    """A port low enough for releases that want a second one, 10,000 above."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A server with the capture flags of its release, as a context: started on entry, gone on exit.

    `environment` is added to the server's; its log is `log`. `arguments` stand last, so they count; the flags of
    `without`, which take no value, are left out.
    """

    def __init__(
        self,
        engine: Engine,
        model: Path,
        tp_size: int,
        log: Path,
        environment: dict[str, str],
        arguments: Sequence[str] = (),
        without: Collection[str] = (),
    ) -> None:
        settings = yaml.safe_load((ROOT / "roles" / "_sglang_cpu" / "vars" / "main.yml").read_text())
        self.log = log
        self.url = f"http://127.0.0.1:{free_port()}"
        usual = [*settings["_sglang_cpu_server_args"], *sglang_flags.capture_arguments(engine.release)]
        absent = set(without) - set(usual)
        if absent:
            raise ServerError(f"{', '.join(sorted(absent))} cannot be left out: the server has {' '.join(usual)}")
        self._command = [
            *[engine.python, "-m", "sglang.launch_server", "--model-path", model, "--tp-size", str(tp_size)],
            *["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]],
            *[argument for argument in usual if argument not in without],
            *arguments,
        ]
        self._environment = {
            **os.environ,
            **settings["_sglang_cpu_server_environment"],
            # One core a rank: ranks that share cores wait for each other.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, usable_cores()[:tp_size])),
            **environment,
        }

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_failure: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, a second time too; its log begins anew."""
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, cwd=self.log.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it as an operator does; nothing where it was killed."""
        if self._process.returncode is not None:
            return
        os.kill(self._process.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP
        while self._ended() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        # Some releases leave workers behind when they end.
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def kill(self) -> None:
        """SIGKILL to all its processes at once; returns when they are gone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        # The session's number stays taken until its leader is reaped.
        while members := self.members():
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait()

    def _ended(self) -> os.waitid_result | None:
        """How the server ended, None while it runs. This does not reap it: its number, which names the session, stays taken."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def members(self) -> list[int]:
        """The processes of the session that the server leads, itself included."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # After the name in brackets: state, parent, group, session.
                state, _parent, _group, session = path.read_text().rpartition(")")[2].split()[:4]
                if int(session) == self._process.pid and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def generate(self, input_ids: list[int], rid: str, new_tokens: int = 0) -> dict:
        """One greedy request; returns SGLang's answer."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": input_ids, "rid": rid, "sampling_params": sampling}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise self.failure(f"{rid}: {error} {error.read(2000).decode('utf-8', 'replace')}") from error
        except OSError as error:
            raise self.failure(f"{rid}: {error}") from error

    def failure(self, message: str) -> ServerError:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return ServerError("\n".join([message, f"the last lines of {self.log}:", *lines[-SHOWN_LINES:]]))

    def _wait(self) -> None:
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            ended = self._ended()
            if ended is not None:
                raise self.failure(f"the server ended with status {ended.si_status} before it was ready")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                    return
            except OSError:
                time.sleep(1)
        raise self.failure(f"the server was not ready after {START} s")
