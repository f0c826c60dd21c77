# SPDX-License-Identifier: GPL-3.0-or-later
"""Planning for 100 hosts and 37,312 records, and what a host tells for it: time and memory.

    plan.py [--hosts N] [--records N]

Measured: `plan` as the controller calls it, with half of the records done in no order, every host with a manifest of its
share; and the observation of one output directory whose manifest has a line for every record (on a host, where it runs in
parallel to the others). The last line is one JSON object; the exit status is 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "plugins" / "module_utils"), str(ROOT / "roles" / "_bridge" / "files")]

import hs_manifest  # noqa: E402
from hidden_state_bridge.pack import pack  # noqa: E402

CLAIMS = {"seconds": 10.0, "peak_mb": 500.0}
OBSERVE = "import json, sys, hs_progress; found = hs_progress.observe(sys.argv[1]); print(len(json.dumps(found)))"


def make_dataset(directory: Path, records: int) -> str:
    """Records of 1 to 80 tokens: only their number and the spread of their lengths count here."""
    generator = random.Random(1)
    with (directory / "source.jsonl").open("w") as stream:
        for _record in range(records):
            ids = [1] * min(80, 1 + int(generator.paretovariate(0.8)))
            stream.write(json.dumps({"input_ids": ids, "loss_mask": ids}) + "\n")
    return pack({"sources": [{"name": "source", "path": str(directory / "source.jsonl")}]}, str(directory / "packed"))["path"]


def make_request(dataset: str, directory: Path, hosts: int, records: int) -> dict:
    order = list(range(records))
    random.Random(2).shuffle(order)
    done = {f"gpu-{host:03}": order[host : records // 2 : hosts] for host in range(hosts)}
    facts = {
        name: {"done": hs_manifest.encode_ranges(part), "share": "", "tokens": 1_000_000 + len(part), "seconds": 60.0, "weight": 1.0}
        for name, part in done.items()
    }
    return {"dataset": dataset, "hosts": facts, "ledger": str(directory / "ledger.json"), "run": "0123456789ab", "commit": True}


def make_output(directory: Path, records: range) -> Path:
    """An output directory with a line and a file for each of these records."""
    output = directory / "out"
    lines = []
    for record in records:
        name = f"specforge/rows_{record // 2000 * 2000}/data_{record}.ckpt"
        path = output / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
        digest = hashlib.sha256(str(record).encode()).hexdigest()
        entry = {"id": record, "source": "source", "source_file": "/data/source.jsonl", "line": record + 1, "file": name}
        lines.append(json.dumps({**entry, "bytes": 1, "tokens": 20, "sha256": digest, "sglang_version": "0.5.23"}))
    (output / hs_manifest.MANIFEST).write_text("\n".join(lines) + "\n")
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--records", type=int, default=37_312)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        request = json.dumps(make_request(make_dataset(directory, options.records), directory, options.hosts, options.records))
        output = make_output(directory, range(options.records))
        path = os.pathsep.join(sys.path[-2:])
        (directory / "request.json").write_text(request)
        plan = run([sys.executable, "-m", "hidden_state_bridge", "plan"], path, directory / "request.json")
        observe = run([sys.executable, "-c", OBSERVE, output], path, os.devnull)
    figures = {
        "hosts": options.hosts,
        "records": options.records,
        "plan_seconds": plan[0],
        "plan_peak_mb": plan[1],
        "observe_seconds": observe[0],
        "observe_peak_mb": observe[1],
        "request_mb": round(len(request) / 1e6, 2),
        "seconds": round(plan[0] + observe[0], 2),
        "peak_mb": max(plan[1], observe[1]),
    }
    return judge(figures)


def judge(figures: dict) -> int:
    """Prints the figures; the exit status, 1 where a claim does not hold."""
    wrong = [f"{key} is {figures[key]}, claimed at most {most}" for key, most in CLAIMS.items() if figures[key] > most]
    print("\n".join(wrong), file=sys.stderr)
    print(json.dumps({**figures, "ok": not wrong}))
    return bool(wrong)


def run(command: list, path: str, stdin: str | Path) -> tuple[float, float]:
    """Seconds and peak MB of resident memory of a command, which has to end well."""
    began = time.monotonic()
    with open(stdin) as given:
        child = subprocess.Popen(command, stdin=given, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})
        _pid, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:4]))} ended with {child.returncode}")
    return round(time.monotonic() - began, 2), round(usage.ru_maxrss / 1024, 1)


if __name__ == "__main__":
    sys.exit(main())
