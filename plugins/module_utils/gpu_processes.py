# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The GPUs of a host and the processes that compute on them, as nvidia-smi lists them.

PRIVATE to the collection.
"""

from __future__ import annotations

import os

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils.host_command import ServiceError, run

_CAPABILITIES = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
_GPUS = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
_PROCESSES = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]


def _rows(argv):
    """Lists of fields; None where there is no nvidia-smi, or it has no answer."""
    try:
        code, out, _err = run(argv, timeout=30)
    except ServiceError:
        return None
    return [[field.strip() for field in line.split(",")] for line in out.splitlines() if line.strip()] if code == 0 else None


def compute_processes():
    """Who computes on which GPU: a list of {pid, gpu (uuid), command}; [] where there are no GPUs of NVIDIA."""
    found = []
    for row in _rows(_PROCESSES) or []:
        if len(row) >= 3 and row[1].isdigit():
            pid = int(row[1])
            command = hp.command_of(pid)
            # A process of another namespace has a name here and nothing in /proc.
            found.append({"pid": pid, "gpu": row[0], "command": row[2] if command == "(gone)" else command})
    return found


def architecture():
    """The compute capabilities of the host's GPUs, as `9.0`; several with commas between them, empty where nothing tells."""
    return ",".join(sorted({row[0] for row in _rows(_CAPABILITIES) or []}))


def gpus_of(environment):
    """The uuids of the GPUs that an environment leaves to a process; None for all there are."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    uuids = {row[0]: row[1] for row in _rows(_GPUS) or [] if len(row) == 2}
    return {uuids.get(one.strip(), one.strip()) for one in visible.split(",") if one.strip()}


def left_on(gpus, known=()):
    """Who still computes on these GPUs (None for all), apart from the pids in ``known``."""
    return [one for one in compute_processes() if (gpus is None or one["gpu"] in gpus) and one["pid"] not in known]


def orphans_on(gpus, known=()):
    """Workers of SGLang on these GPUs (None for all) that nobody has any more, apart from the pids in ``known``."""
    return [one for one in left_on(gpus, known) if "sglang" in one["command"] and not _is_had(one["pid"])]


def _is_had(pid):
    """Whether a server has a worker, or another program that runs SGLang's engine: not what takes in orphans."""
    above = hp.parent(pid)
    while above and hp.command_of(above).startswith("sglang::"):
        above = hp.parent(above)
    if not above:
        return False
    name = os.path.basename(hp.command_of(above).split(" ")[0])
    # A program may be the first process of its container.
    return name.startswith("python") or not (name == "systemd" or _is_first(above))


def _is_first(pid):
    """Whether a process is the first one of the host or of its container."""
    try:
        with open("/proc/%d/status" % pid, encoding="utf-8", errors="replace") as stream:
            return any(line.split()[-1] == "1" for line in stream if line.startswith("NSpid:"))
    except OSError:
        return False
