# SPDX-License-Identifier: GPL-3.0-or-later
"""What the module does to bring a service to a state, and what it proves."""

from __future__ import annotations

import json
import os
import socket
import subprocess

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_control, service_worker
from ansible_collections.hidden_state.bridge.plugins.modules import managed_service


class Outcome(Exception):
    """How the module ended."""

    def __init__(self, failed, **values):
        super().__init__(values.get("msg", ""))
        self.failed = failed
        self.values = values


class FakeModule:
    """As much of an AnsibleModule as the worker uses."""

    _diff = False

    def __init__(self, check_mode=False, **params):
        defaults = {
            "name": "sglang",
            "state": "started",
            "manager": "supervisor",
            "foreign": False,
            "state_dir": "/nowhere",
            "tag": "right",
        }
        more = {"command": [], "newer_than": [], "host": "", "port": 0, "port_timeout": 0, "enabled": None, "timeout": 1, "stop_timeout": 1}
        self.params = {**defaults, **more, "supervisord": [], "launch": None, "container_command": None, "visible_gpus": None, **params}
        self.check_mode = check_mode

    def exit_json(self, **values):
        raise Outcome(False, **values)

    def fail_json(self, **values):
        raise Outcome(True, **values)


class FakeManager:
    """Keeps what it was told; a stop ends the process, or does not."""

    def __init__(self, process=None, stops=True):
        self.told, self.process, self.stops = [], process, stops

    def look(self, *_args):
        pid = self.process.pid if self.process else None
        found = hp.process(pid) if pid else {"since": None, "argv": [], "environment": None}
        state = "running" if pid else "stopped"
        pids = hp.family_of(pid) if pid else []
        return {"manager": "supervisor", "name": "sglang", "state": state, "pid": pid, "detail": "", "processes": pids, **found}

    def start(self):
        self.told.append("start")
        self.process = type("Process", (), {"pid": os.getpid()})

    def stop(self, members):
        self.told.append("stop")
        if self.stops:
            for pid, _start in members:
                os.kill(pid, 9)
            self.process.wait()
            self.process = None

    def refresh(self):
        self.told.append("refresh")

    def is_enabled(self):
        return None


def work(monkeypatch, manager, **params):
    monkeypatch.setattr(service_worker.service_control, "of", lambda *_args: manager)
    monkeypatch.setattr(service_worker.sq, "query", manager.look)
    monkeypatch.setattr(service_worker, "REAP_SECONDS", 0.5)
    with pytest.raises(Outcome) as caught:
        service_worker.Worker(FakeModule(**params)).run()
    return caught.value


def test_a_stopped_service_is_started(monkeypatch):
    manager = FakeManager()
    outcome = work(monkeypatch, manager)
    assert (outcome.values["action"], outcome.values["changed"], manager.told) == ("start", True, ["start"])


def test_another_process_is_replaced(monkeypatch, child):
    manager = FakeManager(child)
    outcome = work(monkeypatch, manager, tag="another")
    assert (outcome.values["action"], manager.told) == ("restart", ["stop", "start"])
    assert outcome.values["reasons"]


def test_the_right_process_is_kept(monkeypatch, child):
    manager = FakeManager(child)
    outcome = work(monkeypatch, manager, tag="tag")
    assert (outcome.values["action"], outcome.values["changed"], manager.told) == ("none", False, ["refresh"])


def test_what_an_earlier_start_left_is_ended_before_a_start(monkeypatch, child):
    manager = FakeManager(child)
    running = manager.look
    manager.look = lambda *args: dict(running(*args), state="failed" if manager.process is child else "running")
    outcome = work(monkeypatch, manager)
    assert (outcome.values["action"], manager.told) == ("restart", ["stop", "start"])
    assert "earlier start" in outcome.values["reasons"][0]


def test_check_mode_does_nothing(monkeypatch, child):
    manager = FakeManager(child)
    outcome = work(monkeypatch, manager, tag="another", check_mode=True)
    assert (outcome.values["action"], outcome.values["changed"], manager.told) == ("restart", True, [])


def test_what_survives_a_stop_is_listed(monkeypatch, child):
    outcome = work(monkeypatch, FakeManager(child, stops=False), state="stopped")
    assert outcome.failed and "stopped, but not gone: pid %d: " % child.pid in outcome.values["msg"]


def test_a_taken_port_is_known_before_anything_stops(monkeypatch, child):
    manager = FakeManager(child)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        outcome = work(monkeypatch, manager, tag="another", port=port)
    assert outcome.failed and "port %d is taken: pid %d: " % (port, os.getpid()) in outcome.values["msg"]
    assert (outcome.values["action"], manager.told) == ("none", [])


def test_a_port_is_waited_for_within_bounds(monkeypatch):
    manager = FakeManager()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        clock = iter(range(100))
        monkeypatch.setattr(service_worker.time, "monotonic", lambda: next(clock))
        monkeypatch.setattr(service_worker.time, "sleep", lambda _seconds: None)
        outcome = work(monkeypatch, manager, port=port, port_timeout=5)
        assert outcome.failed and "port %d is taken and was not left within 5 s: pid %d: " % (port, os.getpid()) in outcome.values["msg"]
        assert manager.told == []
        monkeypatch.setattr(service_worker.time, "sleep", lambda _seconds: listener.close())
        outcome = work(monkeypatch, manager, port=port, port_timeout=5)
    assert not outcome.failed and manager.told == ["start"]


def test_a_port_that_a_stop_does_not_free_is_told(monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        outcome = work(monkeypatch, FakeManager(), state="stopped", port=listener.getsockname()[1])
    assert outcome.failed and "has to be stopped by hand" in outcome.values["msg"]


def test_a_worker_that_ends_while_it_is_told_to_ends_no_stop(monkeypatch, tmp_path):
    with subprocess.Popen(["true"]) as short:
        gone = (short.pid, 1)
    looks = [[gone]]
    monkeypatch.setattr(hp, "living", lambda _members: looks.pop() if looks else [])
    params = {"name": "sglang", "state_dir": str(tmp_path), "stop_timeout": 1, "supervisord": []}
    service_control.of("supervisor", params).stop([gone])
    assert looks == []


def test_what_was_begun_is_told_whatever_ends_it(monkeypatch, capsys, tmp_path):
    """Or a capture server that its manager starts again and again would not be stopped."""

    def start(_self):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(service_control.Supervisor, "start", start)
    arguments = {"name": "sglang", "state": "started", "manager": "supervisor", "state_dir": str(tmp_path)}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        managed_service.main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["msg"] == "sglang: [Errno 12] Cannot allocate memory"
    assert said["failed"] and said["action"] == "start" and said["service"]["name"] == "sglang"


# -- GPUs ---------------------------------------------------------------------------------------------


def test_a_process_that_a_stop_leaves_on_the_gpus_is_told(monkeypatch, child):
    rows = [{"pid": child.pid, "gpu": "GPU-a", "command": "python"}, {"pid": 77, "gpu": "GPU-a", "command": "monitor"}]
    left = {"pid": 99, "gpu": "GPU-a", "command": "sglang::scheduler"}
    manager = FakeManager(child)
    monkeypatch.setattr(service_worker.gpus, "compute_processes", lambda: [rows[1], left] if manager.told else rows)
    outcome = work(monkeypatch, manager, state="stopped")
    assert outcome.failed and "its GPUs are still used: pid 99: sglang::scheduler" in outcome.values["msg"]
    assert "monitor" not in outcome.values["msg"]


def test_a_server_is_not_started_into_what_an_earlier_one_left(monkeypatch):
    rows = [{"pid": 2**22 + 1, "gpu": "GPU-a", "command": "sglang::scheduler"}]
    monkeypatch.setattr(service_worker.gpus, "compute_processes", lambda: rows)
    manager = FakeManager()
    outcome = work(monkeypatch, manager)
    assert outcome.failed and "not started" in outcome.values["msg"] and "sglang::scheduler" in outcome.values["msg"]
    assert manager.told == []
