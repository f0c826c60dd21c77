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
  - Finds who runs the server, reads the release from the server's interpreter without importing SGLang, the model's shape from its
    config, the state of the service from its manager and its process, and asks C(/health).
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
    description: Interpreter that runs SGLang. Without it that of a server that was found.
    type: path
  pythonpath:
    description: Value of C(PYTHONPATH) with which O(python) finds SGLang.
    type: str
    default: ''
  model:
    description: Directory of the model. Without it that of a server that was found, else nothing is said about the model.
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
    description:
      - V(systemd) and V(supervisor) for a service made from the inventory, V(unit) for a systemd unit of the operator's, V(process) for a
        server started by hand, V(podman) and V(docker) for a container.
      - V(auto) finds out by the port, by what was recorded, and by the name; else it is systemd where systemd runs the host, supervisor
        elsewhere.
    type: str
    choices: [auto, systemd, supervisor, unit, process, podman, docker]
    default: auto
  name:
    description: Name of the server's service.
    type: str
    default: sglang
  state_dir:
    description: Directory of the collection's state on the host.
    type: path
    default: /var/lib/hidden_state_bridge
  user:
    description: User that a service made from the inventory runs as.
    type: str
    default: root
  api_key:
    description: API key of the server.
    type: str
    default: ''
  visible_gpus:
    description: Value of C(CUDA_VISIBLE_DEVICES) of a service made from the inventory; empty for all GPUs. That of a found server is read from it.
    type: str
    default: ''
  arguments:
    description: Arguments of the operator's, for a service made from the inventory; those of a found server are read from it.
    type: list
    elements: str
    default: []
  extra_arguments:
    description: Arguments of the operator's for capture mode only.
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
  description: Interpreter that runs SGLang.
  returned: always
  type: str
manager:
  description: Who runs the server, of the choices of O(manager).
  returned: always
  type: str
found:
  description: Whether the server was found, and is not a service made from the inventory.
  returned: always
  type: bool
package:
  description: Directory of SGLang where it runs; in a container, the one inside.
  returned: always
  type: str
model_path:
  description: Directory of the model on the host.
  returned: always
  type: str
patched:
  description: Whether a model source of the server's SGLang holds the patch; any of them, as RV(runtime_file) is there with it.
  returned: always
  type: bool
user:
  description: User of the server, V(uid), V(gid), V(name), and V(ipc_at_risk), why its files in C(/dev/shm) can vanish.
  returned: always
  type: dict
memory:
  description: Memory limit of a running server's control group and what is used of it, V(limit) and V(used), in bytes.
  returned: when there is a limit
  type: dict
models_dir:
  description: Directory of SGLang's model files.
  returned: always
  type: str
model_file:
  description: The file that the patch is for.
  returned: always
  type: str
runtime_file:
  description: A file of the capture runtime that is written anew whenever another one of it is. It is there while a model is patched.
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
attention_backend:
  description: Attention backend that the server's arguments choose for prefill. Empty where they leave it to SGLang.
  returned: always
  type: str
gpu_architecture:
  description: Compute capability of the host's GPUs. Empty where there are none of NVIDIA.
  returned: always
  type: str
  sample: '9.0'
config_file:
  description: Whether this release reads arguments from a file (C(--config)).
  returned: always
  type: bool
capture_keeps:
  description: The operator's arguments without those that capture takes away.
  returned: when RV(found) is false
  type: list
  elements: str
capture_differences:
  description: How a capture server differs, a line each, with its reason.
  returned: always
  type: list
  elements: str
contradictions:
  description: What in the operator's arguments capture cannot work with, each with its remedy.
  returned: always
  type: list
  elements: str
service:
  description:
    - V(state) (running, starting, stopping, stopped, failed, absent), V(pid), V(since) (seconds since the epoch),
      V(argv), V(environment) (only the variables SGLANG_HS_*), V(mode) (serving, capture, unknown), V(manager), V(uptime) (seconds).
  returned: always
  type: dict
health:
  description: V(ok), V(starting) (an answer that is not 200) or V(down).
  returned: always
  type: str
key_found:
  description: Whether O(api_key) is empty and the running server has a key on its command line, with which it is asked then.
  returned: always
  type: bool
key_refused:
  description: Whether a running server that was found does not take the API key.
  returned: always
  type: bool
before:
  description: State (serving, stopped, absent) that the server was recorded to have before it was first changed.
  returned: always
  type: str
returns:
  description: One line on whether, when and how the host brings its server back by itself. Empty where there is nothing to say of it.
  returned: always
  type: str
  sample: returned to serving by itself at 2026-01-31T05:12:40Z
port_holders:
  description: Processes that listen on the port without belonging to the service.
  returned: always
  type: list
  elements: dict
visible_gpus:
  description: Value of C(CUDA_VISIBLE_DEVICES) with which the server runs, or ran. Empty for all GPUs.
  returned: always
  type: str
gpu_orphans:
  description: Workers on the server's GPUs (V(pid), V(gpu), V(command)) whose own server is gone. Not looked for while the server captures.
  returned: always
  type: list
  elements: dict
unit_others:
  description: Processes (V(pid), V(command)) that a stop of the operator's unit would end beside the server. Not looked for while the server captures.
  returned: always
  type: list
  elements: dict
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_ports as cp
from ansible_collections.hidden_state.bridge.plugins.module_utils import gpu_processes as gpus
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_limits as limits
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_tokenizer, server_return
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_place as place_of
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_flags as sf
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_release as sr
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_capture.layers import default_layers
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import api_key_of

SHOWN_PREFIX = "SGLANG_HS_"
# As hs_patcher writes them.
PATCH_MARK = b"# hidden_state.bridge begin "
RUNTIME_MARK = os.path.join("hs_capture", ".hidden_state_bridge")


def service_facts(seen):
    """What may be shown of a service, and its mode."""
    environment = seen["environment"]
    mode = "unknown" if seen["pid"] is None or environment is None else "capture" if layer.captures(environment) else "serving"
    facts = {key: seen[key] for key in ("manager", "name", "state", "pid", "since", "detail")}
    facts["argv"] = hp.masked(seen["argv"])
    facts["environment"] = {key: value for key, value in (environment or {}).items() if key.startswith(SHOWN_PREFIX)}
    facts["mode"] = mode
    facts["uptime"] = round(time.time() - seen["since"]) if seen["since"] else None
    return facts


def is_patched(path):
    """Whether a model file holds the patch."""
    try:
        with open(path, "rb") as stream:
            return PATCH_MARK in stream.read()
    except OSError:
        return False


def visible_gpus(params, service, is_found):
    """CUDA_VISIBLE_DEVICES of the server, as its process has it where that is known; "" for all GPUs."""
    if not is_found:
        return params["visible_gpus"]
    environment = service["environment"]
    if environment is None:
        environment = (pr.read(found.record_path(params["state_dir"], params["name"])) or {}).get("environment") or {}
    return environment.get("CUDA_VISIBLE_DEVICES", "")


def gpu_orphans(visible, service):
    """Workers of a server that is gone on the GPUs that the server is to have."""
    return gpus.orphans_on(gpus.gpus_of({"CUDA_VISIBLE_DEVICES": visible} if visible else {}), service["processes"])


def gather(params):
    """Everything this module returns."""
    located = found.locate(params)
    service = found.service_of(located, params)
    is_found = located["manager"] in found.FOUND
    place = place_of.found_place(located, service, params) if is_found else place_of.own_place(params)
    arguments = place["arguments"] + params["extra_arguments"]
    release = place["release"]
    url = "http://%s:%d" % (params["host"], params["port"])
    key_of_its_own = api_key_of(service["pid"])
    key = params["api_key"] or key_of_its_own
    strangers = cp.strangers(params["port"], params["host"], service["processes"], located["manager"], located["service"])
    capturing = layer.captures(service["environment"])
    result = {
        "release": release,
        "python": place["python"],
        "package": place["package"],
        "models_dir": place["models"],
        "model_file": os.path.join(place["models"], "deepseek_v2.py"),
        "runtime_file": os.path.join(os.path.dirname(place["models"]), RUNTIME_MARK),
        "model_path": place["model"],
        "manager": located["manager"],
        "found": is_found,
        "capture_args": sf.capture_arguments(release),
        "capture_differences": [hp.masked_line(line) for line in sf.capture_differences(place["arguments"], release)],
        "attention_backend": sf.attention_backend(arguments),
        "gpu_architecture": gpus.architecture(),
        "config_file": sf.reads_config_file(release),
        "contradictions": sf.contradictions(arguments),
        "service": dict(service_facts(service), name=located["service"] or params["name"]),
        "health": probe.health(url, key)[0],
        "key_found": not params["api_key"] and bool(key_of_its_own),
        "key_refused": is_found and service["pid"] is not None and probe.refuses_key(url, key),
        "before": found.state_before(params["state_dir"], params["name"]),
        "port_holders": strangers,
        "returns": server_return.line(server_return.Return(params["state_dir"], params["name"]), capturing, time.time()),
    }
    result["visible_gpus"] = visible_gpus(params, service, is_found)
    result["gpu_orphans"] = [] if capturing else gpu_orphans(result["visible_gpus"], service)
    result["unit_others"] = [] if capturing else found.others_in_unit(located, service)
    result["patched"] = os.path.exists(result["runtime_file"]) or is_patched(result["model_file"])
    if not is_found:
        result["capture_keeps"] = sf.without_taken(params["arguments"])[0]
    result["user"] = limits.user_of(service["pid"]) if service["pid"] is not None else limits.user_named(params["user"])
    if service["pid"] is not None:
        memory = limits.memory_of(service["pid"])
        if memory:
            result["memory"] = memory
    if place["model"]:
        result["model"] = sr.model_facts(place["model"])
        result["model"]["tokenizer"] = hs_tokenizer.file_hashes(place["model"])
        try:
            result["model"]["default_layers"] = default_layers(result["model"]["num_hidden_layers"])
        except ValueError:
            result["model"]["default_layers"] = []
    return result


def main():
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "pythonpath": {"type": "str", "default": ""},
            "model": {"type": "path"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "default": 30000},
            "manager": {"type": "str", "choices": list(found.MANAGERS), "default": "auto"},
            "name": {"type": "str", "default": "sglang"},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "user": {"type": "str", "default": "root"},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "visible_gpus": {"type": "str", "default": ""},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "extra_arguments": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **gather(module.params))
    except (OSError, sr.ReleaseError, sq.ServiceError, pr.RecordError) as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
