# SPDX-License-Identifier: GPL-3.0-or-later
"""The whole job on a real SGLang, in the order in which an operator meets it.  The tests build on each other."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import threading
import time

import pytest

from conftest import MODEL, recap

HERE = pathlib.Path(__file__).parent
PROMPTS = [[5, 6, 7, 8], list(range(10, 60)), [200, 3, 99]]


def tree(directory: pathlib.Path) -> dict[str, str]:
    """Path and hash of every Python source under directory, and path alone of the rest."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else ""
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def pristine(site):
    return site.model_file.read_bytes()


@pytest.fixture(scope="module")
def greedy():
    """Tokens that the unpatched server generates, filled by the test that runs it."""
    return {}


def test_check_on_a_pristine_host_changes_nothing_and_shows_the_patch(site, pristine):
    before = tree(site.engine)
    output = site.play("extract.yml", "--check", "--diff")
    assert recap(output)["failed"] == 0
    assert re.search(r"^\+.*SGLANG_HS_DUMP_DIR", output, re.MULTILINE), "the diff of the patch is not shown"
    assert tree(site.engine) == before
    for name in ("state", "code", "out", "reports"):
        assert not (site.directory / name).exists(), f"--check left {name}"
    assert not site.dumps.exists()
    assert not site.server_pids()


def test_serve_starts_the_server_and_leaves_it_alone_the_second_time(site, greedy):
    assert recap(site.play("serve.yml"))["changed"] > 0
    pids = site.server_pids()
    assert pids and site.serving()
    assert recap(site.play("serve.yml"))["changed"] == 0
    assert site.server_pids() == pids
    greedy["unpatched"] = [site.generate(prompt, 16) for prompt in PROMPTS]


class Bystander(threading.Thread):
    """A user who sends requests all the time, and a look at which dumps appear."""

    def __init__(self, site):
        super().__init__(daemon=True)
        self.site, self.answers, self.dumps, self.done = site, 0, set(), threading.Event()

    def run(self):
        # A dump lives for milliseconds, a request for longer: the look must not wait for an answer.
        asking = threading.Thread(target=self.ask, daemon=True)
        asking.start()
        while not self.done.wait(0.002):
            if self.site.dumps.exists():
                self.dumps |= {name for name in os.listdir(self.site.dumps) if name.endswith(".safetensors")}
        asking.join()

    def ask(self):
        while self.answers < 20 and not self.done.wait(0.02):
            if self.site.dumps.exists():
                try:
                    self.site.generate([9, 8, 7, 6, 5], 1, rid=f"user-{self.answers}")
                    self.site.serving()
                    self.answers += 1
                except OSError:
                    pass


def test_extract_does_the_whole_job(site):
    bystander = Bystander(site)
    bystander.start()
    # One request at a time: on a fast machine the whole set would be through between two looks at it.
    output = site.play("extract.yml", extra={"extraction_concurrency": 1})
    bystander.done.set()
    bystander.join()

    assert recap(output)["failed"] == 0
    assert re.search(r"\d+/\d+ records .* ETA", output), "no progress shown"
    meta = site.packed_meta()
    counts = collections.Counter(entry["id"] for entry in site.manifest())
    assert counts == dict.fromkeys(range(meta["records"]), 1)
    assert sum(entry["tokens"] for entry in site.manifest()) == meta["tokens"]
    assert {source["name"] for source in meta["sources"]} == {entry["source"] for entry in site.manifest()}
    assert len(meta["sources"]) == 8

    assert bystander.answers >= 5, "the user's requests were not answered during capture"
    assert bystander.dumps and all(name.startswith("hsb-") for name in bystander.dumps), bystander.dumps
    assert not [name for name in os.listdir(site.dumps) if name.endswith(".safetensors")], "dumps left behind"
    assert (site.directory / "reports").is_dir()
    assert oct(site.output.joinpath("one").stat().st_mode & 0o777) == "0o700"


def test_every_token_equals_transformers(site):
    packed = next((site.directory / "state" / "datasets").glob("*/meta.json")).parent
    done = subprocess.run(
        [site.engine / "bin" / "python", HERE / "compare_states.py", MODEL, site.output / "one", packed],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result, indent=1))
    meta = site.packed_meta()
    assert (result["records"], result["tokens"]) == (meta["records"], meta["tokens"])
    assert result["ids_differ"] == result["masks_differ"] == 0
    assert set(result["relative"]) == {"layer_1", "layer_3", "layer_4", "final"}
    assert all(value <= 1e-5 for value in result["relative"].values())
    assert len({round(value, 3) for value in result["largest"].values()}) == 4, "layers that do not differ prove nothing"


def test_the_server_is_back_in_serving_mode_and_the_patch_is_inert(site, pristine, greedy):
    assert site.serving()
    assert site.model_file.read_bytes() != pristine
    environment = pathlib.Path(f"/proc/{site.server_pids()[0]}/environ").read_bytes()
    assert b"SGLANG_HS_DUMP_DIR" not in environment
    before = sorted(os.listdir(site.dumps))
    assert [site.generate(prompt, 16) for prompt in PROMPTS] == greedy["unpatched"]
    site.generate(PROMPTS[0], 0, rid="hsb-000000000000-0-0")
    assert sorted(os.listdir(site.dumps)) == before


def test_the_second_run_does_nothing(site):
    pids, manifest = site.server_pids(), site.manifest()
    output = site.play("extract.yml")
    assert recap(output)["changed"] == 0
    assert site.server_pids() == pids
    assert site.manifest() == manifest


def test_verify_names_a_flipped_byte_and_a_missing_file(site):
    first, second = site.manifest()[:2]
    path = site.output / "one" / first["file"]
    good = path.read_bytes()
    path.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    moved = site.output / "one" / second["file"]
    moved.rename(moved.with_suffix(".away"))
    try:
        output = site.play("verify.yml", fails=True)
        assert first["file"] in output and second["file"] in output
    finally:
        path.write_bytes(good)
        moved.with_suffix(".away").rename(moved)
    site.play("verify.yml")


def test_status_tells_the_end(site):
    output = site.play("status.yml")
    assert "done" in output and "serving" in output and "0.5.20" in output
    assert "requests" in output and " given up" in output, "the counters of the capture are not shown"


def tells_the_truth(site, output: pathlib.Path, extra: dict) -> None:
    """What status.yml says of an extraction that goes on by itself is between what was there before and after it."""
    before = len(site.manifest(output))
    shown = site.play("status.yml", extra=extra)
    state, line = re.search(r"extraction: (\w+): (.*)", shown).groups()
    counts = re.search(r"(\d+)/(\d+) records", line)
    if counts is None:
        # An extractor that starts has not counted.
        assert state == "starting", shown
        return
    done, total = map(int, counts.groups())
    assert before <= done <= len(site.manifest(output)) and total == site.packed_meta()["records"]
    assert state in (("done", "running") if done == total else ("running", "dead")), shown


def test_nothing_is_lost_or_doubled_when_extractor_and_controller_are_killed(site):
    output = site.directory / "killed"
    extra = {
        "extraction_output_dir": str(output),
        "extraction_report_dir": str(site.directory / "reports-killed"),
        "extraction_concurrency": 1,
        "extraction_afterwards": "keep",
    }
    controller = site.start("extract.yml", extra=extra)
    # A pipe that nobody reads would stop it.
    threading.Thread(target=controller.stdout.read, daemon=True).start()
    killed = 0
    deadline = time.monotonic() + 400
    while killed < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        status = output / "one" / "status.json"
        if len(site.manifest(output)) > 6 * (killed + 1) and status.exists():
            pid = json.loads(status.read_text())["pid"]
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed += 1
            if killed == 1:
                os.killpg(controller.pid, signal.SIGKILL)
    controller.wait()
    assert killed == 2
    half = len(site.manifest(output))
    assert half < site.packed_meta()["records"], "the kill came too late to prove anything"
    tells_the_truth(site, output, extra)

    site.play("extract.yml", extra=extra)
    counts = collections.Counter(entry["id"] for entry in site.manifest(output))
    assert counts == dict.fromkeys(range(site.packed_meta()["records"]), 1)
    assert "done" in site.play("extract.yml", "--tags", "watch", extra=extra)
    site.play("verify.yml", extra=extra)
    temporary = [str(path) for path in output.rglob("*") if ".tmp" in path.name]
    assert not temporary
    named = {entry["file"] for entry in site.manifest(output)}
    assert named == {str(path.relative_to(output / "one")) for path in output.rglob("*.ckpt")}
    site.play("serve.yml")


def test_unpatch_gives_the_wheels_bytes_back(site, pristine):
    site.play("unpatch.yml")
    assert site.model_file.read_bytes() == pristine
    assert not (site.model_file.parents[1] / "hs_capture").exists()
    assert recap(site.play("unpatch.yml"))["changed"] == 0
