#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_info
short_description: Tell which SGLang a host has, what it serves and in which mode
version_added: 0.1.0
description:
  - Reads the release from the server's interpreter without importing SGLang, the model's shape from its config, the state
    of the service from its manager and its process, and asks C(/health).
  - Names the arguments and the environment with which a server of this release captures hidden states.
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
  python:
    description: Interpreter that runs SGLang.
    type: path
    required: true
  model:
    description: Directory of the model. Without it nothing is said about the model.
    type: path
  host:
    description: Address that the server listens on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server listens on.
    type: int
    default: 30000
  manager:
    description: Service manager; V(auto) is systemd where systemd runs the host, supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor]
    default: auto
  name:
    description: Name of the server's service.
    type: str
    default: sglang
  state_dir:
    description: Directory of the collection's state on the host.
    type: path
    default: /var/lib/hidden_state_bridge
  api_key:
    description: API key of the server.
    type: str
    default: ''
  arguments:
    description: Arguments of the operator's that RV(contradictions) is about.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Ask what the host has
  hidden_state.bridge.sglang_info:
    python: /opt/sglang/bin/python
    model: /models/Kimi-K2.5
  register: info
"""

RETURN = r"""
release:
  description: Release of SGLang.
  returned: always
  type: str
  sample: 0.5.20
python:
  description: Interpreter asked.
  returned: always
  type: str
models_dir:
  description: Directory of SGLang's model files.
  returned: always
  type: str
model_file:
  description: The file that the patch is for.
  returned: always
  type: str
model:
  description:
    - V(architecture), V(hidden_size), V(num_hidden_layers), V(vocab_size), V(dtype), V(fingerprint) of the weights,
      V(tokenizer) (hashes of the files that decide token ids) and V(default_layers) (empty for a model that is too small
      for the rule).
  returned: when O(model) is given
  type: dict
capture_args:
  description: Arguments that make a server of this release fit for capture.
  returned: always
  type: list
  elements: str
capture_environment:
  description: Environment that goes with RV(capture_args).
  returned: always
  type: dict
config_file:
  description: Whether this release reads arguments from a file (C(--config)).
  returned: always
  type: bool
contradictions:
  description: What in O(arguments) capture cannot work with, each with its remedy.
  returned: always
  type: list
  elements: str
service:
  description:
    - V(state) (running, starting, stopping, stopped, failed, absent), V(pid), V(since) (seconds since the epoch),
      V(argv), V(environment) (only the variables SGLANG_HS_*), V(mode) (serving, capture, unknown), V(manager).
  returned: always
  type: dict
health:
  description: V(ok), V(starting) (an answer that is not 200) or V(down).
  returned: always
  type: str
before:
  description: State (serving, stopped, absent) that the server was recorded to have before it was first changed.
  returned: always
  type: str
port_holders:
  description: Processes that listen on the port without belonging to the service.
  returned: always
  type: list
  elements: dict
"""

import json
import os

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_tokenizer
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_release as sr
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.layers import default_layers

SHOWN_PREFIX = "SGLANG_HS_"
GATE = "SGLANG_HS_DUMP_DIR"


def service_facts(found):
    """What may be shown of a service, and its mode."""
    environment = found["environment"]
    mode = "unknown" if found["pid"] is None or environment is None else "capture" if environment.get(GATE) else "serving"
    facts = {key: found[key] for key in ("manager", "name", "state", "pid", "since", "detail")}
    facts["argv"] = hp.masked(found["argv"])
    facts["environment"] = {key: value for key, value in (environment or {}).items() if key.startswith(SHOWN_PREFIX)}
    facts["mode"] = mode
    return facts


def state_before(params):
    """The state that the role sglang_server recorded, or None."""
    path = os.path.join(params["state_dir"], "server", params["name"], "before.json")
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)["state"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise sq.ServiceError("%s: cannot be read (%s). Remove it to forget the state before" % (path, error)) from error


def gather(params):
    """Everything this module returns."""
    place = sr.installation(params["python"])
    service = sq.query(params["manager"], params["name"], params["state_dir"])
    strangers = [holder for holder in hp.port_holders(params["port"], params["host"]) if holder["pid"] not in service["processes"]]
    result = {
        "release": place["release"],
        "python": params["python"],
        "models_dir": place["models"],
        "model_file": os.path.join(place["models"], "deepseek_v2.py"),
        "capture_args": sr.capture_arguments(place["release"]),
        "capture_environment": sr.capture_environment(place["release"]),
        "config_file": sr.reads_config_file(place["release"]),
        "contradictions": sr.contradictions(params["arguments"]),
        "service": service_facts(service),
        "health": probe.health("http://%s:%d" % (params["host"], params["port"]), params["api_key"])[0],
        "before": state_before(params),
        "port_holders": strangers,
    }
    if params["model"]:
        result["model"] = sr.model_facts(params["model"])
        result["model"]["tokenizer"] = hs_tokenizer.file_hashes(params["model"])
        try:
            result["model"]["default_layers"] = default_layers(result["model"]["num_hidden_layers"])
        except ValueError:
            result["model"]["default_layers"] = []
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "model": {"type": "path"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 30000},
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor"], "default": "auto"},
            "name": {"type": "str", "default": "sglang"},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "arguments": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **gather(module.params))
    except (OSError, sr.ReleaseError, sq.ServiceError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
