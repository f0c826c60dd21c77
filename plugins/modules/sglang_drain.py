#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_drain
short_description: Count once the requests that an SGLang server has in flight
version_added: 0.1.0
description:
  - Meant to be polled by P(hidden_state.bridge.watch#module) before a server is stopped.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Changes nothing.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
options:
  url:
    description: Base URL of the server.
    type: str
    required: true
  api_key:
    description: API key of the server.
    type: str
    default: ''
  pid:
    description: Process of the server; its own API key serves where O(api_key) is empty.
    type: int
  deadline:
    description: When to stop waiting, in seconds since the epoch.
    type: float
    required: true
"""

EXAMPLES = r"""
- name: Wait for the requests in flight
  hidden_state.bridge.watch:
    module: hidden_state.bridge.sglang_drain
    arguments:
      url: http://127.0.0.1:30000
      deadline: "{{ now().timestamp() + 60 }}"
    until: [idle, late]
"""

RETURN = r"""
state:
  description: V(busy), V(idle) (also where the server is gone or cannot tell) or V(late) (the deadline has passed).
  returned: always
  type: str
line:
  description: One line of progress.
  returned: always
  type: str
requests:
  description: Requests running or waiting, V(null) where the server cannot tell.
  returned: always
  type: int
"""

import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import api_key_of


def look(params):
    """One count."""
    number = probe.requests_in_flight(params["url"], params["api_key"] or api_key_of(params["pid"]))
    if number is None:
        return {"state": "idle", "line": "the server does not say how many requests it has", "requests": None}
    if number == 0:
        return {"state": "idle", "line": "no requests in flight", "requests": 0}
    late = time.time() >= params["deadline"]
    line = "%d requests in flight%s" % (number, ", and no time left to wait for them" if late else "")
    return {"state": "late" if late else "busy", "line": line, "requests": number}


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "pid": {"type": "int"},
            "deadline": {"type": "float", "required": True},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **look(module.params))


if __name__ == "__main__":
    main()
