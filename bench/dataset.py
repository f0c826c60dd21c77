# SPDX-License-Identifier: GPL-3.0-or-later
"""Packing a data set of Kimi-K2.5's size and shape: time, memory, and the same job with Hugging Face datasets.

    dataset.py [--scale FRACTION] [--directory DIRECTORY] [--keep]

Eight JSONL sources, 37,312 records, 87.8 M tokens after the cut at 8,192. Measured on two cores: from the sources to the
packed set, hashes and fsync included; the same with ten times the tokens (ten files a source); and datasets (num_proc=2):
load, concatenate, shuffle, cut by map, save. Ours and theirs take turns for three rounds: the slowest of ours is `seconds`, the
least of the rounds' ratios the speed-up. Memory is that of all processes of the job together (proportional set size).
The last line is one JSON object; the exit status is 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import numpy as np
import orjson

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".cache" / "bench-dataset"
REQUIREMENTS = ROOT / "requirements" / "bench-dataset.txt"
RECORDS, TOKENS, MAX_LENGTH, VOCABULARY = 37_312, 87_800_000, 8192, 163_840
# Share of the records, and length of a record relative to the others.
SOURCES = {
    "A2_kimik25": (0.30, 1.0),
    "B1_glaive": (0.14, 0.5),
    "B2_general": (0.12, 0.8),
    "B3_math": (0.12, 1.1),
    "B4_code": (0.10, 1.3),
    "B5_dialogue": (0.08, 0.7),
    "B6_tools": (0.08, 1.2),
    "B8_sweagent": (0.06, 4.0),
}
CORES = 2
ROUNDS = 3
CLAIMS = {"seconds": 60.0, "peak_mb": 1536.0, "speedup_vs_datasets": 5.0, "tenfold_memory_ratio": 1.5, "tenfold_cpu_ratio": 12.0}

PEER_JOB = """
import sys
from datasets import concatenate_datasets, load_dataset

directory, output, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
names = sys.argv[4:]
parts = load_dataset(
    "json", data_files={name: f"{directory}/{name}.jsonl" for name in names}, num_proc=2, cache_dir=f"{output}/cache"
)
merged = concatenate_datasets([parts[name] for name in names]).shuffle(seed=42)


def cut(batch):
    return {key: [row[:limit] for row in batch[key]] for key in ("input_ids", "loss_mask")}


cut_set = merged.map(cut, batched=True, num_proc=2)
cut_set.save_to_disk(f"{output}/saved", num_proc=2)
print(len(cut_set))
"""


def lengths_of_sources(scale: float) -> dict[str, np.ndarray]:
    """Lengths of the records, which come to scale * TOKENS after the cut."""
    rng = np.random.default_rng(7)
    raw = {name: rng.lognormal(0.0, 0.9, round(RECORDS * scale * share)) * mean for name, (share, mean) in SOURCES.items()}
    short = round(RECORDS * scale) - sum(map(len, raw.values()))
    raw["A2_kimik25"] = np.append(raw["A2_kimik25"], np.ones(max(short, 0)))[: len(raw["A2_kimik25"]) + short]
    low, high = 1.0, 1e5
    for _step in range(60):
        factor = (low + high) / 2
        total = sum(np.minimum(np.maximum(values * factor, 16), MAX_LENGTH).sum() for values in raw.values())
        low, high = (factor, high) if total < TOKENS * scale else (low, factor)
    return {name: np.maximum(values * low, 16).astype(int) for name, values in raw.items()}


def write_sources(directory: Path, scale: float) -> None:
    """The sources as json.dumps would write them; low token ids are more frequent, as in text."""
    rng = np.random.default_rng(11)
    for name, lengths in lengths_of_sources(scale).items():
        with open(directory / f"{name}.jsonl", "wb") as stream:
            for length in lengths.tolist():
                ids = (rng.random(length) ** 2 * VOCABULARY).astype(np.int64)
                mask = (np.arange(length) > length // 3).astype(np.int64)
                row = orjson.dumps({"input_ids": ids, "loss_mask": mask}, option=orjson.OPT_SERIALIZE_NUMPY)
                stream.write(row.replace(b",", b", ").replace(b":", b": ") + b"\n")


def memory_of(group: int) -> int:
    """Bytes of memory that the processes of a process group hold together (proportional set size)."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getpgid(int(entry.name)) != group:
                continue
            text = (entry / "smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:")), 0)
    return total


def measure(command: list[str], given: str = "", environment: dict[str, str] | None = None) -> dict[str, float | str]:
    """Run a command on CORES cores; seconds, cpu_seconds and peak_mb of all its processes, and the last line that it printed."""
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, tempfile.TemporaryFile("w+") as source:
        source.write(given)
        source.seek(0)
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            stdin=source,
            stdout=out,
            stderr=err,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        peak, ended = 0, 0
        while not ended:
            peak = max(peak, memory_of(process.pid))
            time.sleep(0.1)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            err.seek(0)
            raise SystemExit(f"{command[:4]} ended with {process.returncode}:\n{err.read()[-4000:]}")
        out.seek(0)
        return {
            "seconds": round(seconds, 2),
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
            "peak_mb": round(peak / (1 << 20), 1),
            "last": out.read().splitlines()[-1],
        }


def pack(sources: dict[str, Path], out: Path) -> dict[str, float | str]:
    """Pack the sources with the command that the playbooks run."""
    config = {
        "sources": [{"name": name, "path": str(path)} for name, path in sources.items()],
        "seed": 42,
        "max_length": MAX_LENGTH,
        "vocab_size": VOCABULARY,
    }
    paths = [str(ROOT / "roles" / "_bridge" / "files"), str(ROOT / "plugins" / "module_utils")]
    command = [sys.executable, "-m", "hidden_state_bridge", "pack", "--config", "-", "--out-dir", str(out)]
    return measure(command, json.dumps(config), {"PYTHONPATH": os.pathsep.join(paths)})


def peer(python: Path, sources: Path, out: Path) -> dict[str, float | str]:
    """The same job with datasets."""
    return measure(
        [str(python), "-c", PEER_JOB, str(sources), str(out), str(MAX_LENGTH), *SOURCES],
        environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HOME": str(out / "home")},
    )


def peer_python() -> Path:
    """The interpreter with datasets; its environment is made where it is missing."""
    python = PEER / "bin" / "python"
    stamp = PEER / ".installed"
    wanted = REQUIREMENTS.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {REQUIREMENTS.name} into {PEER}", flush=True)
        venv.create(PEER, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "-r", REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the data set's size, for a try (default: 1)")
    parser.add_argument("--directory", type=Path, help="where to work (default: a temporary directory; 25 GB)")
    parser.add_argument("--keep", action="store_true", help="leave what was made")
    options = parser.parse_args()
    python = peer_python()
    work = Path(tempfile.mkdtemp(prefix="bench-dataset-", dir=options.directory))
    try:
        result = run(work, options.scale, python)
    finally:
        if not options.keep:
            shutil.rmtree(work)
    print(json.dumps(result))
    return 0 if result["ok"] else 1


def run(work: Path, scale: float, python: Path) -> dict[str, object]:
    sources = work / "sources"
    sources.mkdir()
    write_sources(sources, scale)
    named = {name: sources / f"{name}.jsonl" for name in SOURCES}
    size = sum(path.stat().st_size for path in named.values())
    print(f"eight sources, {size / 1e6:,.0f} MB of JSONL", flush=True)

    ours, theirs = [], []
    for number in range(ROUNDS):
        # Sources listed in another order give the same bytes.
        listed = named if number % 2 == 0 else {name: named[name] for name in reversed(named)}
        os.sync()
        ours.append(pack(listed, work / "packed"))
        shutil.rmtree(work / "packed")
        os.sync()
        theirs.append(peer(python, sources, work / "peer"))
        shutil.rmtree(work / "peer")
        print(f"packed: {ours[-1]['seconds']} s, {ours[-1]['peak_mb']} MB; datasets: {theirs[-1]['seconds']} s", flush=True)
    metas = [json.loads(str(one["last"]))["meta"] for one in ours]
    if len({meta["sha256"] for meta in metas}) > 1:
        raise SystemExit("the same sources in another order gave another hash")
    meta, once = metas[0], ours[0]

    tenfold = {}
    for name, path in named.items():
        tenfold[name] = work / "tenfold" / name
        tenfold[name].mkdir(parents=True)
        for number in range(10):
            os.link(path, tenfold[name] / f"part-{number}.jsonl")
    ten = pack(tenfold, work / "packed10")
    shutil.rmtree(work / "packed10")
    print(f"ten times the tokens: {ten['seconds']} s, {ten['peak_mb']} MB", flush=True)

    figures = {
        "seconds": max(float(one["seconds"]) for one in ours),
        "peak_mb": max(float(one["peak_mb"]) for one in ours),
        "speedup_vs_datasets": round(min(float(slow["seconds"]) / float(fast["seconds"]) for fast, slow in zip(ours, theirs)), 2),
        "tenfold_memory_ratio": round(float(ten["peak_mb"]) / float(once["peak_mb"]), 2),
        # CPU time: the clock's depends on who else uses the disk.
        "tenfold_cpu_ratio": round(float(ten["cpu_seconds"]) / float(once["cpu_seconds"]), 2),
    }
    failed = [name for name, limit in CLAIMS.items() if (figures[name] < limit if name.startswith("speedup") else figures[name] > limit)]
    return {
        **figures,
        "records": meta["records"],
        "tokens": meta["tokens"],
        "source_bytes": size,
        "cpu_seconds": once["cpu_seconds"],
        "tenfold_seconds": ten["seconds"],
        "tenfold_peak_mb": ten["peak_mb"],
        "rounds": [[fast["seconds"], slow["seconds"]] for fast, slow in zip(ours, theirs)],
        "datasets_cpu_seconds": theirs[0]["cpu_seconds"],
        "datasets_peak_mb": theirs[0]["peak_mb"],
        "cores": CORES,
        "ok": not failed,
        "failed": failed,
    }


if __name__ == "__main__":
    sys.exit(main())
