# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection builds, the archive holds what a user needs and nothing else, and it installs and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

GALAXY = Path(sys.executable).parent / "ansible-galaxy"
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"
JUNK = re.compile(
    r"(^|/)(\.|__pycache__)|\.pyc$|^(tests|molecule|demo|bench|Makefile|ansible\.cfg|playbooks/collections)(/|$)|\.tar\.gz$|\.orig$"
)


@pytest.fixture(scope="module")
def archive(root, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("archive")
    subprocess.run([GALAXY, "collection", "build", root, "--output-path", target], check=True)
    return next(target.glob("hidden_state-bridge-*.tar.gz"))


def test_the_archive_holds_what_a_user_needs(root, archive):
    with tarfile.open(archive) as members:
        names = members.getnames()
    assert [name for name in names if JUNK.search(name)] == []
    roles = {f"roles/{path.name}/defaults/main.yml" for path in (root / "roles").iterdir() if path.is_dir()}
    playbooks = {f"playbooks/{path.name}" for path in (root / "playbooks").glob("*.yml")}
    needed = {"MANIFEST.json", "README.md", "CHANGELOG.md", "LICENSE", "LICENSES/Apache-2.0.txt", "meta/runtime.yml"}
    assert needed | roles | playbooks <= set(names)


def test_the_archive_is_small(archive):
    """A cache or an engine that slipped in would be seen here first."""
    assert archive.stat().st_size < 2 << 20


def test_the_installed_collection_runs(root, archive, tmp_path):
    (tmp_path / "ansible.cfg").touch()
    environment = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(tmp_path), "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg")}
    subprocess.run([GALAXY, "collection", "install", archive, "-p", tmp_path, "--offline"], check=True, env=environment)
    for playbook in sorted((root / "playbooks").glob("*.yml")):
        done = subprocess.run(
            [PLAYBOOK, f"hidden_state.bridge.{playbook.stem}", "-i", "host,", "--syntax-check"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_the_version_is_in_the_changelog(root):
    version = yaml.safe_load((root / "galaxy.yml").read_text())["version"]
    assert f"\n## {version}\n" in (root / "CHANGELOG.md").read_text()
