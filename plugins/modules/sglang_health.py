#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: sglang_health
short_description: Probe once whether an SGLang server is ready
version_added: 0.1.0
description:
  - Looks at the process, then at C(/health), then makes one real request, and for a capture server reads back the
    server's own settings.
  - Meant to be polled by P(hidden_state.bridge.watch#module).
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
  url:
    description: Base URL of the server.
    type: str
    required: true
  name:
    description: Name of the server's service. Without it the process is not looked at.
    type: str
    default: ''
  manager:
    description: Service manager; V(auto) is systemd where systemd runs the host, supervisor elsewhere.
    type: str
    choices: [auto, systemd, supervisor, podman, docker]
    default: auto
  state_dir:
    description: Directory of the collection's state on the host.
    type: path
    default: /var/lib/hidden_state_bridge
  pid:
    description: Main process as it was started; another one means that this one died.
    type: int
  since:
    description: When that process was started, in seconds since the epoch; its log is looked for from there on.
    type: float
  api_key:
    description: API key of the server.
    type: str
    default: ''
  generate:
    description: Whether one real request is made.
    type: bool
    default: true
  capture:
    description: Whether settings that corrupt hidden states make the server unfit.
    type: bool
    default: false
  arguments:
    description: Arguments that the server was started with; the settings read back are judged against them.
    type: list
    elements: str
    default: []
  request_timeout:
    description: Seconds for each of the requests.
    type: int
    default: 60
"""

EXAMPLES = r"""
- name: Wait until the server is ready
  hidden_state.bridge.watch:
    module: hidden_state.bridge.sglang_health
    arguments:
      url: http://127.0.0.1:30000
      name: sglang
    until: [ready]
    fail_on: [failed]
    timeout: 2400
"""

RETURN = r"""
state:
  description: V(waiting), V(ready) or V(failed) (its process died, or its settings corrupt states).
  returned: always
  type: str
line:
  description: One line of progress.
  returned: always
  type: str
message:
  description: What is wrong and what to do, when V(failed).
  returned: always
  type: str
log_tail:
  description: Last lines of the log, when V(failed).
  returned: always
  type: list
  elements: str
server:
  description: The server's own settings, single fields of C(/server_info) that hold no secret.
  returned: when ready
  type: dict
problems:
  description: Settings that corrupt hidden states, each with its remedy.
  returned: when O(capture)
  type: list
  elements: str
"""

import urllib.parse

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_ports as cp
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_flags as sf
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_probe as probe
from ansible_collections.hidden_state.bridge.plugins.module_utils.server_process import api_key_of


def failed(params, why):
    """The result for a server that will not come up: why, a hint, and what it said last."""
    # A manager may already have started it again: asked for is the end of the process that was waited for.
    where = (params["manager"], params["name"], params["state_dir"])
    tail = sq.log_tail(*where, pid=params["pid"], since=params["since"]) if params["name"] else []
    tail = probe.telling(tail)
    hint = probe.hint(tail)
    message = why + (". Hint: " + hint if hint else "")
    line = why + (": " + hint if hint else "")
    return {"state": "failed", "line": line, "message": message, "log_tail": tail, "problems": []}


def waiting(line):
    return {"state": "waiting", "line": line, "message": "", "log_tail": [], "problems": []}


def process_end(params):
    """Why the process that is waited for is no more; "" while it lives, or where no service is named."""
    if not params["name"]:
        return ""
    service = sq.query(params["manager"], params["name"], params["state_dir"])
    wanted = params["pid"]
    if wanted and hp.is_alive(wanted) and service["pid"] == wanted:
        return ""
    if service["state"] in ("running", "starting") and not wanted:
        return ""
    detail = " (%s)" % service["detail"] if service["detail"] else ""
    if wanted and not hp.is_alive(wanted):
        return "the server's process %d died%s" % (wanted, detail)
    return "the server is %s%s" % (service["state"], detail)


def usurper(params):
    """A message where another process than the service's listens on its port, so that answers would be of another server; else ""."""
    url = urllib.parse.urlsplit(params["url"])
    port = url.port
    if not params["name"] or not params["pid"] or not port:
        return ""
    for holder in cp.strangers(port, url.hostname, hp.family_of(params["pid"]), params["manager"], params["name"]):
        if holder["pid"] is not None:
            return "port %d is held by process %s (%s), not by this server. End that process" % (port, holder["pid"], holder["command"])
    return ""


def look(params):
    """One probe."""
    ended = process_end(params)
    if ended:
        return failed(params, ended)
    url, limit = params["url"], params["request_timeout"]
    key = params["api_key"] or api_key_of(params["pid"])
    taken = usurper(params)
    if taken:
        return failed(params, taken)
    health, detail = probe.health(url, key, limit)
    if health == "down":
        return waiting("loading, no answer yet")
    if health == "starting":
        return waiting("warming up, /health answers %s" % detail)
    try:
        trouble = probe.generate_once(url, key, limit) if params["generate"] else ""
        if trouble:
            return waiting("/health is 200, but %s" % trouble)
        facts = sf.server_facts(probe.server_info(url, key, limit))
    except probe.Refused as error:
        return failed(params, str(error))
    except (probe.Unreachable, ValueError) as error:
        return waiting("/health is 200, but its settings cannot be read: %s" % error)
    problems = sf.capture_problems(facts, params["arguments"]) if params["capture"] else []
    result = {"state": "ready", "line": "ready", "message": "", "log_tail": []}
    if problems:
        result["state"] = "failed"
        result["line"] = "%d setting(s) of the server corrupt hidden states" % len(problems)
        result["message"] = "%s:\n%s" % (result["line"], "\n".join(problems))
    return dict(result, problems=problems, server=facts)


def main():
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "name": {"type": "str", "default": ""},
            "manager": {"type": "str", "choices": ["auto", "systemd", "supervisor", "podman", "docker"], "default": "auto"},
            "state_dir": {"type": "path", "default": sq.DEFAULT_STATE_DIR},
            "pid": {"type": "int"},
            "since": {"type": "float"},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "generate": {"type": "bool", "default": True},
            "capture": {"type": "bool", "default": False},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "request_timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **look(module.params))
    except sq.ServiceError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
