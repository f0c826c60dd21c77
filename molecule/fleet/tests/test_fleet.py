# SPDX-License-Identifier: GPL-3.0-or-later
"""Three hosts at work, one loses its power; booted again, and with a fourth, they do what is left. The tests build on each other."""

from __future__ import annotations

import collections
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

sys.path.append(os.path.join(os.environ["MOLECULE_PROJECT_DIRECTORY"], "tests"))

from container_host import PATIENCE, ContainerHost

WEIGHTS = {"hsb-fleet-a": 1, "hsb-fleet-b": 1, "hsb-fleet-c": 2}
DEAD, JOINS = "hsb-fleet-b", "hsb-fleet-d"
HOSTS = {name: ContainerHost(name) for name in (*WEIGHTS, JOINS)}
SOURCES = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "sources"
# One request at a time, so that all are at work when one dies.
SLOWLY = {"extraction_concurrency": 1}
PROGRESS = re.compile(r"^(hsb-fleet-\w): [\d,]+/[\d,]+ records .*?/([\d,.]+)( k)? tokens", re.MULTILINE)


def manifest(name: str) -> list[dict]:
    """The lines of the records that a host has done."""
    content = HOSTS[name].host.run("cat /srv/hidden_states/%s/manifest.jsonl", name).stdout
    return [json.loads(line) for line in content.splitlines() if line.endswith("}")]


def recap(output: str) -> dict[str, dict[str, int]]:
    return {name: host.recap(output) for name, host in HOSTS.items() if re.search(rf"^{name} +: ok=", output, re.MULTILINE)}


@pytest.fixture(scope="module")
def first_run():
    """Lines of each host after the run in which one died, and what the play printed."""
    lines, alive = [], True
    with HOSTS[DEAD].begin("playbooks/extract.yml", SLOWLY, limit=tuple(WEIGHTS)) as running:
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if alive and re.match(rf"{DEAD}: [1-9]\d*/\d+ records", line):
                HOSTS[DEAD].lose_power()
                alive = False
    assert running.returncode != 0
    HOSTS[DEAD].boot()
    deadline = time.monotonic() + PATIENCE
    while HOSTS[DEAD].host.run("systemctl is-system-running").stdout.strip() not in ("running", "degraded"):
        assert time.monotonic() < deadline
        time.sleep(1)
    return {name: manifest(name) for name in HOSTS}, "".join(lines)


def test_shares_are_as_the_weights(first_run):
    tokens = {}
    for name, count, thousands in PROGRESS.findall(first_run[1]):
        tokens.setdefault(name, float(count.replace(",", "")) * (1000 if thousands else 1))
    assert set(tokens) == set(WEIGHTS)
    for name, weight in WEIGHTS.items():
        assert tokens[name] / sum(tokens.values()) == pytest.approx(weight / sum(WEIGHTS.values()), rel=0.05), tokens


def test_the_others_end_their_work_and_the_dead_one_keeps_what_it_did(first_run):
    done, output = first_run
    counts = recap(output)
    assert {name for name, count in counts.items() if count["failed"] or count["unreachable"]} == {DEAD}, counts
    assert 0 < len(done[DEAD]) < min(len(done[name]) for name in WEIGHTS if name != DEAD) and not done[JOINS]


def test_a_fourth_joins_and_nothing_is_done_again(first_run):
    before = first_run[0]
    with HOSTS[DEAD].begin("playbooks/extract.yml", SLOWLY, limit=tuple(HOSTS)) as running:
        output = running.communicate()[0]
    print(output)
    assert running.returncode == 0
    assert not any(count["failed"] or count["unreachable"] for count in recap(output).values())
    done = {name: manifest(name) for name in HOSTS}
    assert all(done[name][: len(before[name])] == before[name] for name in HOSTS)
    assert len(done[JOINS]) > 0 and len(done[DEAD]) > len(before[DEAD])
    times = collections.Counter(entry["id"] for lines in done.values() for entry in lines)
    records = sum(len(path.read_text().splitlines()) for path in SOURCES.glob("*.jsonl"))
    assert records > 0 and times == dict.fromkeys(range(records), 1)
