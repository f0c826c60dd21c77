# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Units of systemd that stop along with a server's unit. Its start does not start them again, so the host keeps which they are.

PRIVATE to the collection. The record lies under /run: after a reboot systemd starts by itself what starts with the host.
"""

from __future__ import annotations

import os
import time

from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

SECONDS = 60.0
# A program that cannot be run ends at once, after its unit was active.
SETTLE_SECONDS = 2.0

# What requires a unit, is bound to it or is part of it, each as that unit shows it.
_ALONG = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo")
_UP = ("active", "reloading", "activating")


def record_path(unit):
    """Where it is kept which units stopped along with one."""
    return os.path.join(layer.RUN_DIR, unit + ".dependents.json")


def _shown(units, *properties):
    """The properties of each unit, and its ``Id``."""
    argv = ["systemctl", "show", "--property=" + ",".join(("Id", *properties)), "--", *units]
    code, out, err = sq.run(argv)
    if code != 0:
        raise sq.ServiceError("%s: %s" % (" ".join(argv), (err or out).strip()))
    return [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in out.split("\n\n") if part.strip()]


def _active_along(unit):
    """The active units that a stop of this one stops, those that stop along with them among them."""
    seen, active, asked = set(), set(), [unit]
    while asked:
        seen.update(asked)
        named = set()
        for facts in _shown(asked, "ActiveState", *_ALONG):
            if asked != [unit] and facts.get("ActiveState") in _UP:
                active.add(facts["Id"])
            seen.add(facts.get("Id"))
            named.update(name for key in _ALONG for name in facts.get(key, "").split())
        asked = sorted(named - seen)
    return active


def recorded(unit):
    """The units that stopped along with one and were not started again yet."""
    return (pr.read(record_path(unit)) or {"units": []})["units"]


def remember(unit):
    """Keep which units a stop that is about to come stops along with this one, beside those of an earlier stop."""
    known = recorded(unit)
    units = sorted(set(known) | _active_along(unit))
    if units != known:
        layer.lay_files({record_path(unit): {"units": units}})


def rejoin(unit):
    """Start the recorded units again; returns those that were down. Raises ServiceError naming those that do not start."""
    units = recorded(unit)
    if not units:
        return []
    there = [one for one in _shown(units, "LoadState", "ActiveState") if one.get("LoadState") not in ("not-found", "masked")]
    down = [one["Id"] for one in there if one["ActiveState"] not in _UP]
    if down:
        # A unit that failed too often is refused a start until its counter is reset.
        sq.run(["systemctl", "reset-failed", "--", *down])
        _code, _out, err = sq.run(["systemctl", "start", "--no-block", "--", *down])
        left = _left_down(down)
        if left:
            states, names = ", ".join("%s: %s" % one for one in left), " ".join(name for name, _state in left)
            why = ": " + err.strip() if err.strip() else ""
            raise sq.ServiceError(
                "runs, but units that stopped along with it did not start again (%s)%s. See their logs, then: systemctl start %s"
                % (states, why, names)
            )
    layer.take_files([record_path(unit)])
    return down


def _left_down(units):
    """(unit, state) of those that are not up. One that is still starting, or that waits for others, is systemd's to finish."""
    begun = time.monotonic()
    while True:
        time.sleep(0.5)
        shown = _shown(units, "ActiveState", "Job")
        waited = time.monotonic() - begun
        under_way = any(one["ActiveState"] == "activating" or one.get("Job", "0") != "0" for one in shown)
        if waited > (SECONDS if under_way else SETTLE_SECONDS):
            return [(one["Id"], one["ActiveState"]) for one in shown if one["ActiveState"] not in _UP and one.get("Job", "0") == "0"]
