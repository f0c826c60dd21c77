# SPDX-License-Identifier: GPL-3.0-or-later
"""Who computes on which GPU, by what nvidia-smi prints."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from ansible_collections.hidden_state.bridge.plugins.module_utils import gpu_processes as gpus
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp

SMI = """#!/bin/sh
case "$*" in
*compute_cap*) printf '9.0\\n9.0\\n' ;;
*query-gpu*) printf '0, GPU-aaa\\n1, GPU-bbb\\n' ;;
*) printf '%s' "$LISTED" ;;
esac
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (tmp_path, os.environ["PATH"]))

    def listed(*rows):
        monkeypatch.setenv("LISTED", "".join("%s, %d, %s\n" % row for row in rows))

    return listed


def test_without_gpus(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.compute_processes() == [] and gpus.orphans_on(None) == [] and gpus.architecture() == ""


def test_the_architecture_is_told_once_for_all(smi):
    smi()
    assert gpus.architecture() == "9.0"


def test_what_is_left_on_the_gpus_of_a_server(smi, child):
    smi(("GPU-aaa", child.pid, "python"), ("GPU-bbb", 2**22 + 1, "sglang::scheduler"))
    assert [one["pid"] for one in gpus.left_on(None)] == [child.pid, 2**22 + 1]
    (one,) = gpus.left_on({"GPU-aaa"})
    assert one["pid"] == child.pid and "time.sleep" in one["command"]
    assert gpus.left_on({"GPU-aaa"}, {child.pid}) == []


def test_gpus_of_an_environment(smi):
    assert gpus.gpus_of({}) is None
    assert gpus.gpus_of({"CUDA_VISIBLE_DEVICES": "1"}) == {"GPU-bbb"}
    assert gpus.gpus_of({"CUDA_VISIBLE_DEVICES": "GPU-aaa,1"}) == {"GPU-aaa", "GPU-bbb"}


def test_workers_whose_server_is_gone(smi, child):
    smi(("GPU-aaa", 2**22 + 1, "sglang::scheduler"), ("GPU-aaa", child.pid, "python"))
    assert [one["command"] for one in gpus.orphans_on(None)] == ["sglang::scheduler"]
    assert gpus.orphans_on({"GPU-bbb"}) == []


# Whose argv[0] is what SGLang renames its workers to.
WORKER = "import os, sys; os.execv(sys.executable, ['sglang::scheduler', '-c', 'import time; time.sleep(60)'])"


@pytest.fixture
def engine():
    """A process that is no server, and a worker of SGLang's below it."""
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r]).wait()" % WORKER
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as running:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            workers = [pid for pid in hp.family_of(running.pid) if hp.command_of(pid).startswith("sglang::")]
            if workers:
                break
            time.sleep(0.05)
        yield running, workers[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, 9)


def test_workers_of_an_engine_in_another_program_are_no_orphans(smi, engine):
    program, worker = engine
    smi(("GPU-aaa", worker, "sglang::scheduler"))
    assert gpus.orphans_on(None) == []
    program.kill()
    program.wait()
    assert [one["pid"] for one in gpus.orphans_on(None)] == [worker]
