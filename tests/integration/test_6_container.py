# SPDX-License-Identifier: GPL-3.0-or-later
"""A server in a container beside this process: stopped and kept, captured from a second container of the same image, started again.

Needs podman and the image `hsb-debian12`, which `make molecule` makes. The commands themselves are held by tests/unit/test_container.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from stand_in_site import StandInSite, changed

BASE = "hsb-debian12"
NAME = f"hsb-server-{os.getpid()}"
IMAGE = f"localhost/{NAME}"
CAPTURE = f"{NAME}-hsb-capture"
PACKAGE = "/opt/packages/sglang"


def podman(*words: str, check: bool = True) -> str:
    return subprocess.run(["podman", *words], check=check, stdout=subprocess.PIPE, text=True).stdout.strip()


def status(name: str) -> str:
    done = subprocess.run(
        ["podman", "container", "inspect", "--format", "{{.State.Status}}", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout.strip()


@pytest.fixture
def site(tmp_path):
    if not shutil.which("podman") or subprocess.run(["podman", "image", "exists", BASE], check=False).returncode:
        pytest.skip(f"no podman, or no image {BASE} (make molecule)")
    site = StandInSite(tmp_path / "code")
    (site.directory / "Containerfile").write_text(f"FROM {BASE}\nCOPY packages /opt/packages\nENV PYTHONPATH=/opt/packages\n")
    podman("build", "--quiet", "--tag", IMAGE, str(site.directory))
    # The extractor's interpreter on the host; the server's is in the container.
    site.variables.update(sglang_server_python=sys.executable, sglang_server_name=NAME)
    yield site
    podman("rm", "--force", NAME, CAPTURE, check=False)
    podman("rmi", "--force", IMAGE, check=False)
    shutil.rmtree(f"/run/hidden_state_bridge/containers/{NAME}", ignore_errors=True)
    site.close()


def run_operators(site, *arguments: str) -> None:
    server = ["python3", "-m", "sglang.launch_server", "--model-path", "/models", "--port", str(site.port)]
    limits = ["--ulimit=nofile=1024:4096", "--ulimit=nproc=4096:4096"]
    podman("run", "--detach", "--name", NAME, "--network=host", *limits, "--volume", f"{site.model}:/models:ro", *arguments, IMAGE, *server)
    for _ in range(100):
        if site.pid():
            return
        subprocess.run(["sleep", "0.2"], check=True)
    raise AssertionError(podman("logs", NAME))


def test_a_container_captures_and_comes_back(site):
    run_operators(site, "--env", "OPERATORS=own value")
    original = json.loads(podman("container", "inspect", NAME))[0]
    assert changed(site.play("serving")) == 0

    site.run("playbooks/patch.yml")
    assert "hidden_state.bridge begin" not in podman("exec", NAME, "cat", f"{PACKAGE}/srt/models/deepseek_v2.py")
    site.play("capture")
    assert (status(NAME), status(CAPTURE)) == ("exited", "running")
    capture = json.loads(podman("container", "inspect", CAPTURE))[0]
    assert capture["Image"] == original["Image"]
    assert "OPERATORS=own value" in capture["Config"]["Env"]
    assert f"SGLANG_HS_DUMP_DIR={site.directory}/dumps" in capture["Config"]["Env"]
    assert "--disable-radix-cache" in capture["Config"]["Cmd"]
    assert "hidden_state.bridge begin" in podman("exec", CAPTURE, "cat", f"{PACKAGE}/srt/models/deepseek_v2.py")
    assert podman("exec", CAPTURE, "ls", f"{PACKAGE}/srt/hs_capture/__init__.py")
    podman("exec", CAPTURE, "touch", f"{site.directory}/dumps/written")
    assert (site.directory / "dumps" / "written").exists() and site.pid()
    assert changed(site.play("capture")) == 0

    site.play("restored")
    assert (status(NAME), status(CAPTURE)) == ("running", "") and site.pid()
    assert json.loads(podman("container", "inspect", NAME))[0]["Id"] == original["Id"]
    assert changed(site.play("restored")) == 0

    site.play("stopped")
    assert status(NAME) == "exited" and site.pid() is None
    assert changed(site.play("stopped")) == 0
    site.play("restored")
    assert status(NAME) == "running" and site.pid()


@pytest.mark.parametrize(
    "option, said",
    [(["--label", "com.docker.compose.project=prod"], "belongs to the compose project prod"), (["--rm"], "is removed when it stops")],
)
def test_a_container_that_would_not_come_back_is_refused(site, option, said):
    run_operators(site, *option)
    pid = site.pid()
    assert said in site.play("capture", fails=True)
    assert site.pid() == pid
