# SPDX-License-Identifier: GPL-3.0-or-later
"""A host of one stand-in server on this machine, driven by the role sglang_server."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

from conftest import ENGINE, ROOT, free_port

sys.path.append(str(ROOT / "tests" / "unit"))

from model_source import SOURCE

PLAYBOOK = pathlib.Path(sys.executable).parent / "ansible-playbook"
RECAP = re.compile(r"^one +: ok=(\d+) +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.MULTILINE)


class StandInSite:
    """``variables`` is the inventory of the host ``one``; ``start`` starts a server by hand, as an operator would."""

    def __init__(self, code: pathlib.Path) -> None:
        # A socket of supervisor's lies in there, and its path may not be long.
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="hsb-"))
        self.port = free_port()
        self.packages = self.directory / "packages"
        shutil.copytree(ROOT / "tests" / "stand_in", self.packages, ignore=shutil.ignore_patterns("__pycache__"))
        models = self.packages / "sglang" / "srt" / "models"
        models.mkdir(parents=True)
        self.model_file = models / "deepseek_v2.py"
        self.model_file.write_text(SOURCE)
        (self.packages / "sglang" / "version.py").write_text('__version__ = "0.5.20"\n')
        self.model = self.directory / "model"
        self.model.mkdir()
        config = {"architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 8, "vocab_size": 512}
        (self.model / "config.json").write_text(json.dumps(config))
        self.started: list[subprocess.Popen] = []
        self.variables: dict = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "sglang_server_port": self.port,
            "sglang_server_state_dir": str(self.directory / "state"),
            "sglang_server_code_dir": str(code),
            "sglang_server_health_timeout": 60,
            "sglang_server_health_interval": 1,
            "sglang_server_stop_timeout": 5,
            "hs_patch_originals_dir": str(self.directory / "state" / "originals"),
        }
        self.variables.update(self.job())

    def job(self) -> dict:
        """The rest of an inventory, for extract.yml."""
        source = self.directory / "source.jsonl"
        lines = [{"input_ids": list(range(1, 20 + n)), "loss_mask": [1] * (19 + n)} for n in range(3)]
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        here = {name: str(self.directory / name) for name in ("state", "datasets", "out", "reports", "dumps", "cache")}
        return {
            "dataset_stage_sources": [{"name": "one", "path": str(source)}],
            "dataset_stage_max_length": 64,
            "dataset_stage_cache_dir": here["cache"],
            "dataset_stage_dir": here["datasets"],
            "dataset_stage_code_dir": here["state"],
            "extraction_output_dir": here["out"],
            "extraction_report_dir": here["reports"],
            "extraction_state_dir": here["state"],
            "extraction_code_dir": here["state"],
            "extraction_dump_dir": here["dumps"],
            "extraction_min_free_bytes": 1 << 20,
            # The stand-in needs no torch, and an extractor does.
            "extraction_python": str(ENGINE / "bin" / "python"),
        }

    def capturing(self, records: int, behaviour: str) -> subprocess.Popen:
        """Start a server by hand that leaves dumps in capture mode, for a data set of so many records; returns its process."""
        lines = [{"input_ids": list(range(1, 20 + n)), "loss_mask": [1] * (19 + n)} for n in range(records)]
        (self.directory / "source.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "hidden_size": 8}))
        self.variables.update(extraction_dtype="float32", extraction_watch_interval=1)
        paths = [self.packages, ROOT / "tests/unit/engine", ROOT / "plugins/module_utils"]
        command = [str(ENGINE / "bin" / "python"), *self.command()[1:]]
        return self.start(command, PYTHONPATH=":".join(map(str, paths)), STAND_IN_CAPTURE=f"dumps {behaviour}")

    def ours(self) -> None:
        """Describe the server in the inventory, to be run as a service of the collection's."""
        self.variables.update(
            sglang_server_python=sys.executable,
            sglang_server_model=str(self.model),
            sglang_server_environment={"PYTHONPATH": str(self.packages)},
        )

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "PYTHONPATH": str(self.packages), "OPERATORS": 'own\nvalue with $ and "', **more}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model), "--port", str(self.port), *arguments]

    def start(self, command: list[str], **more: str) -> subprocess.Popen:
        """Start what an operator starts, and wait until it answers."""
        running = subprocess.Popen(
            command, env=self.environment(**more), cwd=self.model, umask=0o027, start_new_session=True, stdin=subprocess.DEVNULL
        )
        self.started.append(running)
        deadline = time.monotonic() + 30
        while self.pid() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.pid() is not None
        return running

    def play(self, wanted: str, *arguments: str, fails: bool = False) -> str:
        """Bring the server into a state; returns what the play printed."""
        dumps = {"SGLANG_HS_DUMP_DIR": str(self.directory / "dumps")}
        extra = json.dumps({"wanted": wanted, "sglang_server_capture_environment": dumps})
        return self.run("tests/integration/drive.yml", "-e", extra, *arguments, fails=fails)

    def begin(self, playbook: str, *arguments: str) -> subprocess.Popen:
        """Start a playbook, by its path in the checkout."""
        inventory = self.directory / "hosts.json"
        inventory.write_text(json.dumps({"all": {"children": {"sglang": {"hosts": {"one": self.variables}}}}}))
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks/collections")}
        environment["XDG_CACHE_HOME"] = str(self.directory / "cache")
        command = [PLAYBOOK, ROOT / playbook, "-i", inventory, *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, playbook: str, *arguments: str, fails: bool = False) -> str:
        """Run a playbook to its end; returns what it printed."""
        with self.begin(playbook, *arguments) as running:
            try:
                output = running.communicate(timeout=600)[0]
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
        print(output)
        assert (running.returncode != 0) == fails, f"{playbook} ended with {running.returncode}"
        return output

    def pid(self) -> int | None:
        """The process that answers /generate; None where nobody does."""
        body = json.dumps({"input_ids": [0], "sampling_params": {}}).encode()
        headers = {"Authorization": f"Bearer {self.variables.get('sglang_server_api_key', '')}"}
        try:
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", body, headers)
            with urllib.request.urlopen(request, timeout=5) as answer:
                return json.load(answer)["pid"]
        except OSError:
            return None

    def seen(self) -> dict:
        """What the serving process was started with, as /proc shows it."""
        proc = pathlib.Path(f"/proc/{self.pid()}")
        status = dict(line.split(":\t", 1) for line in (proc / "status").read_text().splitlines() if ":\t" in line)
        return {
            "arguments": (proc / "cmdline").read_bytes(),
            "environment": sorted((proc / "environ").read_bytes().split(b"\0")),
            "directory": os.readlink(proc / "cwd"),
            "limits": (proc / "limits").read_text(),
            **{key: status[key] for key in ("Umask", "Uid", "Gid", "Groups")},
        }

    def record(self) -> pathlib.Path:
        return self.directory / "state" / "server" / "sglang" / "found.json"

    def close(self) -> None:
        for path in (self.directory / "state").glob("supervisor/*.pid"):
            daemon = int(path.read_text())
            os.kill(daemon, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while pathlib.Path(f"/proc/{daemon}").exists() and time.monotonic() < deadline:
                time.sleep(0.2)
        for running in self.started:
            try:
                os.killpg(running.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            running.wait()
        shutil.rmtree(self.directory)


def changed(output: str) -> int:
    """How many tasks changed something, by the play recap."""
    return int(RECAP.search(output).group(2))
