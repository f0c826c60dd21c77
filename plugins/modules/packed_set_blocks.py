#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: packed_set_blocks
short_description: Compare, take in and give out blocks of a packed data set
version_added: 0.1.0
description:
  - The part of M(hidden_state.bridge.packed_set) that runs on the host. Use that one.
  - No file is held whole in memory.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: V(place) and V(finish) write nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  operation:
    description:
      - V(compare) names the blocks that are missing or differ. V(place) puts the O(blocks) of O(source) into their files.
      - V(finish) writes C(meta.json), which makes the set complete, and sets owner and group of all of it.
      - V(describe) gives C(meta.json). V(give) gives O(blocks), in base64.
    type: str
    choices: [compare, place, finish, describe, give]
    required: true
  path:
    description: Directory of the set.
    type: path
    required: true
  files:
    description: Sizes and hashes of blocks by name of file, as C(meta.json) has them.
    type: dict
    default: {}
  block_bytes:
    description: Size of a block.
    type: int
    default: 0
  meta:
    description: Content of C(meta.json).
    type: str
    default: ''
  blocks:
    description: Numbers of blocks by name of file.
    type: dict
    default: {}
  source:
    description: File on the host in which the blocks follow one another, by name and number. It is removed.
    type: path
  owner:
    description: Owner of the set.
    type: str
  group:
    description: Group of the set.
    type: str
"""

EXAMPLES = r"""
- name: See what is missing
  hidden_state.bridge.packed_set_blocks:
    operation: compare
    path: /var/lib/hidden_state_bridge/datasets/0123456789abcdef
    files: "{{ dataset_stage_packed.meta.files }}"
    block_bytes: "{{ dataset_stage_packed.meta.block_bytes }}"
"""

RETURN = r"""
missing:
  description: Numbers of blocks that are missing or differ, by name of file.
  returned: when O(operation=compare)
  type: dict
complete:
  description: Whether C(meta.json) is there and as it has to be.
  returned: when O(operation=compare)
  type: bool
meta:
  description: Content of C(meta.json).
  returned: when O(operation=describe)
  type: str
content:
  description: The blocks, one after the other, in base64.
  returned: when O(operation=give)
  type: str
"""

import base64
import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_blocks, hs_manifest

META = "meta.json"


def read_meta(path):
    """The text of meta.json; empty where there is none."""
    try:
        with open(os.path.join(path, META), encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return ""


def write_meta(path, text):
    """Replace meta.json at once, after everything else is durable."""
    temporary = os.path.join(path, ".%s.tmp-%d" % (META, os.getpid()))
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(handle)
    os.rename(temporary, os.path.join(path, META))
    hs_manifest.fsync_directory(path)


def place(params):
    """Put the blocks of the source into their files."""
    os.makedirs(params["path"], mode=0o700, exist_ok=True)
    try:
        with open(params["source"], "rb") as stream:
            for name, numbers in sorted(params["blocks"].items()):
                path = os.path.join(params["path"], name)
                hs_blocks.write_blocks(path, numbers, stream, params["files"][name], params["block_bytes"])
    finally:
        os.unlink(params["source"])


def finish(module):
    """Write meta.json where it differs, and set owner, group and modes; returns whether anything changed."""
    params = module.params
    changed = read_meta(params["path"]) != params["meta"]
    if changed and not module.check_mode:
        write_meta(params["path"], params["meta"])
    for name, mode in [("", 0o700), (META, 0o600)] + [(name, 0o600) for name in sorted(params["files"])]:
        path = os.path.join(params["path"], name) if name else params["path"]
        if os.path.lexists(path):
            changed = module.set_owner_if_different(path, params["owner"], changed)
            changed = module.set_group_if_different(path, params["group"], changed)
            changed = module.set_mode_if_different(path, mode, changed)
    return changed


def run(module):
    """What this module returns."""
    params = module.params
    operation = params["operation"]
    if operation == "compare":
        found = hs_blocks.missing(params["path"], params["files"], params["block_bytes"])
        return {"missing": found, "complete": read_meta(params["path"]) == params["meta"]}
    if operation == "place":
        if not module.check_mode:
            place(params)
        return {"changed": True}
    if operation == "finish":
        return {"changed": finish(module)}
    if operation == "describe":
        return {"meta": read_meta(params["path"])}
    pieces = hs_blocks.pieces_of(params["path"], params["blocks"], params["files"], params["block_bytes"])
    return {"content": base64.b64encode(b"".join(pieces)).decode("ascii")}


def main():
    module = AnsibleModule(
        argument_spec={
            "operation": {"type": "str", "choices": ["compare", "place", "finish", "describe", "give"], "required": True},
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "default": {}},
            "block_bytes": {"type": "int", "default": 0},
            "meta": {"type": "str", "default": ""},
            "blocks": {"type": "dict", "default": {}},
            "source": {"type": "path"},
            "owner": {"type": "str"},
            "group": {"type": "str"},
        },
        required_if=[("operation", "place", ["source"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**dict({"changed": False}, **run(module)))
    except (OSError, ValueError) as error:
        module.fail_json(msg="%s: %s; see to its permissions and free space, and run it again" % (module.params["path"], error))


if __name__ == "__main__":
    main()
