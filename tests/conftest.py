# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the payload, the module_utils and the collection importable from the checkout."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path[:0] = [
    str(ROOT / "plugins" / "module_utils"),
    str(ROOT / "roles" / "_bridge" / "files"),
    str(ROOT / "playbooks" / "collections"),
]
