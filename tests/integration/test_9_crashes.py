# SPDX-License-Identifier: GPL-3.0-or-later
"""Whatever breaks during an extraction on the real engine: in the end each record once, every checksum right, nothing left over.

FAULTS says how many faults strike (without it a few, always the same); SEED makes them those of an earlier drill.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import tempfile
import time

import pytest

from conftest import ENGINE, MODEL
from crash_faults import KINDS, NEED_ROOM, SLOW, come_back, verify
from crash_host import Host, Missed

HERE = pathlib.Path(__file__).parent
FAULTS = int(os.environ.get("FAULTS", 0))
SEED = int(os.environ.get("SEED", 0)) or (random.SystemRandom().randrange(1, 1 << 32) if FAULTS else 8)
RECORDS_A_SOURCE = 60 if FAULTS else 15
# Of each kind, where there are faults enough.
LEAST = 10
SAMPLE = [
    ("extractor killed", "in the manifest line"),
    ("extractor killed", "status.json written, not renamed"),
    ("bit flipped", "somewhere"),
    ("manifest torn", "last line cut"),
    ("output full", "file begun"),
    ("dump directory full", "dump begun"),
    ("host stopped", "half a dump"),
]
FOUND = [".hidden_state_bridge", ".lock", "manifest.jsonl", "run.json", "specforge", "status.json"]


def schedule(faults: int, kinds: list[str], rng: random.Random) -> list[tuple[str, str]]:
    """Kind and point of each fault, in a random order: LEAST of each kind, the rest of those that take seconds; points in turn."""
    least = min(LEAST, faults // len(kinds))
    quick = itertools.cycle(sorted(set(kinds) - set(SLOW), key=kinds.index))
    chosen = kinds * least + [next(quick) for _ in range(faults - least * len(kinds))]
    points = {kind: itertools.cycle(rng.sample(KINDS[kind][0], len(KINDS[kind][0]))) for kind in kinds}
    plan = [(kind, next(points[kind])) for kind in chosen]
    rng.shuffle(plan)
    return plan


class Drill:
    """Strikes one fault after the other, over as many runs as that takes. seen: {(kind, point): {what was seen: times}}."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.runs = self.missed = 0
        self.seen: dict[tuple[str, str], collections.Counter] = collections.defaultdict(collections.Counter)
        self.checked: list[dict] = []

    def strike_all(self, plan: list[tuple[str, str]]) -> None:
        left = collections.deque(plan)
        self.begin()
        while left:
            kind, point = left[0]
            since = time.monotonic()
            try:
                if not self.host.root():
                    come_back(self.host)
                seen = KINDS[kind][1](self.host, point)
            except Missed as missed:
                self.missed += 1
                assert self.missed <= 10 + len(plan) // 5, "most faults miss"
                print(f"{kind}, {point}: missed ({missed}); struck again", flush=True)
                if self.host.is_through():
                    self.end()
                    self.begin()
                continue
            left.popleft()
            self.seen[kind, point][seen] += 1
            print(f"{len(plan) - len(left)}/{len(plan)} {kind}, {point}: {seen} ({time.monotonic() - since:.1f} s)", flush=True)
        self.end()

    def begin(self) -> None:
        """A run into a directory of its own, its extractor at work and its controller gone."""
        self.runs += 1
        self.host.output = self.host.disk / f"run-{self.runs}"
        self.host.write_inventory()
        come_back(self.host)

    def end(self) -> None:
        """Run to the end, without faults, and check all that lies there."""
        self.host.full_speed()
        self.host.play_whole("extract.yml")
        self.checked.append(check(self.host))
        shutil.rmtree(self.host.output)

    def table(self) -> str:
        lines = []
        for kind, (points, _strike) in KINDS.items():
            for point in points:
                for number, (seen, times) in enumerate(self.seen[kind, point].most_common()):
                    lines.append(f"{kind if not number else '':22}{point if not number else '':38}{times:>5}  {seen}")
        total = sum(sum(seen.values()) for seen in self.seen.values())
        records = sum(checked["records"] for checked in self.checked)
        head = f"{'fault':22}{'point':38}{'times':>5}  what was seen"
        return "\n".join([head, *lines, f"{total} faults in {self.runs} runs of {records} records together; seed {SEED}"])


def check(host: Host) -> dict:
    """Each record once, every checksum right, every state that of transformers, nothing left over."""
    output, meta = host.output / "one", host.packed_meta()
    content = host.manifest_file().read_bytes()
    assert content.endswith(b"\n")
    entries = [json.loads(line) for line in content.splitlines()]
    assert collections.Counter(entry["id"] for entry in entries) == dict.fromkeys(range(meta["records"]), 1)
    for entry in entries:
        found = (output / entry["file"]).read_bytes()
        assert (len(found), hashlib.sha256(found).hexdigest()) == (entry["bytes"], entry["sha256"]), entry
    assert sorted(os.listdir(output)) == FOUND
    files = {str(path.relative_to(output)) for path in (output / "specforge").rglob("*") if path.is_file()}
    assert files == {entry["file"] for entry in entries}
    # The server replaces its counters once a second; what is there twice stays there.
    left = set(os.listdir(host.dumps))
    time.sleep(2)
    assert left & set(os.listdir(host.dumps)) == {"capture.json"}
    assert verify(host)["ok"]
    packed = next((host.directory / "state" / "datasets").glob("*/meta.json")).parent
    command = [host.engine / "bin" / "python", HERE / "compare_states.py", MODEL, output, packed]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    compared = json.loads(done.stdout.splitlines()[-1])
    assert (compared["records"], compared["tokens"]) == (meta["records"], meta["tokens"])
    assert compared["ids_differ"] == compared["masks_differ"] == 0
    assert max(compared["relative"].values()) <= 1e-5
    return compared


def test_the_whole_drill_strikes_every_point_and_each_kind_ten_times():
    plan = schedule(200, list(KINDS), random.Random(1))
    assert plan == schedule(200, list(KINDS), random.Random(1)) and len(plan) == 200
    assert set(plan) == {(kind, point) for kind, (points, _strike) in KINDS.items() for point in points}
    times = collections.Counter(kind for kind, _point in plan)
    assert min(times.values()) == LEAST and {kind for kind in times if times[kind] == LEAST} == set(SLOW)


@pytest.fixture
def host():
    if not (ENGINE / "bin" / "python").exists():
        pytest.fail(f"no engine at {ENGINE}: run `make engine` first")
    # A socket of supervisor's lies in there, and its path may not be long.
    directory = pathlib.Path(tempfile.mkdtemp(prefix="hsb-"))
    if subprocess.run(["cp", "-al", ENGINE, directory / "engine"], check=False).returncode:
        shutil.rmtree(directory / "engine", ignore_errors=True)
        subprocess.run(["cp", "-a", ENGINE, directory / "engine"], check=True)
    host = Host(directory, RECORDS_A_SOURCE, random.Random(SEED))
    yield host
    host.close()


def test_each_record_once_whatever_breaks(host):
    print(f"seed {SEED}", flush=True)
    kinds = [kind for kind in KINDS if host.mounted or kind not in NEED_ROOM]
    if not host.mounted:
        print(f"no tmpfs can be mounted here: without {' and '.join(NEED_ROOM)}")
    plan = schedule(FAULTS, kinds, host.rng) if FAULTS else [fault for fault in SAMPLE if fault[0] in kinds]
    drill = Drill(host)
    try:
        drill.strike_all(plan)
    except BaseException:
        print(host.log.read_text()[-20000:])
        raise
    finally:
        print(drill.table(), flush=True)
    assert sum(sum(seen.values()) for seen in drill.seen.values()) == len(plan)
