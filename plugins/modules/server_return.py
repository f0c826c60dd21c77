#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_return
short_description: Order, hold off or call off that a host brings its server back by itself
version_added: 0.1.0
description:
  - A host with such an order brings its server back to the state before the run once the extraction has ended and no play has looked on
    for a while. A service on the host does so.
  - The order lies beside the record of the state before. It is only read and written under a lock that the service holds while it acts.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Reports what would be done, and does nothing.
    support: full
  diff_mode:
    description: Shows nothing, as the order can hold an API key.
    support: none
options:
  name:
    description: Name of the server in the inventory.
    type: str
    required: true
  state:
    description:
      - V(armed) gives the order, V(dropped) calls it off.
      - V(held) has the host count as looked on for O(seconds), for a play that is about to change the server. Without an order it does nothing.
    type: str
    choices: [armed, held, dropped]
    required: true
  state_dir:
    description: Directory of the collection's state on the host.
    type: path
    default: /var/lib/hidden_state_bridge
  seconds:
    description: For how long the host counts as looked on from this moment.
    type: int
    default: 0
  patience:
    description: Seconds to wait for a host that is stopping or starting its server by itself at this moment.
    type: int
    default: 300
  order:
    description: What the host has to know. Used with V(armed).
    type: dict
    suboptions:
      manager:
        description: Service manager of the server.
        type: str
        choices: [auto, systemd, supervisor]
        default: auto
      service:
        description: Name that it has there.
        type: str
        required: true
      foreign:
        description: Whether its unit is the operator's own.
        type: bool
        default: false
      host:
        description: Address that the server listens on.
        type: str
        default: 127.0.0.1
      port:
        description: Port that the server listens on.
        type: int
        default: 30000
      port_timeout:
        description: Seconds that another process is given to leave the port.
        type: int
        default: 0
      stop_timeout:
        description: Seconds between SIGTERM and SIGKILL.
        type: int
        default: 120
      visible_gpus:
        description: Value of C(CUDA_VISIBLE_DEVICES) of the server; empty for all GPUs.
        type: str
        default: ''
      url:
        description: Base URL of the server.
        type: str
        required: true
      api_key:
        description: API key of the server; without one that of its command line is used.
        type: str
        default: ''
      health_timeout:
        description: Seconds until the server has to be ready.
        type: int
        default: 2400
      after_start:
        description: Whether a play has tasks to run once the server serves again. They wait for the next play.
        type: bool
        default: false
      after:
        description: Seconds without a look of a play after which the host is on its own.
        type: int
        required: true
      interval:
        description: Seconds between two looks of the host's own.
        type: float
        default: 10
      extraction:
        description: V(output_dir) of the host's extraction, and V(manager), V(name) and V(state_dir) of its service.
        type: dict
        required: true
        suboptions:
          output_dir:
            description: The host's own output directory.
            type: path
            required: true
          manager:
            description: Service manager of the extractor.
            type: str
            choices: [auto, systemd, supervisor]
            default: auto
          name:
            description: Name of the extractor's service.
            type: str
            required: true
          state_dir:
            description: Directory of the collection's state on the host.
            type: path
            required: true
"""

EXAMPLES = r"""
- name: Have the host do nothing by itself while the server is changed
  hidden_state.bridge.server_return:
    name: sglang
    state: held
    seconds: 3600
"""

RETURN = r"""
service:
  description: Name of the service that brings the server back.
  returned: always
  type: str
ordered:
  description: Whether there is an order afterwards.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_return as sr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

MANAGERS = ["auto", "systemd", "supervisor"]


def complete(order, state_dir):
    """The order with everything that is settled once: managers by their names, and the files that go."""
    manager = sq.resolve_manager(order["manager"])
    extraction = dict(order["extraction"], manager=sq.resolve_manager(order["extraction"]["manager"]))
    return dict(
        order,
        manager=manager,
        state_dir=state_dir,
        extraction=extraction,
        layer=sr.layer_files(manager, order["service"], state_dir),
        own=[] if order["foreign"] else sr.own_files(manager, order["service"], state_dir),
    )


def work(params, check_mode):
    """Everything that the module returns."""
    returning = sr.Return(params["state_dir"], params["name"])
    result = {"changed": False, "service": returning.service}
    state = params["state"]
    ordered = returning.order()
    if state != "armed" and ordered is None:
        return dict(result, ordered=False)
    order = complete(params["order"], params["state_dir"]) if state == "armed" else None
    if check_mode:
        return dict(result, changed=state == "dropped" or (state == "armed" and order != ordered), ordered=state != "dropped")
    with returning.lock(params["patience"]):
        if state == "armed":
            result["changed"] = returning.give(order)
        elif state == "dropped":
            result["changed"] = returning.drop()
        if state != "dropped":
            returning.attend(params["seconds"])
        return dict(result, ordered=returning.order() is not None)


def main():
    text = {"type": "str", "required": True}
    extraction = {
        "output_dir": {"type": "path", "required": True},
        "manager": {"type": "str", "choices": MANAGERS, "default": "auto"},
        "name": text,
        "state_dir": {"type": "path", "required": True},
    }
    order = {
        "manager": {"type": "str", "choices": MANAGERS, "default": "auto"},
        "service": text,
        "foreign": {"type": "bool", "default": False},
        "host": {"type": "str", "default": "127.0.0.1"},
        "port": {"type": "int", "default": 30000},
        "port_timeout": {"type": "int", "default": 0},
        "stop_timeout": {"type": "int", "default": 120},
        "visible_gpus": {"type": "str", "default": ""},
        "url": text,
        "api_key": {"type": "str", "default": "", "no_log": True},
        "health_timeout": {"type": "int", "default": 2400},
        "after_start": {"type": "bool", "default": False},
        "after": {"type": "int", "required": True},
        "interval": {"type": "float", "default": 10},
        "extraction": {"type": "dict", "required": True, "options": extraction},
    }
    module = AnsibleModule(
        argument_spec={
            "name": text,
            "state": {"type": "str", "choices": ["armed", "held", "dropped"], "required": True},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "seconds": {"type": "int", "default": 0},
            "patience": {"type": "int", "default": 300},
            "order": {"type": "dict", "options": order},
        },
        required_if=[("state", "armed", ["order"])],
        supports_check_mode=True,
    )
    try:
        module.exit_json(**work(module.params, module.check_mode))
    except (sr.ReturnError, sq.ServiceError, pr.RecordError, OSError) as error:
        module.fail_json(msg="%s: %s" % (module.params["name"], error))


if __name__ == "__main__":
    main()
