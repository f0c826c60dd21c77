# SPDX-License-Identifier: GPL-3.0-or-later
"""Installs released SGLangs beside the demo engine, one environment a release in .cache/engines.

    PYTHON engines.py [RELEASE ...]     (all known releases by default; run by the demo engine's interpreter)

A release is known by requirements/RELEASE.txt, which holds what differs from the demo engine; torch and the rest are
the demo engine's own, seen through a path file. An environment takes 70 to 230 MB and is made anew when its
requirements, the kernel stand-in or the demo engine change. Servers run from a clone of it, so it stays as released.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DEMO = Path(os.environ.get("HSB_ENGINE", ROOT / ".cache" / "sglang-cpu" / "venv"))
CACHE = ROOT / ".cache" / "engines"
REQUIREMENTS = Path(__file__).with_name("requirements")
ROLE = ROOT / "roles" / "_sglang_cpu" / "files"
STAMP_PREFIX = ".installed-"


class EngineError(Exception):
    """No engine of this release can be had; the message says why and what to do."""


@dataclass(frozen=True)
class Engine:
    """One environment with a released SGLang."""

    release: str
    directory: Path

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its own site-packages."""
        return next(self.directory.glob("lib/python3*/site-packages"))

    @property
    def package(self) -> Path:
        return self.site / "sglang"

    def model_file(self, name: str) -> Path:
        return self.package / "srt" / "models" / f"{name}.py"


def known() -> list[str]:
    """The releases that can be installed."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


@contextlib.contextmanager
def locked() -> Iterator[None]:
    """Keep other runs away from the cache; EngineError where one is at work."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise EngineError(f"another run works in {CACHE}: wait for its end") from None
        yield


def install(release: str) -> Engine:
    """The environment of a release, made where it is missing or made of something else."""
    requirements = REQUIREMENTS / f"{release}.txt"
    if not requirements.exists():
        raise EngineError(f"SGLang {release} is not known here; known are {', '.join(known())}. A new one needs {requirements}")
    if not (DEMO / "bin" / "python").exists():
        raise EngineError(f"no demo engine at {DEMO}: run `make engine`, or name one in HSB_ENGINE")
    engine = Engine(release, CACHE / release)
    stamp = engine.directory / f"{STAMP_PREFIX}{_digest(requirements)}"
    if stamp.exists():
        return engine
    print(f"== installing SGLang {release} in {engine.directory}", flush=True)
    _run("make the environment", DEMO / "bin" / "python", "-m", "venv", "--clear", "--without-pip", engine.directory)
    pip = [DEMO / "bin" / "python", "-m", "pip", "--python", engine.python, "--disable-pip-version-check"]
    _run(
        f"install what {requirements} names (does pip reach the package index?)",
        *[*pip, "install", "--quiet", "--no-deps", "--requirement", requirements],
    )
    (engine.site / "demo_engine.pth").write_text(f"{_demo_site()}\n")
    _run("prove SGLang to be as released", engine.python, ROLE / "finish_install.py", ROLE / "shim", stamp)
    return engine


def clone(engine: Engine) -> Engine:
    """A copy to patch and run, made anew; files in it are replaced by renaming, so hard links do."""
    directory = engine.directory.with_name(f"{engine.release}.clone")
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run(["cp", "-al", engine.directory, directory], check=True)
    return Engine(engine.release, directory)


def _demo_site() -> Path:
    return next(DEMO.glob("lib/python3*/site-packages"))


def _digest(requirements: Path) -> str:
    digest = hashlib.sha256(str(_demo_site()).encode())
    sources = [ROLE / "requirements.txt", ROLE / "finish_install.py", *sorted((ROLE / "shim").rglob("*.py"))]
    for path in [requirements, *sources]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(purpose: str, *command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise EngineError(f"could not {purpose}:\n{done.stdout.strip()[-1500:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    releases = parser.parse_args().releases
    try:
        with locked():
            for release in releases or known():
                print(f"SGLang {release}: {install(release).python}", flush=True)
    except EngineError as error:
        print(f"engines.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
