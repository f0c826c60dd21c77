# SPDX-License-Identifier: GPL-3.0-or-later
"""What is seen of processes, ports, logs and managers."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import xmlrpc.client
import xmlrpc.server
from pathlib import Path
from socketserver import UnixStreamServer

import pytest

import host_processes as hp
import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_control
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as control_sq


def test_a_process_is_seen_as_it_was_started(child):
    seen = hp.process(child.pid)
    assert seen["argv"][0] == sys.executable
    assert seen["environment"]["SGLANG_HS_DUMP_DIR"] == "/dumps"
    assert abs(seen["since"] - time.time()) < 30


def test_a_gone_process():
    with subprocess.Popen(["true"]) as short:
        pass
    assert hp.process(short.pid) is None
    assert not hp.is_alive(short.pid)
    assert hp.command_of(short.pid) == "(gone)"


def test_orphans_belong_to_the_family(child):
    grandchild = next(pid for pid in hp.family_of(child.pid) if pid != child.pid)
    child.kill()
    child.wait()
    assert hp.is_alive(grandchild)
    assert hp.family_of(child.pid) == [grandchild]


def note(tmp_path, pid):
    """What the start scripts wrote down."""
    path = tmp_path / "services" / "sglang" / "pids"
    path.parent.mkdir(parents=True, exist_ok=True)
    # An earlier start, long gone.
    path.write_text("%d\n%d\n" % (2**22 + 1, pid))
    return path


def test_workers_that_outlived_their_server_are_found(tmp_path, child):
    note(tmp_path, child.pid)
    (grandchild,) = set(hp.family_of(child.pid)) - {child.pid}
    child.kill()
    child.wait()
    assert sq.leftovers_of(str(tmp_path), "sglang") == [grandchild]
    assert sq.query("supervisor", "sglang", str(tmp_path))["processes"] == [grandchild]


def test_a_server_that_outlived_its_supervisord_is_found(tmp_path, child):
    note(tmp_path, child.pid)
    assert child.pid in sq.leftovers_of(str(tmp_path), "sglang")


def test_a_pid_that_is_another_process_by_now_is_left_alone(tmp_path, child):
    note(tmp_path, os.getpid())
    assert sq.leftovers_of(str(tmp_path), "sglang") == []
    # Written before the first process of the host, or of the container, was there.
    os.utime(note(tmp_path, child.pid), (hp.process(1)["since"] - 60,) * 2)
    assert sq.leftovers_of(str(tmp_path), "sglang") == []
    assert sq.leftovers_of(str(tmp_path), "other") == []


@pytest.mark.parametrize(
    "bound, asked, collides",
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", None, True),
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "no.such.host.invalid", False),
    ],
)
def test_port_holders(bound, asked, collides):
    with socket.socket() as listener:
        listener.bind((bound, 0))
        listener.listen()
        found = hp.port_holders(listener.getsockname()[1], asked)
        assert [holder["pid"] for holder in found] == ([os.getpid()] if collides else [])


def test_a_free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    assert hp.port_holders(port) == []


def test_a_command_is_one_line():
    with subprocess.Popen([sys.executable, "-c", "print(flush=True)\n\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert hp.command_of(process.pid).endswith("-c print(flush=True) input()")
        finally:
            process.kill()


def test_keys_are_blotted_out():
    argv = ["python", "--api-key", "secret", "--admin-api-key=other", "--port", "1"]
    assert hp.masked(argv) == ["python", "--api-key", "********", "--admin-api-key=********", "--port", "1"]
    # The server's parser takes the beginning of a flag for it.
    assert hp.masked(["--api", "secret", "--adm=other", "--ssl-keyfile", "/etc/key.pem", "--ssl-keyfile-pass", "third"]) == [
        "--api",
        "********",
        "--adm=********",
        "--ssl-keyfile",
        "/etc/key.pem",
        "--ssl-keyfile-pass",
        "********",
    ]


def test_log_tail_keeps_to_one_start(tmp_path):
    log = tmp_path / "supervisor" / "log" / "sglang.log"
    log.parent.mkdir(parents=True)
    log.write_text("older\n" + "".join("%s%d\nrun %d\n\nend %d\n" % (sq.START_MARK, pid, pid, pid) for pid in (11, 12)))
    state_dir = str(tmp_path)
    assert sq.log_tail("supervisor", "sglang", state_dir) == ["run 12", "end 12"]
    assert sq.log_tail("supervisor", "sglang", state_dir, pid=11) == ["run 11", "end 11"]
    assert sq.log_tail("supervisor", "sglang", state_dir, pid=13) == []
    assert sq.log_tail("supervisor", "sglang", state_dir, lines=1) == ["end 12"]
    assert sq.log_tail("supervisor", "other", state_dir) == []


def test_log_tail_asks_the_journal_for_one_start(monkeypatch):
    asked = []
    said = "InvocationID=abc\n", "".join("line %d\n" % number for number in range(9, 0, -1))
    monkeypatch.setattr(sq, "run", lambda argv, **_more: (asked.append(argv), (0, said["--reverse" in argv], ""))[1])
    assert sq.log_tail("systemd", "sglang", since=1000.5) == ["line %d" % number for number in range(1, 10)]
    assert sq.log_tail("systemd", "sglang", lines=2, since=1000.5) == ["line 8", "line 9"]
    assert asked[0] == ["journalctl", "--sync"] and {"--unit=sglang.service", "--since=@1000"} <= set(asked[-1])
    sq.log_tail("systemd", "sglang")
    assert "_SYSTEMD_INVOCATION_ID=abc" in asked[-1]


def test_unknown_manager():
    with pytest.raises(sq.ServiceError, match="systemd or supervisor"):
        sq.query("runit", "sglang")


# -- systemd, by what systemctl prints -----------------------------------------------------------------


def systemctl(monkeypatch, text, code=0):
    monkeypatch.setattr(sq, "run", lambda argv, **_more: (code, text, "no bus"))


@pytest.mark.parametrize(
    "load, active, state",
    [
        ("loaded", "active", "running"),
        ("loaded", "activating", "starting"),
        ("loaded", "deactivating", "stopping"),
        ("loaded", "inactive", "stopped"),
        ("loaded", "failed", "failed"),
        ("not-found", "inactive", "absent"),
        # A unit whose file was removed while its process runs.
        ("not-found", "active", "running"),
    ],
)
def test_systemd_states(monkeypatch, load, active, state):
    systemctl(monkeypatch, "LoadState=%s\nActiveState=%s\nMainPID=0\nExecMainStatus=0\n" % (load, active))
    assert sq.query("systemd", "sglang")["state"] == state


def test_systemd_main_process(monkeypatch, child):
    systemctl(monkeypatch, "LoadState=loaded\nActiveState=active\nMainPID=%d\nInvocationID=abc\n" % child.pid)
    found = sq.query("systemd", "sglang")
    assert found["pid"] == child.pid and len(found["processes"]) == 2
    assert found["environment"][sq.TAG_VARIABLE] == "tag"


def test_systemd_exit_status(monkeypatch):
    systemctl(monkeypatch, "LoadState=loaded\nActiveState=failed\nMainPID=0\nExecMainStatus=2\n")
    assert sq.query("systemd", "sglang")["detail"] == "exit status 2"


def test_systemd_does_not_answer(monkeypatch):
    systemctl(monkeypatch, "", code=1)
    with pytest.raises(sq.ServiceError, match="no bus"):
        sq.query("systemd", "sglang")


def test_a_systemd_that_cannot_be_asked_is_not_one_without_the_unit(monkeypatch, tmp_path):
    """Or a unit of the operator's would be hidden, and a server that runs taken for none."""
    systemctl(monkeypatch, "", code=1)
    for ask in (sq.unit_file, sq.main_pid, sq.refuse_foreign_unit):
        with pytest.raises(sq.ServiceError, match="no bus"):
            ask("sglang")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sq.unit_file("sglang") == "" and sq.main_pid("sglang") is None and sq.query("systemd", "sglang")["state"] == "absent"
    # There and not to be run, as where no process can be made.
    (tmp_path / "systemctl").write_text("#!/nowhere")
    (tmp_path / "systemctl").chmod(0o644)
    for ask in (sq.unit_file, sq.main_pid, lambda name: sq.query("systemd", name)):
        with pytest.raises(sq.ServiceError, match="Permission denied"):
            ask("sglang")


# -- supervisor, by its protocol -----------------------------------------------------------------------


class _Server(UnixStreamServer, xmlrpc.server.SimpleXMLRPCDispatcher):
    def __init__(self, path):
        xmlrpc.server.SimpleXMLRPCDispatcher.__init__(self, allow_none=True)
        self.logRequests = False
        UnixStreamServer.__init__(self, path, _Handler)


class _Handler(xmlrpc.server.SimpleXMLRPCRequestHandler):
    # A Unix socket has no Nagle algorithm to turn off.
    disable_nagle_algorithm = False

    def address_string(self):
        return ""


@pytest.fixture
def supervisord(tmp_path_factory):
    """A state directory whose socket answers with ``facts``."""
    # pytest's own paths can be longer than a socket's may be.
    state_dir = Path(tempfile.mkdtemp(prefix="hsb-", dir="/tmp"))
    (state_dir / "supervisor").mkdir(parents=True)
    facts = {"statename": "RUNNING", "pid": os.getpid(), "exitstatus": 0, "spawnerr": ""}
    with _Server(sq.supervisor_socket(str(state_dir))) as server:

        def process_info(name):
            if name != "sglang":
                raise xmlrpc.client.Fault(10, "BAD_NAME: " + name)
            return facts

        server.register_function(lambda: {"statename": "RUNNING"}, "supervisor.getState")
        server.register_function(process_info, "supervisor.getProcessInfo")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield str(state_dir), facts
        server.shutdown()
        thread.join()
    shutil.rmtree(state_dir)


def test_supervisor_running(supervisord):
    found = sq.query("supervisor", "sglang", supervisord[0])
    assert (found["state"], found["pid"]) == ("running", os.getpid())
    assert found["argv"]


@pytest.mark.parametrize(
    "statename, status, state, detail",
    [
        ("STOPPED", 0, "stopped", ""),
        ("EXITED", 0, "stopped", ""),
        ("EXITED", 2, "failed", "exit status 2"),
        ("EXITED", -1, "failed", "killed by a signal"),
        ("FATAL", 0, "failed", "no such file"),
        ("BACKOFF", 0, "starting", ""),
    ],
)
def test_supervisor_states(supervisord, statename, status, state, detail):
    supervisord[1].update(statename=statename, pid=0, exitstatus=status, spawnerr="no such file" if state == "failed" else "")
    found = sq.query("supervisor", "sglang", supervisord[0])
    assert (found["state"], found["detail"], found["pid"]) == (state, detail, None)


def test_supervisor_does_not_know_the_name(supervisord):
    assert sq.query("supervisor", "other", supervisord[0])["state"] == "absent"


def test_no_supervisord(tmp_path):
    assert sq.query("supervisor", "sglang", str(tmp_path))["state"] == "absent"


@pytest.mark.parametrize("error", [http.client.RemoteDisconnected("gone"), xmlrpc.client.ProtocolError("/RPC2", 500, "Error", {})])
def test_a_supervisord_that_breaks_off_is_told(monkeypatch, error):
    def call(*_arguments):
        raise error

    proxy = types.SimpleNamespace(supervisor=types.SimpleNamespace(stopProcess=call))
    monkeypatch.setattr(control_sq, "supervisor", lambda *_args, **_more: proxy)
    params = {"name": "sglang", "state_dir": "/nowhere", "stop_timeout": 1, "supervisord": []}
    with pytest.raises(control_sq.ServiceError, match="supervisord: stopProcess sglang: "):
        service_control.of("supervisor", params).stop([])
