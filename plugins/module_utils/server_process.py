# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The main process of an SGLang server among the processes of a host.

PRIVATE to the collection.
"""

from __future__ import annotations

import os

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils.sglang_flags import last_value

SHELLS = ("sh", "bash", "dash", "zsh", "fish")


def is_server(argv):
    """Whether a command line starts an SGLang server."""
    words = [os.path.basename(word) for word in argv[:3]]
    return (
        "sglang.launch_server" in argv
        or any(word.endswith("sglang/launch_server.py") for word in argv[:3])
        or ("sglang" in words and "serve" in argv[1:4])
    )


def is_typed_in(argv):
    """Whether a command line is that of a shell that takes commands from somebody, not from a script or its arguments."""
    name = os.path.basename(argv[0]).lstrip("-") if argv else ""
    words = iter(argv[1:])
    for word in words:
        if word in ("--init-file", "--rcfile"):
            next(words, None)
        elif not word.startswith("-") or (not word.startswith("--") and "c" in word):
            return False
    return name in SHELLS


def server_on(port, host=None):
    """The pid of the SGLang server that listens on a port; None where nobody does, or somebody else."""
    for holder in hp.port_holders(port, host):
        pid = holder["pid"]
        # HTTP workers listen too: their server is above them.
        line = [pid, *hp.ancestors(pid)] if pid and pid > 1 else []
        servers = [one for one in line if is_server((hp.process(one) or {"argv": []})["argv"])]
        if servers:
            return servers[-1]
    return None


def server_below(pid):
    """The SGLang server that is a process or one of its descendants; None where there is none."""
    family = [pid] + [one for one in hp.family_of(pid) if one != pid]
    return next((one for one in family if is_server((hp.process(one) or {"argv": []})["argv"])), None)


def api_key_of(pid):
    """The API key that a server was started with on its command line; "" for none, and for no process.

    The server may be the process itself, or below it where that is a wrapper.
    """
    seen = hp.process(server_below(pid) or pid) if pid else None
    return (last_value(seen["argv"], "--api-key") or "") if seen else ""
