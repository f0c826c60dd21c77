# SPDX-License-Identifier: Apache-2.0
"""Gather Python packages for the interpreter of a host, on the controller, as one archive.

    build_packages.py CACHE_DIR WHEELHOUSE INTERPRETER PACKAGE...

INTERPRETER is the JSON object that ``interpreter.py`` printed on the host. pip takes wheels for that very interpreter from
its index, or from the directory WHEELHOUSE alone where that is not empty; no host needs an index. The same wheels give the same bytes.
The path of the archive (.tar.gz) is the last line printed; its name carries the hash of its content.
Exit status 1 with the reason on stderr where the packages are not to be had.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile

# What the payload is tested with.
WANTED = {
    "aiohttp": "aiohttp>=3.9,<4",
    "numpy": "numpy>=1.24,<3",
    "orjson": "orjson>=3.10,<4",
    "safetensors": "safetensors>=0.4.3,<1",
    "zstandard": "zstandard>=0.22,<1",
}
# pip judges the conditions of requirements by its own interpreter: what theirs needs besides, before that release.
BEFORE_3_11 = ("async-timeout>=4,<6", "typing-extensions>=4.2")
LEGACY_PLATFORMS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def platforms(glibc: str, machine: str) -> list[str]:
    """Platform tags of wheels that run on that libc and machine, newest first."""
    newest = int(glibc.split(".")[1])
    found = []
    for minor in range(newest, 4, -1):
        found.append(f"manylinux_2_{minor}_{machine}")
        if minor in LEGACY_PLATFORMS:
            found.append(f"{LEGACY_PLATFORMS[minor]}_{machine}")
    return found


def install(target: str, wheelhouse: str, interpreter: dict[str, str], packages: list[str]) -> None:
    """Put the packages and what they need into a directory. Raises SystemExit with pip's reason."""
    version = interpreter["version"]
    requirements = [WANTED[name] for name in packages]
    if tuple(map(int, version.split("."))) < (3, 11):
        requirements += BEFORE_3_11
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--target", target]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version, "--abi", f"cp{version.replace('.', '')}"]
    command += ["--abi", "abi3", "--abi", "none"]
    for platform in [*platforms(interpreter["glibc"], interpreter["machine"]), "any"]:
        command += ["--platform", platform]
    if wheelhouse:
        command += ["--no-index", "--find-links", wheelhouse]
    done = subprocess.run([*command, *requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{', '.join(packages)} for Python {version} could not be had from {wheelhouse or 'the package index'}: {done.stderr.strip()[-800:]}\n"
            "Install them on the host into the environment of extraction_python, let pip on the controller reach an index, or set"
            " extraction_wheelhouse to a directory of wheels on the controller."
        )


def archive(directory: str) -> bytes:
    """All files of a directory as a .tar.gz, sorted and without times and owners."""
    root = pathlib.Path(directory)
    with tempfile.TemporaryFile() as raw:
        with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for path in sorted(root.rglob("*")):
                if path.is_file():
                    info = tarfile.TarInfo(path.relative_to(root).as_posix())
                    info.size, info.mode = path.stat().st_size, 0o644
                    with path.open("rb") as stream:
                        tar.addfile(info, stream)
        raw.seek(0)
        return raw.read()


def main(arguments: list[str]) -> None:
    cache, wheelhouse, interpreter, packages = pathlib.Path(arguments[0]), arguments[1], json.loads(arguments[2]), sorted(arguments[3:])
    asked = json.dumps(
        [wheelhouse, interpreter["version"], interpreter["glibc"], interpreter["machine"], [WANTED[name] for name in packages]]
    )
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    known = cache / f"packages-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
    # Hosts are served at the same time, and most want the same.
    with open(f"{known}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if known.is_symlink() and known.exists():
            print(known.resolve())
            return
        with tempfile.TemporaryDirectory(dir=cache) as work:
            install(work, wheelhouse, interpreter, packages)
            data = archive(work)
        target = cache / f"packages-{hashlib.sha256(data).hexdigest()[:16]}.tar.gz"
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as stream:
            stream.write(data)
        os.replace(stream.name, target)
        known.unlink(missing_ok=True)
        known.symlink_to(target.name)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
