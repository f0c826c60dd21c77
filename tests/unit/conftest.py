# SPDX-License-Identifier: GPL-3.0-or-later
"""What several unit tests need."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from model_source import SOURCE, install

import host_processes as hp

SLEEP = "import time; time.sleep(60)"


@pytest.fixture
def child():
    """A process in a group of its own, with a child of its own."""
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', %r]).wait()" % SLEEP
    environment = dict(os.environ, HIDDEN_STATE_BRIDGE_SERVICE="tag", SGLANG_HS_DUMP_DIR="/dumps")
    with subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True) as running:
        deadline = time.monotonic() + 20
        while len(hp.family_of(running.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        yield running
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, 9)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return install(tmp_path, SOURCE)


@pytest.fixture
def originals(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "originals")
