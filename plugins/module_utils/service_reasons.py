# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Why a running process is not the one that is wanted.

PRIVATE to the collection. Judged by the process itself: its environment, its arguments, its start.
"""

from __future__ import annotations

import os

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

# A server needs longer than this from its start until it imports a model file, and the start time in /proc
# is that exact only as long as nobody sets the clock.
CLOCK_SLACK = 2.0


def restart_reasons(service, tag, command, newer_than, launch=None):
    """Why a running process has to be replaced; [] where it is the wanted one.

    ``tag`` is the hash that its environment has to hold, "" for a process of the operator's own, which has none. With ``launch``
    (as of process_record.launch_of) arguments and environment themselves are compared.
    """
    environment = service["environment"]
    if environment is None:
        return ["the environment of process %s cannot be read, so its settings are unknown" % service["pid"]]
    reasons = []
    if launch:
        reasons += pr.differences(service, launch)
    elif not tag and sq.TAG_VARIABLE in environment:
        reasons.append("runs with a layer of ours")
    elif tag and environment.get(sq.TAG_VARIABLE) != tag:
        has, wanted = hp.masked(service["argv"]), hp.masked(command)
        more = [word for word in wanted if word not in has]
        less = [word for word in has if word not in wanted]
        if command and (more or less):
            reasons.append("runs with other arguments: lacks [%s], has [%s]" % (" ".join(more), " ".join(less)))
        else:
            reasons.append("runs with other settings than wanted")
    for path in newer_than:
        try:
            written = os.stat(path).st_mtime
        except OSError:
            continue
        if service["since"] + CLOCK_SLACK < written:
            reasons.append("was started before %s was written" % path)
    return reasons
