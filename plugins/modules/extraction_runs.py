#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: extraction_runs
short_description: List, adopt and delete the output of earlier extractions
version_added: 0.1.0
description:
  - Looks for directories with the marker of an extraction (C(.hidden_state_bridge)) two levels below O(roots).
  - Deletes only what O(remove) names, and only directories with the marker, that are not in use, whose path leads through no link and
    that hold no other file system. Links in a run are removed, never followed. If one name is refused, nothing is deleted.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Says what would be deleted or marked.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  roots:
    description: Directories to search.
    type: list
    elements: path
    required: true
  remove:
    description: Runs to delete, by path or by the run's name (twelve hexadecimal digits).
    type: list
    elements: str
    default: []
  adopt:
    description: Directories without the marker, that hold the output of something else, to look at, and to mark with O(confirmed=true).
    type: list
    elements: str
    default: []
  confirmed:
    description: Whether the directories of O(adopt) are marked.
    type: bool
    default: false
  keep:
    description: Directories that must not be deleted or adopted, nor anything that they lie in or that lies in them; what each one is.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: List earlier runs
  hidden_state.bridge.extraction_runs:
    roots: [/data]
    keep: {/data/hidden_states/gpu-01: the current run}
"""

RETURN = r"""
runs:
  description:
    - The runs that are there, each with C(path), C(run), C(kind) (V(extraction), V(adopted) or V(damaged)), C(files), C(bytes), C(records), C(tokens),
      C(oldest), C(newest) (seconds since the epoch), C(age) (seconds) and C(running).
  returned: always
  type: list
  elements: dict
removed:
  description: Paths that were deleted, or would be in check mode.
  returned: always
  type: list
  elements: str
freed:
  description: Bytes that were freed, or would be in check mode.
  returned: always
  type: int
candidates:
  description: What was found in the directories of O(adopt).
  returned: always
  type: list
  elements: dict
"""

import re
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest
from ansible_collections.hidden_state.bridge.plugins.module_utils import run_directories as rd

RUN_NAME = re.compile(r"[0-9a-f]{12}")


def readable_marker(path):
    """The marker in a directory, of the kind `damaged` where it cannot be read."""
    try:
        return rd.marker_of(path) or {"kind": "damaged"}
    except hs_manifest.ManifestError:
        return {"kind": "damaged"}


def resolve(name, paths):
    """Paths of the runs of that name. Raises RunError."""
    if not RUN_NAME.fullmatch(name):
        return [rd.checked_path(name)]
    found = [path for path in paths if readable_marker(path).get("run") == name]
    if not found:
        raise rd.RunError("no run %s is here; name one of the list" % name)
    return found


def to_remove(names, paths, kept):
    """The directories to delete, every one checked. Raises RunError with all that is refused."""
    chosen, refused = [], []
    for name in names:
        try:
            for path in resolve(name, paths):
                rd.check_removable(path, rd.marker_of(path), kept)
                chosen.append(path)
        except (rd.RunError, hs_manifest.ManifestError) as error:
            refused.append(str(error))
    if refused:
        raise rd.RunError("nothing was deleted: %s" % "; ".join(refused))
    return sorted(set(chosen))


def run(module):
    """What this module returns."""
    params, kept = module.params, module.params["keep"]
    now = time.time()
    candidates = [rd.check_adoptable(rd.checked_path(path), kept) for path in params["adopt"]]
    adopting = [item["path"] for item in candidates if params["confirmed"] and not item["adopted"]]
    paths = rd.find(params["roots"])
    chosen = to_remove(params["remove"], paths, kept)
    freed = sum(rd.measure(path)["bytes"] for path in chosen)
    if not module.check_mode:
        for path in adopting:
            rd.adopt(path)
        for path in chosen:
            rd.remove(path)
    runs = []
    for path in sorted(set(paths) | set(adopting) | set(chosen)):
        # What is only going to be marked or is deleted has no marker.
        if rd.has_marker(path):
            found = rd.describe(path, readable_marker(path))
            found["age"] = int(now - (found["newest"] or now))
            runs.append(found)
    return {"changed": bool(chosen or adopting), "runs": runs, "removed": chosen, "freed": freed, "candidates": candidates}


def main():
    module = AnsibleModule(
        argument_spec={
            "roots": {"type": "list", "elements": "path", "required": True},
            "remove": {"type": "list", "elements": "str", "default": []},
            "adopt": {"type": "list", "elements": "str", "default": []},
            "confirmed": {"type": "bool", "default": False},
            "keep": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(**run(module))
    except OSError as error:
        module.fail_json(msg="%s; see to the file system and the permissions there, then run this again" % error)
    except (rd.RunError, hs_manifest.ManifestError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
