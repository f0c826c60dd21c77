# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gates look at: the files of the repository, those not yet committed included."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Paths relative to the root of every file that git knows or would add, links not followed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    paths = {Path(name) for name in listed.stdout.decode().split("\0") if name}
    return sorted(path for path in paths if (ROOT / path).is_symlink() or (ROOT / path).is_file())
