# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: states_fetch
short_description: Pull files of states from a host to the controller
version_added: 0.1.0
description:
  - Pulls the files that C(wanted.jsonl) in O(dest) names, through the connection that Ansible has anyway, and compares each
    with its SHA-256.
  - A file gets its name when it is whole, right and on the disk. What was pulled before is not pulled again.
  - A file that is not as its hash says is named in RV(problems), and the others are pulled.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Pulls nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  src:
    description: The host's output directory.
    type: path
    required: true
  dest:
    description: Directory on the controller with C(wanted.jsonl), lines of the host's manifest.
    type: path
    required: true
  min_free_bytes:
    description: The file system of O(dest) is never filled beyond this.
    type: int
    default: 1073741824
"""

EXAMPLES = r"""
- name: Pull what is missing
  hidden_state.bridge.states_fetch:
    src: /data/states/{{ inventory_hostname }}
    dest: /data/collected/.incoming/{{ inventory_hostname }}
"""

RETURN = r"""
records:
  description: Records that were pulled.
  returned: always
  type: int
bytes:
  description: Size of their files.
  returned: always
  type: int
problems:
  description: Records with a file that is not as its hash says, each with C(id) and C(reason), at most a hundred.
  returned: always
  type: list
  elements: dict
"""
