#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_patch
short_description: Patch an SGLang model file for hidden state capture
version_added: 0.1.0
description:
  - Puts the capture patch into a model file of an installed SGLang, and the capture runtime beside it, or takes both out again.
  - The places are found in the syntax tree. Every byte outside the inserted lines stays, and O(state=absent) gives the original back byte for byte.
  - A run that is killed leaves the file as it was or as it was to become, and the next run sweeps what was left beside it.
  - A patch of an older version is upgraded. A patch that was edited, or is of a newer version, is refused, with a diff where one can be told.
  - A patched server behaves exactly as an unpatched one unless E(SGLANG_HS_DUMP_DIR) is set when it starts.
  - Releases from 0.4.0 on are known by the shape of their source, for C(deepseek_v2) and nearly every other decoder model.
  - A file of any other shape is refused and stays as it is. C(docs/support.md) lists what is known.
options:
  state:
    description:
      - V(present) patches the file, V(absent) restores it.
    type: str
    choices: [present, absent]
    default: present
  python:
    description:
      - The Python interpreter that runs SGLang. The model file is the one that this interpreter would import, from a wheel, an editable
        install or a source tree on E(PYTHONPATH). For a source tree that is only the server's working directory, give O(model_file).
      - Required unless O(model_file) is given.
    type: path
  model_file:
    description:
      - The model file itself. Takes precedence over O(python) and O(model).
      - A link is resolved once. The file that it leads to is patched, and the runtime lies where the link stands, in the tree that Python imports.
    type: path
  model:
    description:
      - Name of the model's module under C(sglang/srt/models).
    type: str
    default: deepseek_v2
  originals_dir:
    description:
      - Directory on the host that keeps the original, as C(<model>.<first 16 hex digits of its sha256>.orig).
      - Without it, C(/var/lib/hidden_state_bridge/originals) for root and C(~/.local/state/hidden_state_bridge/originals) for other users.
    type: path
attributes:
  check_mode:
    description: Makes the whole patch in memory and changes nothing.
    support: full
  diff_mode:
    description: Shows the change of the model file.
    support: full
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
"""

EXAMPLES = r"""
- name: Patch the SGLang of an environment
  hidden_state.bridge.hs_patch:
    python: /opt/sglang/bin/python

- name: Take the patch out again
  hidden_state.bridge.hs_patch:
    python: /opt/sglang/bin/python
    state: absent
"""

RETURN = r"""
model_file:
  description: The file that was patched or restored, links resolved.
  returned: success
  type: str
link:
  description: The path that was given or found, where links lead from it to RV(model_file), else V(null).
  returned: success
  type: str
sglang_version:
  description: The SGLang release of the file, V(null) where no file tells.
  returned: success
  type: str
family:
  description:
    - The family whose rule was applied, a letter for C(deepseek_v2), the shape of the decoder loop for other models.
    - V(null) for a file without a patch under O(state=absent).
  returned: success
  type: str
  sample: D
changes:
  description:
    - The four changes (imports, init, layer loop, after the norm), with their lines in the patched file.
    - Empty under O(state=absent) where there was no patch.
  returned: success
  type: list
  elements: dict
  contains:
    name:
      description: Name of the change.
      type: str
    line:
      description: Line in the patched file, counted from 1.
      type: int
    text:
      description: The inserted lines.
      type: str
runtime:
  description: The directory of the capture runtime.
  returned: success
  type: str
runtime_changed:
  description: Files of the runtime that were missing, stale or removed.
  returned: success
  type: list
  elements: str
leftovers:
  description: What a killed run had left and this one removed.
  returned: success
  type: list
  elements: str
checksum_before:
  description: SHA-256 of the model file before.
  returned: success
  type: str
checksum_after:
  description: SHA-256 of the model file after.
  returned: success
  type: str
original:
  description: The stored original, V(null) where there is none.
  returned: success
  type: str
patch_version:
  description: Version of the patch.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_patcher

# Read as data by the patcher: imported so that Ansible ships them.
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture import (  # noqa: F401  pylint: disable=unused-import
    capture,
    collector,
    dumpfile,
    engine,
    expect,
    follower,
    guards,
    layers,
    settings,
    writer,
)


def run(module: AnsibleModule) -> dict:
    """Do what the parameters ask for; return what the module returns."""
    params = module.params
    path, release = params["model_file"], None
    if not path:
        path, release = hs_patcher.locate(params["python"], params["model"])
    action = hs_patcher.apply if params["state"] == "present" else hs_patcher.revert
    result = action(path, originals=params["originals_dir"], release=release, dry_run=module.check_mode)
    returned = {
        "changed": result.changed,
        "model_file": result.model_file,
        "link": result.link,
        "sglang_version": result.sglang_version,
        "family": result.family,
        "changes": [change._asdict() for change in result.changes],
        "runtime": result.runtime_dir,
        "runtime_changed": result.runtime_changed,
        "leftovers": result.leftovers,
        "checksum_before": result.checksum_before,
        "checksum_after": result.checksum_after,
        "original": result.original,
        "patch_version": result.patch_version,
    }
    if module._diff:
        returned["diff"] = {
            "before": result.before.decode("utf-8", "replace"),
            "after": result.after.decode("utf-8", "replace"),
            "before_header": result.model_file,
            "after_header": result.model_file,
        }
    return returned


def main() -> None:
    """Entry point of Ansible."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "python": {"type": "path"},
            "model_file": {"type": "path"},
            "model": {"type": "str", "default": "deepseek_v2"},
            "originals_dir": {"type": "path"},
        },
        required_one_of=[["python", "model_file"]],
        supports_check_mode=True,
    )
    try:
        returned = run(module)
    except hs_patcher.Refused as error:
        module.fail_json(msg=str(error))
    module.exit_json(**returned)


if __name__ == "__main__":
    main()
