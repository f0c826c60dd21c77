# SPDX-License-Identifier: GPL-3.0-or-later
"""Which plays the unit tests leave to `make drills`."""

from __future__ import annotations

import os

import pytest

PLAYED = pytest.mark.skipif(os.environ.get("PLAYS") != "all", reason="a minute of plays; PLAYS=all runs it, as `make drills` does")
