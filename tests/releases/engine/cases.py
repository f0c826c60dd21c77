# SPDX-License-Identifier: GPL-3.0-or-later
"""Which cases run: SERVERS=all, SERVERS=0.5.12,0.5.20 (every case of these), or none for a small sample."""

from __future__ import annotations

import os

import pytest

from engines import known
from server import usable_cores
from sglang_release import release_key

RELEASES = sorted(known(), key=release_key)
# Their batches say whose requests they hold.
WITH_RIDS = RELEASES[RELEASES.index("0.5.10.post1") :]
VARIABLE = "SERVERS"


def parameters(cases: list[tuple], *sample: tuple) -> list:
    """Parameters of a test, one for each case (release, ..., tp_size last); those not asked for are skipped with the reason."""
    return [pytest.param(*case, id="-".join(map(str, case)), marks=_marks(case, sample)) for case in cases]


def _marks(case: tuple, sample: tuple[tuple, ...]) -> list:
    asked = os.environ.get(VARIABLE) or "sample"
    if asked not in ("sample", "all"):
        unknown = set(asked.split(",")) - set(RELEASES)
        if unknown:
            raise pytest.UsageError(f"{VARIABLE}={asked}: {', '.join(sorted(unknown))} is not known; known are {', '.join(RELEASES)}, all")
    if asked == "sample" and case not in sample:
        return [pytest.mark.skip(f"not in the sample; {VARIABLE}=all runs it")]
    if asked not in ("sample", "all") and case[0] not in asked.split(","):
        return [pytest.mark.skip(f"{VARIABLE}={asked} leaves it out")]
    if case[-1] > len(usable_cores()):
        return [pytest.mark.skip(f"{case[-1]} ranks need as many cores, and there are {len(usable_cores())}")]
    return []
