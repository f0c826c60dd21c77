# SPDX-License-Identifier: GPL-3.0-or-later
"""Several hosts on this machine, each with a clone of the engine, its own server, service manager and directories."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from conftest import PATIENCE, ROOT, Site

MINUTES = 60


class Fleet:
    """`hosts` by name, each a Site; `play` runs a playbook against those that are in the inventory."""

    def __init__(self, directory: pathlib.Path, engine: pathlib.Path, records: int) -> None:
        self.directory, self.engine = directory, engine
        self.hosts: dict[str, Site] = {}
        self.reports = directory / "reports"
        self.sources = directory / "sources"
        make = [sys.executable, ROOT / "demo" / "make_sources.py", "--output", self.sources, "--records", str(records)]
        subprocess.run(make, check=True)

    def join(self, name: str) -> None:
        """Put one more host into the inventory."""
        directory = self.directory / name
        directory.mkdir()
        subprocess.run(["cp", "-al", self.engine, directory / "engine"], check=True)
        self.hosts[name] = Site(directory)
        self.hosts[name].dumps = self.hosts[name].dumps.with_name(f"hsb-test-{os.getpid()}-{name}")
        self.write_inventory()

    def write_inventory(self) -> None:
        """All hosts write below one output directory and share the controller's directories, as a fleet does."""
        shared = {
            "dataset_stage_sources": [{"name": path.stem, "path": str(path)} for path in sorted(self.sources.glob("*.jsonl"))],
            "dataset_stage_cache_dir": str(self.directory / "cache"),
            "extraction_output_dir": str(self.directory / "out"),
            "extraction_report_dir": str(self.reports),
            "extraction_concurrency": 1,
        }
        hosts = {name: {**site.variables, **shared} for name, site in self.hosts.items()}
        (self.directory / "hosts.json").write_text(json.dumps({"all": {"children": {"sglang": {"hosts": hosts}}}}))

    def start(self, playbook: str, **extra: object) -> subprocess.Popen:
        command = [pathlib.Path(sys.executable).parent / "ansible-playbook", f"playbooks/{playbook}", "-i", self.directory / "hosts.json"]
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_FORCE_COLOR": "0", "XDG_CACHE_HOME": str(self.directory / "cache")}
        with (self.directory / "log").open("w") as log:
            return subprocess.Popen(
                [*command, "-e", json.dumps(extra)], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def finish(self, running: subprocess.Popen) -> str:
        """Wait for the playbook's end; show and return what it printed."""
        try:
            running.wait(PATIENCE)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)
            output = (self.directory / "log").read_text()
            print(output)
        return output

    def manifest(self, name: str, output: str = "out") -> list[dict]:
        path = self.directory / output / name / "manifest.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def wait_for_records(self, name: str, count: int, output: str = "out") -> None:
        deadline = time.monotonic() + 10 * MINUTES
        while len(self.manifest(name, output)) < count:
            assert time.monotonic() < deadline, f"{name} has not done {count} records"
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        """Take from a host all that runs there, as a crash would: service manager, server and extractor."""
        marks = (str(self.directory / name).encode(), f"--port\0{self.hosts[name].port}".encode())
        for _time in range(3):
            for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    if any(mark in entry.read_bytes() for mark in marks):
                        os.kill(int(entry.parent.name), signal.SIGKILL)
                except OSError:
                    continue
            time.sleep(0.2)

    def report(self) -> dict:
        return json.loads((self.reports / "report.json").read_text())

    def close(self) -> None:
        for name in self.hosts:
            for file in (self.directory / name / "state").glob("supervisor/*.pid"):
                if not pathlib.Path(f"/proc/{file.read_text().strip()}").exists():
                    file.unlink()
            self.hosts[name].close()
        shutil.rmtree(self.directory, ignore_errors=True)


def failed(output: str) -> set[str]:
    """Hosts that the play recap counts as failed."""
    return {name for name, count in re.findall(r"^(\S+) +: ok=.* failed=(\d+)", output, re.MULTILINE) if count != "0"}
