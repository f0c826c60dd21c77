# SPDX-License-Identifier: GPL-3.0-or-later
"""A cache of sources of every SGLang release: the models that the patcher is tried on, the parser of the server's arguments, and what
the capture imports.

python tests/releases/wheels.py              fetches every release that the cache lacks
python tests/releases/wheels.py 0.5.20 ...   fetches these

`.cache/sglang-sources/<release>/` holds `sglang/srt/models/**/*.py`, `sglang/srt/server_args.py`, `sglang/srt/arg_groups/**/*.py`, the
modules that `hs_capture/engine.py` names, the version files and the METADATA of the wheel, laid out as in it. What is there costs no
network; without network the list of releases is the one kept from the last time. A release comes in whole or not at all.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "sglang-sources"
OLDEST = "0.4.0"
# Releases that the tests install and run (tests/releases/engine); the others are checked by structure.
RUN = ("0.5.9", "0.5.10.post1", "0.5.12", "0.5.20", "0.5.23")
# Releases in which every decoder model file is tried, not deepseek_v2.py alone.
ALL_MODELS = ("0.5.9", "0.5.20", "0.5.23")

_KEPT = re.compile(
    r"sglang/(?:srt/(?:models|arg_groups|distributed|layers/layer_boundary)/(?:[^/]+/)*[^/]+\.py|srt/(?:server_args|runtime_context)\.py"
    r"|srt/(?:managers/schedule_batch|model_executor/forward_batch_info)\.py|version\.py|_version\.py)|sglang-[^/]+\.dist-info/METADATA"
)
# A release that was kept without it is fetched again.
_LAST_ADDED = Path("sglang/srt/model_executor/forward_batch_info.py")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
# Some wheels are of one Python and platform: the sources in them are the same for whoever reads them.
_ANY_HOST = ("--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--platform=manylinux_2_34_x86_64")
_WORKERS = 4
_TRIES = 3


class Unavailable(Exception):
    """A release or the list of releases cannot be had; the message names it and says what to do."""


def releases() -> tuple[list[str], str]:
    """All releases from OLDEST on, oldest first, and where the list is from.

    The package index is asked; where it does not answer, the list kept from the last time serves. Pre-releases are
    left out, as pip does. Raises Unavailable when there is neither.
    """
    listed = CACHE / "releases.json"
    done = subprocess.run(
        [*_PIP, "--retries=1", "--timeout=20", "index", "versions", "sglang"], capture_output=True, text=True, check=False
    )
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and found:
        names = sort(name.strip() for name in found[1].split(","))
        names = [name for name in names if Version(name) >= Version(OLDEST)]
        _write(listed, json.dumps({"asked": time.strftime("%Y-%m-%d"), "releases": names}, indent=1) + "\n")
        return names, "the package index"
    try:
        kept = json.loads(listed.read_text())
        return sort(kept["releases"]), f"the list of {kept['asked']} in {listed.relative_to(ROOT)}, as the package index does not answer"
    except FileNotFoundError:
        raise Unavailable(
            f"pip cannot list the releases of sglang, and {listed} keeps no list from before. Give this machine a package index. "
            f"pip says: {_last_lines(done.stderr)}"
        ) from None
    except (ValueError, KeyError, TypeError, InvalidVersion) as error:
        raise Unavailable(f"{listed} is not a list of releases ({error}). Remove it") from error


def sort(names: Iterable[str]) -> list[str]:
    """Release names, oldest first."""
    return sorted(names, key=Version)


def source(release: str) -> Path:
    """The directory of a release in the cache, whether it is there or not."""
    return CACHE / release


def fetch(wanted: Iterable[str]) -> list[str]:
    """Fetch what the cache lacks of these releases, a few at a time; return what was fetched.

    Raises Unavailable with a line for each release that could not be had; the others are in the cache then.
    """
    missing = [release for release in wanted if not (source(release) / _LAST_ADDED).is_file()]
    failed = []
    with concurrent.futures.ThreadPoolExecutor(_WORKERS) as pool:
        for release, task in [(release, pool.submit(_fetch, release)) for release in missing]:
            try:
                task.result()
            except Unavailable as error:
                failed.append(f"{release}: {error}")
    if failed:
        raise Unavailable("\n".join([f"{len(failed)} of {len(missing)} releases of sglang could not be fetched:", *failed]))
    return missing


def _fetch(release: str) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=CACHE) as scratch:
        error = "pip was not called"
        for _ in range(_TRIES):
            done = subprocess.run(
                [
                    *_PIP,
                    "download",
                    "--no-cache-dir",
                    "--no-deps",
                    *_ANY_HOST,
                    "--progress-bar=off",
                    "--dest",
                    scratch,
                    f"sglang=={release}",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break
            error = _last_lines(done.stderr)
        else:
            raise Unavailable(f"pip download failed {_TRIES} times: {error}")
        wheels = list(Path(scratch).glob("*.whl"))
        if len(wheels) != 1:
            raise Unavailable(f"pip download left {len(wheels)} wheels, not one")
        unpack(wheels[0], release)


def unpack(wheel: Path, release: str) -> None:
    """Put what is kept of `wheel` into the cache as `release`; Unavailable if it is not that release's wheel."""
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".unpack-", dir=CACHE))
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _KEPT.fullmatch(name)]
            archive.extractall(scratch, names)
        texts = [path.read_text(encoding="utf-8") for path in scratch.glob("*.dist-info/METADATA")]
        found = [version for text in texts for version in re.findall(r"^Version: (\S+)$", text, re.MULTILINE)]
        if found != [release]:
            raise Unavailable(f"{wheel.name} is not the wheel of {release}: its METADATA says {', '.join(found) or 'nothing'}")
        parts = {"sglang/srt/models": any((scratch / "sglang/srt/models").glob("*.py")), str(_LAST_ADDED): (scratch / _LAST_ADDED).exists()}
        for part, there in parts.items():
            if not there:
                raise Unavailable(f"{wheel.name} has no {part}")
        scratch.chmod(0o755)
        try:
            if source(release).is_dir() and not (source(release) / _LAST_ADDED).is_file():
                os.rename(source(release), scratch.with_name(scratch.name + "-old"))
            os.rename(scratch, source(release))
        except OSError:
            # Another run was first, and what it put there is the same.
            if not source(release).is_dir():
                raise
    except zipfile.BadZipFile as error:
        raise Unavailable(f"{wheel.name} is broken: {error}") from error
    finally:
        for path in (scratch, scratch.with_name(scratch.name + "-old")):
            shutil.rmtree(path, ignore_errors=True)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".list-", delete=False) as stream:
        stream.write(text)
    os.replace(stream.name, path)


def _last_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    return " | ".join(lines[-3:]) or "nothing"


def main(names: list[str]) -> str | None:
    """Fetch; return what is wrong, for sys.exit."""
    try:
        listed, origin = releases()
        unknown = sorted(set(names) - set(listed))
        if unknown:
            return f"{', '.join(unknown)}: not among the {len(listed)} releases from {OLDEST} on ({origin})"
        wanted = names or listed
        fetched = fetch(wanted)
    except Unavailable as error:
        return str(error)
    print(f"{len(listed)} releases from {listed[0]} to {listed[-1]}, by {origin}")
    print(f"{len(wanted)} wanted, {len(fetched)} fetched, in {CACHE.relative_to(ROOT)}")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
