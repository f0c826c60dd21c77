# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: watch
short_description: Poll a module until it reports a state, and show its progress while waiting
version_added: 0.1.0
description:
  - Runs a module on the host again and again, and prints its C(line) whenever that changes.
  - Runs on the controller; going away ends the watching and nothing else.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Skipped, as what would be waited for has not been started.
    support: none
  diff_mode:
    description: Changes nothing.
    support: none
options:
  module:
    description: Fully qualified name of the module; it returns C(state) and, for the display, C(line).
    type: str
    required: true
  arguments:
    description: The module's arguments.
    type: dict
    default: {}
  message:
    description: What is waited for, for the messages.
    type: str
    default: ''
  until:
    description: States that end the watching well.
    type: list
    elements: str
    required: true
  fail_on:
    description: States that end it as a failure.
    type: list
    elements: str
    default: []
  tolerate:
    description:
      - How many polls in a row may show a state of O(fail_on) before it counts, as a dictionary from state to number.
      - C(unreachable) is the number of polls in a row in which the host may not be reached.
      - C(error) is the number of polls in a row in which the module may fail; without it the first one ends the watching.
    type: dict
    default: {unreachable: 3}
  interval:
    description: Seconds between two polls.
    type: float
    default: 5
  timeout:
    description: Seconds after which the watching ends as a failure; 0 for no limit.
    type: float
    default: 0
"""

EXAMPLES = r"""
- name: Wait until the server is ready
  hidden_state.bridge.watch:
    module: hidden_state.bridge.sglang_health
    arguments:
      url: http://127.0.0.1:30000
      name: sglang
    message: the server on port 30000
    until: [ready]
    fail_on: [failed]
    interval: 5
    timeout: 2400
"""

RETURN = r"""
polls:
  description: How many times the module ran.
  returned: always
  type: int
waited:
  description: Seconds from the first poll to the last.
  returned: always
  type: float
state:
  description: The last state. All other values that the module returned last are there too.
  returned: when the module answered
  type: str
"""
