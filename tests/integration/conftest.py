# SPDX-License-Identifier: GPL-3.0-or-later
"""One site for the end-to-end tests: a real SGLang on this machine's CPU, an inventory of one host, a small data set."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import yaml
from xdist.scheduler import LoadScopeScheduling

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENGINE = pathlib.Path(os.environ.get("HSB_ENGINE", ROOT / ".cache" / "sglang-cpu" / "venv"))
MODEL = pathlib.Path(os.environ.get("HSB_MODEL", ROOT / ".cache" / "tiny-model"))
BIN = pathlib.Path(sys.executable).parent
# Seconds for one playbook, on a machine that does other things too.
PATIENCE = 1200
# What takes many minutes.
drill = pytest.mark.skipif(os.environ.get("DRILLS") != "all", reason="a drill of many minutes; DRILLS=all runs it, as `make drills` does")
# Files whose tests build on each other, by the site that they share. All other tests have a site of their own.
SHARED = {
    **dict.fromkeys(["test_1_extract", "test_2_entry_points", "test_3_refusals", "test_9_alone"], "site"),
    "test_7_elastic": "fleet",
}
RECAP = re.compile(r"^one +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)


class BySite(LoadScopeScheduling):
    """Tests of one site run in their order in one process, and all others beside them."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARED.get(pathlib.PurePath(nodeid.partition("::")[0]).stem, nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> BySite:
    return BySite(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, which would run alone at the end."""
    items.sort(key=lambda item: item.path.stem != "test_9_crashes")


def recap(output: str) -> dict[str, int]:
    """The counts of the host's line in the play recap."""
    return dict(zip(("ok", "changed", "unreachable", "failed"), map(int, RECAP.search(output).groups()), strict=True))


class Site:
    """Runs the playbooks against one host, and looks at what they left there.

    ``directory`` holds everything: the engine's clone, the state, the output, the inventory.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.engine = directory / "engine"
        self.output = directory / "out"
        self.inventory = directory / "hosts.json"
        self.dumps = pathlib.Path(f"/dev/shm/hsb-test-{os.getpid()}")
        self.port = free_port()
        self.model_file = next(self.engine.glob("lib/python3*/site-packages/sglang/srt/models")) / "deepseek_v2.py"

    @property
    def variables(self) -> dict:
        engine = yaml.safe_load((ROOT / "roles/_sglang_cpu/vars/main.yml").read_text())
        return {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_server_manager": "supervisor",
            "sglang_server_python": str(self.engine / "bin" / "python"),
            "sglang_server_model": str(MODEL),
            "sglang_server_port": self.port,
            "sglang_server_args": engine["_sglang_cpu_server_args"],
            "sglang_server_environment": engine["_sglang_cpu_server_environment"],
            "sglang_server_health_timeout": 300,
            "sglang_server_health_interval": 2,
            "sglang_server_state_dir": str(self.directory / "state"),
            "sglang_server_code_dir": str(self.directory / "code"),
            "hs_patch_originals_dir": str(self.directory / "state" / "originals"),
            "dataset_stage_sources": [
                {"name": path.stem, "path": str(path)} for path in sorted((self.directory / "sources").glob("*.jsonl"))
            ],
            "dataset_stage_seed": 7,
            "dataset_stage_max_length": 256,
            "dataset_stage_dir": str(self.directory / "state" / "datasets"),
            "dataset_stage_code_dir": str(self.directory / "code"),
            "dataset_stage_cache_dir": str(self.directory / "cache"),
            "extraction_output_dir": str(self.output),
            "extraction_dump_dir": str(self.dumps),
            "extraction_state_dir": str(self.directory / "state"),
            "extraction_code_dir": str(self.directory / "code"),
            "extraction_report_dir": str(self.directory / "reports"),
            "extraction_concurrency": 8,
            "extraction_watch_interval": 1,
            "extraction_min_free_bytes": 1 << 20,
        }

    def write_inventory(self) -> None:
        hosts = {"all": {"children": {"sglang": {"hosts": {"one": self.variables}}}}}
        self.inventory.write_text(json.dumps(hosts, indent=1))

    def command(self, playbook: str, *arguments: str, extra: dict | None = None) -> list[str]:
        extras = ["-e", json.dumps(extra)] if extra else []
        return [str(BIN / "ansible-playbook"), f"playbooks/{playbook}", "-i", str(self.inventory), *arguments, *extras]

    def environment(self) -> dict:
        return {**os.environ, "ANSIBLE_FORCE_COLOR": "0", "ANSIBLE_NOCOLOR": "1", "XDG_CACHE_HOME": str(self.directory / "cache")}

    def play(self, playbook: str, *arguments: str, extra: dict | None = None, fails: bool = False) -> str:
        """Run a playbook to its end, showing its output as it comes, and return it; the exit status has to be as expected."""
        lines = []
        with self.start(playbook, *arguments, extra=extra) as running:
            watchdog = threading.Timer(PATIENCE, os.killpg, (running.pid, signal.SIGKILL))
            watchdog.start()
            for line in running.stdout:
                print(line, end="", flush=True)
                lines.append(line)
            watchdog.cancel()
        assert (running.returncode != 0) == fails, f"{playbook} ended with {running.returncode}"
        return "".join(lines)

    def start(self, playbook: str, *arguments: str, extra: dict | None = None) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(playbook, *arguments, extra=extra),
            cwd=ROOT,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def generate(self, input_ids: list[int], new_tokens: int, rid: str | None = None) -> list[int]:
        """One greedy request to the server; returns the token ids it generated."""
        body = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}}
        if rid:
            body["rid"] = rid
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["output_ids"]

    def serving(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=30) as answer:
                return answer.status == 200
        except OSError:
            return False

    def server_pids(self) -> list[int]:
        """Processes of this site's server, by their arguments (a launcher and its children)."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = entry.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"sglang.launch_server" in arguments and str(self.port).encode() in arguments:
                found.append(int(entry.parent.name))
        return sorted(found)

    def manifest(self, output: pathlib.Path | None = None) -> list[dict]:
        path = (output or self.output) / "one" / "manifest.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def packed_meta(self) -> dict:
        return json.loads(next((self.directory / "state" / "datasets").glob("*/meta.json")).read_text())

    def close(self) -> None:
        """Stop the service manager of the site, and with it the server and its workers."""
        for file in (self.directory / "state").glob("supervisor/*.pid"):
            pid = int(file.read_text())
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 120
            while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.5)
        assert not self.server_pids(), "the server outlived its service manager"
        shutil.rmtree(self.dumps, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if not (ENGINE / "bin" / "python").exists():
        pytest.fail(f"no engine at {ENGINE}: run `make engine` first")
    directory = tmp_path_factory.mktemp("site")
    # Hard links: the engine is 2.6 GB, and the patcher replaces files by renaming. Another file system takes a copy.
    if subprocess.run(["cp", "-al", ENGINE, directory / "engine"], check=False).returncode:
        shutil.rmtree(directory / "engine", ignore_errors=True)
        subprocess.run(["cp", "-a", ENGINE, directory / "engine"], check=True)
    make_sources = [sys.executable, ROOT / "demo" / "make_sources.py", "--output", directory / "sources", "--records", "8"]
    subprocess.run(make_sources, check=True)
    site = Site(directory)
    site.write_inventory()
    yield site
    site.close()
