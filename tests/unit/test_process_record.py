# SPDX-License-Identifier: GPL-3.0-or-later
"""A process is recorded with all that it was started with, and launch.py starts an equal one."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr

LAUNCH = Path(__file__).parents[2] / "roles" / "_service" / "files" / "launch.py"
SLEEP = "import time; time.sleep(60)"
ODD = {
    "QUOTES": "a \"b\" 'c' $HOME `x` \\",
    "LINES": "one\ntwo\n",
    "EMPTY": "",
    "BYTES": os.fsdecode(b"\xff\xfe"),
    "BASH_FUNC_x%%": "() { :; }",
}


def limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (777, 888))
    os.umask(0o037)
    os.nice(3)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def same(pid):
    """What of a process a launch has to repeat."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    kept = [line for line in status if line.startswith(("Umask", "Uid", "Gid", "Groups"))]
    return [
        Path(f"/proc/{pid}/cmdline").read_bytes(),
        sorted(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")),
        os.readlink(f"/proc/{pid}/cwd"),
        Path(f"/proc/{pid}/limits").read_text(),
        kept,
        os.getpriority(os.PRIO_PROCESS, pid),
        os.sched_getaffinity(pid),
    ]


def wait_for(pid, argv):
    deadline = time.monotonic() + 20
    while (hp.process(pid) or {"argv": []})["argv"] != argv:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def odd(tmp_path):
    """A process started in every way that can be odd."""
    argv = [sys.executable, "-c", SLEEP, "", "a b", "--x=$y", "é\n"]
    with subprocess.Popen(argv, env=ODD, cwd=tmp_path, preexec_fn=limit) as running:
        wait_for(running.pid, argv)
        yield running
        running.kill()


def test_an_equal_process_is_started(odd, tmp_path):
    record = pr.record(odd.pid)
    path = tmp_path / "launch.json"
    assert pr.write(str(path), pr.launch_of(record))
    with subprocess.Popen([sys.executable, str(LAUNCH), str(path)], stdout=subprocess.DEVNULL) as again:
        wait_for(again.pid, record["argv"])
        assert same(again.pid) == same(odd.pid)
        assert pr.differences(hp.process(again.pid), pr.read(str(path))) == []
        again.kill()


def test_other_arguments_and_more_environment(odd):
    record = pr.record(odd.pid)
    launch = pr.launch_of(record, ["--new"], {"MORE": "1"})
    assert launch["argv"] == [sys.executable, "--new"] and launch["environment"] == {**ODD, "MORE": "1"}
    assert len(pr.differences(hp.process(odd.pid), launch)) == 2


def test_a_program_is_found_as_its_shell_found_it(tmp_path):
    program = tmp_path / "bin" / "tool"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    assert pr.executable(["tool"], {"PATH": f"/nowhere:{program.parent}"}, "/") == str(program)
    assert pr.executable(["bin/tool"], {}, str(tmp_path)) == str(program)
    assert pr.executable(["tool"], {"PATH": "/nowhere"}, "/") == ""


def test_a_process_that_cannot_be_recorded():
    with pytest.raises(pr.RecordError, match="run as root, or as its user"):
        pr.record(2**22 + 1)


def test_files_are_private_and_written_once(tmp_path):
    path = tmp_path / "found.json"
    assert pr.write(str(path), {"a": 1}) and not pr.write(str(path), {"a": 1})
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    assert pr.write(str(path), {"a": 1}) and path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["found.json"]


def test_a_record_that_is_none(tmp_path):
    path = tmp_path / "found.json"
    assert pr.read(str(path)) is None
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(pr.RecordError, match=str(path)):
            pr.read(str(path))


def test_a_priority_that_is_not_granted_ends_no_start(monkeypatch, capsys):
    """As of a server that root had given another one, brought back by its own user."""
    spec = importlib.util.spec_from_file_location("launch", LAUNCH)
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)

    def refuse(*_arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "setpriority", refuse)
    record = pr.launch_of(pr.record(os.getpid()))
    launch.become(dict(record, nice=record["nice"] - 5))
    assert "nice stays %d: [Errno 13] Permission denied" % record["nice"] in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "{}", "[1]"])
def test_a_launch_that_cannot_be(tmp_path, text):
    path = tmp_path / "launch.json"
    if text is not None:
        path.write_text(text)
    done = subprocess.run([sys.executable, str(LAUNCH), str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and f"{path} cannot be started" in done.stderr


def test_a_launch_of_a_program_that_is_gone(odd, tmp_path):
    launch = dict(pr.launch_of(pr.record(odd.pid)), executable="/nowhere/python")
    path = tmp_path / "launch.json"
    path.write_text(json.dumps(launch))
    done = subprocess.run([sys.executable, str(LAUNCH), str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and "No such file" in done.stderr
