# SPDX-License-Identifier: GPL-3.0-or-later
"""When a host brings its server back by itself, and what it does then; the module that orders it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest as hm
from ansible_collections.hidden_state.bridge.plugins.module_utils import return_service as rs
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_return as sr
from ansible_collections.hidden_state.bridge.plugins.modules import server_return as module

ROOT = Path(__file__).resolve().parents[2]
CAPTURE, SERVING, UNREADABLE = {layer.GATE: "/dumps"}, {"PATH": "/bin"}, None


def service(environment=SERVING, state="running", pid=7):
    return {"state": state, "pid": pid if state == "running" else None, "environment": environment, "processes": []}


@pytest.mark.parametrize(
    "before, phase, found, action",
    [
        ("serving", None, service(CAPTURE), "restart"),
        # systemd is about to start a server that captures and dies.
        ("serving", None, service(state="starting"), "restart"),
        ("serving", None, service(state="stopped"), "leave"),
        ("serving", None, service(state="failed"), "leave"),
        ("serving", None, service(state="absent"), "leave"),
        ("serving", None, service(SERVING), "leave"),
        ("serving", None, service(UNREADABLE), "fail"),
        ("serving", None, service(state="stopping"), "look"),
        # After a crash in the middle.
        ("serving", "returning", service(CAPTURE), "restart"),
        ("serving", "returning", service(state="stopped"), "start"),
        ("serving", "returning", service(state="failed"), "start"),
        ("serving", "returning", service(SERVING), "wait"),
        ("serving", "started", service(SERVING), "wait"),
        ("serving", "started", service(state="starting"), "wait"),
        # Once started it is never started again: who stopped it is not known.
        ("serving", "started", service(state="stopped"), "fail"),
        ("serving", "returned", service(state="stopped"), "leave"),
        ("stopped", None, service(CAPTURE), "stop"),
        ("stopped", "returning", service(state="stopped"), "stop"),
        ("absent", None, service(CAPTURE), "stop"),
        ("absent", None, service(SERVING), "leave"),
        # A play has brought it back.
        (None, None, service(CAPTURE), "forget"),
        (None, "returning", service(state="stopped"), "forget"),
    ],
)
def test_what_is_to_be_done(before, phase, found, action):
    assert rs.decide(before, phase, found) == action


def test_the_program_needs_nothing_but_python(tmp_path):
    build = [sys.executable, "-B", ROOT / "roles/_bridge/files/build_archive.py", tmp_path]
    package = "ansible_collections.hidden_state.bridge.plugins"
    build += [f"--main={package}.module_utils.return_service", f"--under={package}", ROOT / "plugins/module_utils"]
    archive = subprocess.run(build, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    done = subprocess.run([sys.executable, "-I", "-S", "-B", archive, tmp_path, "sglang"], cwd="/", stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "asks for no return by itself" in done.stdout
    assert subprocess.run([sys.executable, "-I", "-S", "-B", archive], cwd="/", stderr=subprocess.DEVNULL).returncode == 2


@pytest.mark.parametrize("name", ["hs_progress", "sglang_flags"])
def test_a_module_that_also_runs_outside_of_the_collection_finds_its_neighbours_in_an_archive(name):
    """Python 3.9 gives a module in an archive, such as Ansible sends to a host, no __package__ while it is loaded."""
    loaded = types.ModuleType(f"ansible_collections.hidden_state.bridge.plugins.module_utils.{name}")
    loaded.__package__ = None
    with pytest.warns(ImportWarning):
        exec((ROOT / f"plugins/module_utils/{name}.py").read_text(), loaded.__dict__)
    neighbour = {"hs_progress": "hs_manifest", "sglang_flags": "release_key"}[name]
    found = loaded.__dict__[neighbour]
    assert getattr(found, "__module__", found.__name__).startswith("ansible_collections.")


ORDER = {
    "service": "sglang",
    "manager": "supervisor",
    "url": "http://127.0.0.1:1",
    "after": 100,
    "extraction": {"output_dir": "/nowhere", "manager": "supervisor", "name": "extractor", "state_dir": "/nowhere"},
}


@pytest.fixture
def call(capsys, tmp_path):
    (tmp_path / "server" / "sglang").mkdir(parents=True)

    def call(state, check=False, **more):
        arguments = {"name": "sglang", "state_dir": str(tmp_path), "state": state, "_ansible_check_mode": check, **more}
        with patch_module_args(arguments), pytest.raises(SystemExit):
            module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return call


@pytest.fixture
def returning(tmp_path):
    return sr.Return(str(tmp_path), "sglang")


def test_an_order_is_given_held_off_and_called_off(call, returning):
    for state in ("held", "dropped"):
        assert call(state) == {
            "changed": False,
            "ordered": False,
            "service": "hidden-state-return-sglang",
            "invocation": call(state)["invocation"],
        }
    assert os.listdir(returning.home) == []
    assert call("armed", check=True, order=ORDER)["changed"] and returning.order() is None
    assert call("armed", order=ORDER, seconds=50)["changed"]
    assert 40 < returning.attended() - time.time() <= 50
    assert not call("armed", order=ORDER)["changed"] and returning.attended() <= time.time()
    assert not call("held", seconds=500)["changed"] and returning.attended() > time.time() + 400
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(returning.home)}
    assert modes == {0o600}
    assert call("dropped", check=True)["changed"] and returning.order() is not None
    assert call("dropped")["changed"] and not call("dropped")["changed"] and returning.order() is None


def test_an_order_forgets_what_an_earlier_one_has_done(call, returning):
    call("armed", order=ORDER)
    returning.note("returned")
    assert not call("armed", order=ORDER)["changed"] and returning.journal()
    assert call("armed", order={**ORDER, "after": 7})["changed"] and returning.journal() == {}


def test_the_key_of_the_server_is_in_no_result(call):
    assert "sk-secret" not in json.dumps(call("armed", order={**ORDER, "api_key": "sk-secret"}))


def test_a_play_waits_for_a_host_that_is_at_it_and_names_it(call, returning):
    call("armed", order=ORDER)
    with returning.lock():
        failed = call("held", patience=0)
    assert failed["failed"] and "is being brought back by the host itself (service hidden-state-return-sglang)" in failed["msg"]


class Host:
    """A host with an order, whose manager is told nothing but asked to write down what it would be told."""

    def __init__(self, returning, monkeypatch, before="serving", found=None):
        self.returning, self.told, self.found = returning, [], found or service(CAPTURE)
        self.health, self.refuses = "ok", 0
        monkeypatch.setattr(rs.sq, "query", lambda _manager, name, _dir: self.found if name == "sglang" else {"state": "stopped"})
        monkeypatch.setattr(rs.sq, "log_tail", lambda *_words, **_more: [])
        monkeypatch.setattr(rs, "tell", self.tell)
        monkeypatch.setattr(rs, "api_key_of", lambda _pid: "")
        monkeypatch.setattr(rs.probe, "health", lambda *_words: (self.health, "503"))
        monkeypatch.setattr(rs.probe, "generate_once", lambda *_words: "")
        monkeypatch.setattr(rs.time, "sleep", lambda _seconds: None)
        self.record = os.path.join(returning.home, "before.json")
        if before:
            with open(self.record, "w", encoding="ascii") as stream:
                json.dump({"state": before}, stream)
        # Long ago.
        os.utime(os.path.join(returning.home, sr.ATTENDED), (1, 1))

    def tell(self, _order, state, enabled=None):
        self.told.append(state if enabled is None else f"{state} disabled")
        if self.refuses:
            self.refuses -= 1
            raise sr.ReturnError("port 30000 is taken")
        if state != "rejoined":
            self.found = service(SERVING) if state in ("started", "restarted") else service(state="stopped")

    def run(self):
        return rs.run(self.returning.state_dir, "sglang")


def order_of(tmp_path, call, **more):
    layer = tmp_path / "supervisor" / "layers" / "sglang.conf"
    layer.parent.mkdir(parents=True)
    layer.write_text("capture")
    extraction = {**ORDER["extraction"], "output_dir": str(tmp_path / "out")}
    call("armed", order={**ORDER, "interval": 0, "extraction": extraction, **more})
    return layer


def test_back_to_serving(call, returning, monkeypatch, tmp_path):
    layer = order_of(tmp_path, call)
    host = Host(returning, monkeypatch)
    assert host.run() == 0 and host.told == ["restarted", "rejoined"]
    assert returning.journal()["state"] == "returned" and returning.order() is None
    assert not layer.exists() and not os.path.exists(host.record)
    # Once more, and nothing is left to do.
    assert host.run() == 0 and host.told == ["restarted", "rejoined"]


def test_a_server_that_takes_the_key_no_more_is_not_waited_for(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call, health_timeout=3600)
    ask = rs.probe.generate_once
    host = Host(returning, monkeypatch)
    monkeypatch.setattr(rs.probe, "generate_once", ask)
    monkeypatch.setattr(rs.probe, "request", lambda *_words: (401, b""))
    assert host.run() == 1 and host.told == ["restarted"]
    assert "sglang_server_api_key" in returning.journal()["why"]


def test_tasks_of_a_play_wait_for_it(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call, after_start=True)
    host = Host(returning, monkeypatch)
    assert host.run() == 0 and os.path.exists(host.record)
    assert "sglang_server_tasks_after_start wait" in returning.journal()["why"]


@pytest.mark.parametrize("before, told", [("stopped", ["stopped", "reloaded"]), ("absent", ["stopped disabled", "reloaded"])])
def test_back_to_what_did_not_run(call, returning, monkeypatch, tmp_path, before, told):
    layer = order_of(tmp_path, call)
    program, home = tmp_path / "supervisor" / "programs" / "sglang.conf", tmp_path / "services" / "sglang"
    program.parent.mkdir()
    program.write_text("ours")
    home.mkdir(parents=True)
    host = Host(returning, monkeypatch, before)
    assert host.run() == 0 and host.told == told and returning.journal()["to"] == before
    assert not layer.exists() and program.exists() == home.exists() == (before == "stopped")


def test_a_crash_between_stop_and_start(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call)
    host = Host(returning, monkeypatch)

    def die(_order, _state, _enabled=None):
        host.found = service(state="stopped")
        raise KeyboardInterrupt

    monkeypatch.setattr(rs, "tell", die)
    with pytest.raises(KeyboardInterrupt):
        host.run()
    assert returning.journal()["state"] == "returning"
    monkeypatch.setattr(rs, "tell", host.tell)
    assert host.run() == 0 and host.told == ["started", "rejoined"] and returning.journal()["state"] == "returned"


def test_what_the_operator_stopped_is_not_started(call, returning, monkeypatch, tmp_path):
    layer = order_of(tmp_path, call)
    host = Host(returning, monkeypatch, found=service(state="stopped"))
    assert host.run() == 0 and host.told == ["reloaded"]
    assert returning.journal()["state"] == "left" and os.path.exists(host.record) and not layer.exists()


def test_a_trouble_that_passes_and_one_that_stays(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call)
    host = Host(returning, monkeypatch)
    host.refuses = 2
    assert host.run() == 0 and returning.journal()["state"] == "returned"
    call("armed", order={**ORDER, "interval": 0})
    host = Host(returning, monkeypatch)
    host.refuses = 3
    assert host.run() == 1
    assert (returning.journal()["state"], returning.journal()["why"]) == ("failed", "port 30000 is taken")
    assert os.path.exists(host.record) and returning.order() is not None


def test_a_server_that_is_not_ready_in_time(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call, health_timeout=0)
    host = Host(returning, monkeypatch)
    host.health = "starting"
    assert host.run() == 1 and host.told == ["restarted"]
    assert "not ready 0 s after its start (/health: 503)" in returning.journal()["why"]


def test_nothing_while_a_play_looks_on_an_extractor_works_or_the_lock_is_held(call, returning, monkeypatch, tmp_path):
    order_of(tmp_path, call)
    host = Host(returning, monkeypatch)
    looker = rs.Service(returning.state_dir, "sglang")
    order = returning.order()
    assert looker.is_due(order)
    returning.attend(-50)
    assert not looker.is_due(order) and not looker.turn()
    returning.attend(-101)
    (tmp_path / "out").mkdir()
    lock = hm.Lock(str(tmp_path / "out"))
    assert not looker.is_due(order) and not looker.turn()
    lock.close()
    with returning.lock():
        assert looker.is_due(order) and not looker.turn()
    assert host.told == []
    for state in ("starting", "running", "stopping"):
        monkeypatch.setattr(rs.sq, "query", lambda *_words, state=state: {"state": state})
        assert not looker.is_due(order)


def test_an_extractor_that_is_started_again_is_not_ended(call, returning, monkeypatch, tmp_path):
    """One look falls between its death and its next start."""
    order_of(tmp_path, call)
    Host(returning, monkeypatch)
    looks, left = [True, False, True, True, True], []
    monkeypatch.setattr(rs.Service, "is_due", lambda *_words: looks.pop(0))
    monkeypatch.setattr(rs.Service, "turn", lambda _self: left.append(len(looks)) or True)
    assert rs.run(returning.state_dir, "sglang") == 0 and left == [1]


@pytest.mark.parametrize(
    "state, said",
    [
        ("returning", "returning to serving by itself since 2"),
        ("started", "started in serving mode by itself at 2"),
        ("returned", "returned to serving by itself at 2"),
        ("left", "not returned by itself at 2"),
        ("failed", "Run serve.yml"),
    ],
)
def test_what_is_said_of_what_was_done(call, returning, state, said):
    call("armed", order=ORDER)
    returning.note(state, "why")
    assert said in sr.line(returning, True, time.time())


def test_what_is_said_of_what_is_ahead(call, returning, monkeypatch):
    assert sr.line(returning, False, 0) == ""
    assert sr.line(returning, True, 0) == "returns by a play alone (extract.yml or serve.yml)"
    call("armed", order=ORDER)
    assert "should return by itself, but its service hidden-state-return-sglang is absent" in sr.line(returning, True, 0)
    monkeypatch.setattr(sr.sq, "query", lambda *_words: {"state": "running"})
    until = returning.attended()
    assert sr.line(returning, True, until + 70).endswith("no play has looked on for 1 m 40 s (a play looked on 1 m 10 s ago)")
    assert sr.line(returning, True, until - 70).endswith("(a play is changing the server)")


def test_what_is_taken_away(monkeypatch):
    assert sr.layer_files("systemd", "operators", "/state") == [
        "/run/systemd/system/operators.service.d/50-hidden-state-bridge.conf",
        "/run/hidden_state_bridge/operators.environment",
    ]
    assert sr.own_files("systemd", "sglang", "/state")[0] == "/etc/systemd/system/sglang.service"
