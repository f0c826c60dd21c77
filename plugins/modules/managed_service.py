#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: managed_service
short_description: Bring one service of a service manager or container engine to a state, judged by its running process
version_added: 0.1.0
description:
  - Starts, restarts or stops a service whose unit or program file already lies on the host.
  - Whether a running service is restarted depends on what its process was started with (a hash in its environment)
    and when, never on what a task changed.
  - A systemd unit that the collection did not write is left alone unless O(foreign) says that it is meant.
  - A stop ends with proof that the processes and the port are gone.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: Reports what would be done, and does nothing.
    support: full
  diff_mode:
    description: Shows the state before and after.
    support: full
options:
  name:
    description: Name of the service, without C(.service).
    type: str
    required: true
  state:
    description:
      - V(query) only looks; V(started), V(restarted) and V(stopped) act.
      - V(unclaimed) fails where a systemd unit of that name exists that the collection did not write.
      - V(reloaded) makes the manager take notice of files that were changed or removed; the service must not be running.
      - V(rejoined) starts the systemd units again that earlier stops of the service took down along with it, as C(PartOf=), C(BindsTo=)
        and C(Requires=) do.
    type: str
    choices: [query, unclaimed, started, restarted, stopped, reloaded, rejoined]
    default: query
  manager:
    description: Service manager; V(auto) is systemd where systemd runs the host, supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor, podman, docker]
    default: auto
  foreign:
    description: Whether unit or container are the operator's; without it such a unit is refused for every state that acts.
    type: bool
    default: false
  state_dir:
    description: Directory of the collection's state on the host; supervisord's socket lies under it.
    type: path
    default: /var/lib/hidden_state_bridge
  tag:
    description:
      - Hash of everything the unit says; a process that carries another one is restarted.
      - Empty for a service of the operator's without a layer of ours; a process that carries a hash is restarted then.
    type: str
    default: ''
  launch:
    description: File on the host that says with which arguments and environment the process has to run, in the place of O(tag).
    type: path
  container_command:
    description: File on the host that holds the command of the capture container. Without it the operator's own container is started.
    type: path
  command:
    description: Arguments the process is meant to have; only to say in what a running process differs.
    type: list
    elements: str
    default: []
  newer_than:
    description: A process started before one of these files was written is restarted.
    type: list
    elements: path
    default: []
  host:
    description: Address of O(port).
    type: str
    default: ''
  port:
    description: TCP port that the service listens on; it has to be free before a start and after a stop. 0 for none.
    type: int
    default: 0
  port_timeout:
    description: Seconds that another process is given to leave O(port) before a start is refused.
    type: int
    default: 0
  enabled:
    description: Whether the service starts with the host (systemd only). Left as it is when not given.
    type: bool
  timeout:
    description:
      - Seconds after which a start that has brought up no process is a failure.
      - A unit that tells when it is ready (C(Type=notify), C(ExecStartPost)) counts as started before that.
    type: int
    default: 180
  stop_timeout:
    description: Seconds between SIGTERM and SIGKILL, whatever longer time the unit grants itself.
    type: int
    default: 120
  supervisord:
    description: Command that starts supervisord, for a start where none is running.
    type: list
    elements: str
    default: []
  visible_gpus:
    description: Value of C(CUDA_VISIBLE_DEVICES) of the service; not given means all GPUs.
    type: str
  secrets:
    description: Words that are blotted out of everything this module returns.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Start the server, or restart one that runs with other settings
  hidden_state.bridge.managed_service:
    name: sglang
    state: started
    tag: 5bd1cf
    port: 30000
"""

RETURN = r"""
action:
  description: What was done, or would be in check mode (none, start, restart, stop).
  returned: always
  type: str
reasons:
  description: Why the running process has to be restarted.
  returned: always
  type: list
  elements: str
service:
  description:
    - State afterwards; V(state) (running, starting, stopping, stopped, failed, absent), V(pid), V(since) (seconds since
      the epoch), V(argv), V(manager), V(processes) and V(detail).
  returned: always
  type: dict
port_holders:
  description: Processes that listen on O(port) without belonging to the service.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.service_worker import Worker


def main():
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {
                "type": "str",
                "choices": ["query", "unclaimed", "started", "restarted", "stopped", "reloaded", "rejoined"],
                "default": "query",
            },
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor", "podman", "docker"], "default": "auto"},
            "foreign": {"type": "bool", "default": False},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "tag": {"type": "str", "default": ""},
            "launch": {"type": "path"},
            "container_command": {"type": "path"},
            "command": {"type": "list", "elements": "str", "default": []},
            "newer_than": {"type": "list", "elements": "path", "default": []},
            "host": {"type": "str", "default": ""},
            "port": {"type": "int", "default": 0},
            "port_timeout": {"type": "int", "default": 0},
            "enabled": {"type": "bool"},
            "timeout": {"type": "int", "default": 180},
            "stop_timeout": {"type": "int", "default": 120},
            "supervisord": {"type": "list", "elements": "str", "default": []},
            "visible_gpus": {"type": "str"},
            "secrets": {"type": "list", "elements": "str", "default": [], "no_log": True},
        },
        supports_check_mode=True,
    )
    try:
        worker = Worker(module)
    except (sq.ServiceError, pr.RecordError) as error:
        module.fail_json(msg=str(error))
    try:
        worker.run()
    except (sq.ServiceError, pr.RecordError, OSError) as error:
        # With what was begun, so that a caller knows what to take back.
        module.fail_json(msg="%s: %s" % (module.params["name"], error), **worker.result)


if __name__ == "__main__":
    main()
