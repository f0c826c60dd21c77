# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: packed_set
short_description: Make a directory hold a packed data set, copying only the blocks that differ
version_added: 0.1.0
description:
  - Compares the hashes of all blocks with those in C(meta.json) of the set, and copies what is missing or differs.
    A set that is there already, copied before or on a shared file system, is read and left alone.
  - C(meta.json) is written last, so what is not complete is never taken for a data set. A copy that was interrupted goes
    on where it ended.
  - Parts travel as files; neither side holds more than one block in memory.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Compares, and copies nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  src:
    description: Directory of the packed set, on the controller, or on the host with O(fetch=true).
    type: path
    required: true
  dest:
    description: Directory that is to hold it, on the host, or on the controller with O(fetch=true).
    type: path
    required: true
  fetch:
    description: Copy from the host to the controller.
    type: bool
    default: false
  owner:
    description: Owner of the set on the host.
    type: str
  group:
    description: Group of the set on the host.
    type: str
"""

EXAMPLES = r"""
- name: Put the packed data set on the host
  hidden_state.bridge.packed_set:
    src: "{{ dataset_stage_packed.path }}"
    dest: /var/lib/hidden_state_bridge/datasets/{{ dataset_stage_packed.path | basename }}
"""

RETURN = r"""
blocks:
  description: Number of blocks that were copied, or would be in check mode.
  returned: always
  type: int
bytes:
  description: Their size.
  returned: always
  type: int
"""
