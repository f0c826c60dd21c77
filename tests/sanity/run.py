# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs `ansible-test sanity` on the collection as it ships, with nothing but a package index.

    run.py [arguments of ansible-test sanity]

ansible-test wants a path that ends in ansible_collections/NAMESPACE/NAME. Its virtual environments get pip
from a script that it downloads; one that takes Python's own ensurepip and the index instead is put in its cache, which
lies in a home directory of its own.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import ansible_test._internal as ansible_test

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
COPY = CACHE / "ansible_collections" / "hidden_state" / "bridge"
HOME = CACHE / "ansible-test-home"
# A process of its own for ensurepip: it takes pip's settings out of its environment.
BOOTSTRAP = """\
import subprocess
import sys

subprocess.check_call([sys.executable, "-m", "ensurepip"])
packages = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *packages]))
"""


def unpack() -> None:
    """Put the collection as it ships, with the ignore files, where ansible-test wants it; what it made there itself stays."""
    kept = COPY / "tests" / "output"
    aside = CACHE / "ansible-test-output"
    COPY.mkdir(parents=True, exist_ok=True)
    if kept.exists():
        kept.rename(aside)
    shutil.rmtree(COPY)
    subprocess.run(["ansible-galaxy", "collection", "build", "--force", ROOT, "--output-path", CACHE], check=True)
    archive = max(CACHE.glob("hidden_state-bridge-*.tar.gz"), key=lambda path: path.stat().st_mtime)
    with tarfile.open(archive) as members:
        members.extractall(COPY, filter="data")
    archive.unlink()
    (COPY / "tests" / "sanity").mkdir(parents=True)
    for ignore in (ROOT / "tests" / "sanity").glob("ignore-*.txt"):
        shutil.copy(ignore, COPY / "tests" / "sanity")
    shutil.copy(ROOT / "galaxy.yml", COPY)
    # Without a repository of its own all of this would count as ignored files of the checkout.
    subprocess.run(["git", "init", "--quiet"], cwd=COPY, check=True)
    (COPY / ".git" / "info" / "exclude").write_text("/tests/output/\n")
    if aside.exists():
        aside.rename(kept)


def bootstrap() -> dict[str, str]:
    """Put the stand-in for the pip bootstrap where ansible-test looks for it; returns the environment to use."""
    source = Path(ansible_test.__file__).with_name("python_requirements.py").read_text()
    version = re.search(r"\bpip='([\d.]+)'", source)[1].replace(".", "_")
    cache = HOME / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    (cache / f"get_pip_{version}.py").write_text(BOOTSTRAP)
    # ansible-test hands on no PIP_ variable: the settings in force (an index, a certificate) go into a file.
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE, text=True)
    found = re.findall(r"^[\w:]+\.([\w-]+)=(.*)$", listed.stdout, re.MULTILINE)
    settings = {key: ast.literal_eval(value) for key, value in found}
    (HOME / ".pip").mkdir(exist_ok=True)
    (HOME / ".pip" / "pip.conf").write_text(
        "[global]\n" + "".join("{} = {}\n".format(key, value.strip().replace("\n", " ")) for key, value in settings.items())
    )
    return {**os.environ, "HOME": str(HOME)}


def main() -> int:
    unpack()
    version = "{}.{}".format(*sys.version_info)
    command = ["ansible-test", "sanity", "--venv", "--python", version, "--color", "no", *sys.argv[1:]]
    print("==", *command, flush=True)
    status = subprocess.call(command, cwd=COPY, env=bootstrap())
    print(f"== ansible-test sanity with ansible-core {ansible_test_version()}, Python {version}: {'failed' if status else 'passed'}")
    return status


def ansible_test_version() -> str:
    from ansible.release import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
