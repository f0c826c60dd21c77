#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: extraction_info
short_description: Tell how far an extraction of hidden states is
description:
  - Reads the manifest, the files, the lock and the status of one host's output directory.
  - A record counts as done when the manifest has a valid line for it and its file has the size of that line.
  - The extractor counts as alive when it holds the lock of the directory.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: The module changes nothing, and in check mode leaves O(attended) alone.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  output_dir:
    description: The host's own directory below the extraction's output directory.
    type: path
    required: true
  run:
    description: The run that is asked for. Another run in the directory is reported as RV(conflict).
    type: str
  identity:
    description:
      - The identity of the run that is asked for, from which its name is computed. Sets RV(run) even where nothing is there.
      - With another identity in the directory RV(conflict) shows both.
    type: dict
  format:
    description: The formats that are asked for. Files of others in the directory are reported as RV(conflict).
    type: list
    elements: str
  config:
    description: The extractor's configuration file. With it, RV(share) and RV(outdated) say what an extractor that lives works on.
    type: path
  dump_dir:
    description: The directory where the server's capture leaves dumps. With it, RV(capture) says what the capture counted.
    type: path
  attended:
    description:
      - File of the server's return by itself, where there is one. It is set to say that a play looks on, which holds that return off.
      - An extractor that is at work needs no more than that; O(attended_for) counts once it has ended.
    type: path
  attended_for:
    description: Seconds for which the host counts as looked on after a look at an extraction that has ended.
    type: int
    default: 0
  manager:
    description: The service manager of the extractor. Used with O(name).
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
  name:
    description:
      - Name of the extractor's service. With it, a service that is up and has not taken the lock is V(starting)
        and one that failed before it could write its status is V(failed).
    type: str
  state_dir:
    description: Where the bridge keeps its state on the host. Only supervisor needs it.
    type: path
    default: /var/lib/hidden_state_bridge
"""

EXAMPLES = r"""
- name: See how far the extraction is
  hidden_state.bridge.extraction_info:
    output_dir: /data/states/{{ inventory_hostname }}
  register: extraction

- name: Show it
  ansible.builtin.debug:
    msg: "{{ extraction.line }}"
"""

RETURN = r"""
state:
  description:
    - V(absent) when nothing was extracted there, V(starting) and V(running) while the extractor lives,
      V(dead) when it ended without saying so, else what it ended with. V(incomplete) is all done but for RV(failures).
    - V(failed) with RV(conflict) set when the directory holds another run.
  returned: always
  type: str
  sample: running
line:
  description: One line of progress.
  returned: always
  type: str
  sample: "1,204/37,312 records (3.2 %) · 2.8 M/87.8 M tokens · 18.4 k tok/s · ETA 1 h 17 m · 3.1 TB free"
message:
  description: Why it failed or is dead and what to do. Empty else.
  returned: always
  type: str
conflict:
  description: Says that the directory holds another run than the one asked for. Empty else.
  returned: always
  type: str
run:
  description: Name of the run that was asked for, else of the one in the directory. Empty where there is none.
  returned: always
  type: str
identity:
  description: Data set, weights, layers, norm and dtype of the run in the directory.
  returned: always
  type: dict
provenance:
  description: Host, releases and arguments that the run was last started with.
  returned: always
  type: dict
done:
  description: Records that are done, as ranges.
  returned: always
  type: str
  sample: 0-5,7,9-12
records_done:
  description: Number of records that are done.
  returned: always
  type: int
tokens_done:
  description: Their tokens.
  returned: always
  type: int
bytes:
  description: Size of their files.
  returned: always
  type: int
sources:
  description: RV(ignore:records), RV(ignore:tokens) and RV(ignore:bytes) that are done, for each source of the data set.
  returned: always
  type: dict
lengths:
  description: Records that are done by their length, as pairs of the most tokens of a bin, a power of two, and records.
  returned: always
  type: list
  elements: list
  sample: [[128, 3], [256, 5]]
pace:
  description:
    - Tokens that were done over time. RV(ignore:seconds) is the width of a bin, RV(ignore:tokens) holds pairs of its start
      in seconds since 1970 and tokens, without the bins of none.
  returned: always
  type: dict
  sample: {"seconds": 60, "tokens": [[1769860800, 1104000]]}
failures:
  description:
    - Records that failed by themselves in the last start, each with C(record) and C(reason), once it has ended with C(source) and C(line) too.
  returned: always
  type: list
  elements: dict
status:
  description: What the extractor wrote last, as it is.
  returned: always
  type: dict
service:
  description: State of the service as its manager has it. V(unknown) without O(name).
  returned: always
  type: str
share:
  description: Records that the living extractor was given, as ranges. Empty where none lives.
  returned: with O(config)
  type: str
  sample: 0-5,7,9-12
outdated:
  description: Whether the living extractor was started before its configuration, or a file that this names, was last written.
  returned: with O(config)
  type: bool
capture:
  description: Requests, tokens, bytes, waits and drops of the capture in the server since its start. Empty where none has reported.
  returned: with O(dump_dir)
  type: dict
capture_line:
  description: RV(capture) in one line.
  returned: with O(dump_dir)
  type: str
  sample: "1,204 requests \xb7 2.8 M tokens \xb7 161 GB written, 1.1 GB/s \xb7 12.3 GB waiting \xb7 0 waits for memory (0 s) \xb7 0 given up"
"""

import calendar
import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest, hs_progress, service_query
from ansible_collections.hidden_state.bridge.plugins.module_utils.attended import attend
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.counters import read_counters

SECRET_FILES = ("api_key_file", "notify_url_file")


def main():
    module = AnsibleModule(
        argument_spec={
            "output_dir": {"type": "path", "required": True},
            "run": {"type": "str"},
            "identity": {"type": "dict"},
            "format": {"type": "list", "elements": "str"},
            "config": {"type": "path"},
            "dump_dir": {"type": "path"},
            "attended": {"type": "path"},
            "attended_for": {"type": "int", "default": 0},
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor"], "default": "auto"},
            "name": {"type": "str"},
            "state_dir": {"type": "path", "default": "/var/lib/hidden_state_bridge"},
        },
        mutually_exclusive=[("run", "identity")],
        supports_check_mode=True,
    )
    path = module.params["output_dir"]
    identity = module.params["identity"]
    run = hs_manifest.run_of(identity) if identity else module.params["run"]
    service = "unknown"
    try:
        if module.params["name"]:
            asked = [module.params[key] for key in ("manager", "name", "state_dir")]
            service = service_query.query(*asked)["state"]
        found = hs_progress.observe(path, run, service, module.params["format"])
        if module.params["attended"] and not module.check_mode:
            # Before its extractor is at work a server may be held off for longer.
            lives = found["state"] in ("starting", "running")
            attend(module.params["attended"], 0 if lives else module.params["attended_for"], lower=lives)
    except service_query.ServiceError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg="%s: %s; see to the file system and the permissions there, then run this again" % (path, error))
    except hs_manifest.ManifestError as error:
        module.fail_json(msg="%s: %s" % (path, error))
    if found["conflict"] and identity and found["run"] != run:
        found["conflict"] = hs_manifest.other_identity(path, found["identity"], identity)
    found["run"] = run or found["run"]
    if module.params["config"]:
        found["share"], found["outdated"] = _work(module, found)
    if module.params["dump_dir"]:
        found["capture"] = read_counters(module.params["dump_dir"])
        found["capture_line"] = hs_progress.capture_line(found["capture"], time.time())
    module.exit_json(changed=False, service=service, **found)


def _work(module, found):
    """What a living extractor of this run was given, empty where there is none, and whether that is not what it was started with."""
    if found["state"] not in ("starting", "running"):
        return "", False
    try:
        config = hs_manifest.read_json(module.params["config"]) or {}
    except hs_manifest.ManifestError as error:
        module.fail_json(msg="%s; an extractor is at work by it: stop the service of the extractor, and run this again" % error)
    share = config.get("share", "") if config.get("run") == found["run"] else ""
    return share, _written_since(found["status"].get("started_at"), [module.params["config"]] + [config.get(key) for key in SECRET_FILES])


def _written_since(moment, paths):
    """Whether one of the files was written after that moment (utc_now); True where the moment is not known."""
    try:
        # To the second, and a configuration is written before the start that reads it.
        start = calendar.timegm(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ")) + 1
        return any(os.stat(path).st_mtime >= start for path in paths if path)
    except (OSError, TypeError, ValueError):
        return True


if __name__ == "__main__":
    main()
