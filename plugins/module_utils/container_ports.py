# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds the port of a server that may be in a container.

PRIVATE to the collection. Where a container publishes a port, a helper of its engine listens on it, outside of the container.
"""

from __future__ import annotations

import os
import re

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp

_HELPER = re.compile(r"^(docker-proxy|conmon|(containers-)?rootlessport(-child)?|rootlesskit|slirp4netns|pasta(\.avx2)?)$")


def _is_helper(holder):
    words = holder["command"].split()
    # What renamed itself stands in brackets or ends in a colon.
    return bool(words) and bool(_HELPER.match(os.path.basename(words[0].strip("[]:"))))


def publishes(engine, name, port):
    """Whether a container that runs, the server's or its capture container, publishes a port of the host."""
    for one in (cq.capture_name(name), name):
        facts = cq.inspect(engine, one)
        if not facts or facts["State"].get("Status") != "running":
            continue
        for where in (facts.get("HostConfig") or {}).get("PortBindings"), (facts.get("NetworkSettings") or {}).get("Ports"):
            for bindings in (where or {}).values():
                if any(binding.get("HostPort") == str(port) for binding in bindings or []):
                    return True
    return False


def strangers(port, host, own, manager, name):
    """Who listens on a port, as of host_processes.port_holders, without being of the pids ``own`` or its engine's helper for a container.

    ``manager`` and ``name`` are the server's; of those that run no containers only ``own`` counts.
    """
    others = [holder for holder in hp.port_holders(port, host) if holder["pid"] not in own]
    if manager in cq.ENGINES and any(map(_is_helper, others)) and publishes(manager, name, port):
        others = [holder for holder in others if not _is_helper(holder)]
    return others
