# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be told to a service manager: one class each, with the same methods.

PRIVATE to the collection. ``start`` takes in the service's files as they lie there; ``take_notice`` does so for a
service that stays down, ``refresh`` for one that stays up. ``stop`` gets the identities of the service's processes.
``stopped_along`` are the other services that a stop took down too, which ``rejoin`` starts again, returning those that were down.
All raise ServiceError.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import time
import xmlrpc.client

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_dependents as dependents
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

_DAEMON_ENVIRONMENT = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TMPDIR", "XDG_RUNTIME_DIR")


class Systemd:
    """What is told to systemd. Nothing waits for its jobs: a unit that tells when it is ready starts for as long as its model loads."""

    # ExecStop, the processes themselves and ExecStopPost: each may need a SIGKILL of its own.
    KILLS, KILL_SECONDS = 3, 20.0

    def __init__(self, params):
        self.unit = sq.unit_name(params["name"])
        self.seconds = params["stop_timeout"]

    def _systemctl(self, verb, *options):
        argv = ["systemctl", verb, *options] + ([] if verb == "daemon-reload" else [self.unit])
        code, out, err = sq.run(argv)
        if code != 0:
            raise sq.ServiceError("%s: %s" % (" ".join(argv), (err or out).strip()))

    def start(self):
        self._systemctl("daemon-reload")
        # A unit that failed too often is refused a start until its counter is reset.
        sq.run(["systemctl", "reset-failed", self.unit])
        self._systemctl("start", "--no-block")

    def stop(self, _members):
        dependents.remember(self.unit)
        self._systemctl("stop", "--no-block")
        if self._is_down_within(self.seconds):
            return
        # The unit may grant itself more time.
        for _kill in range(self.KILLS):
            sq.run(["systemctl", "kill", "--signal=SIGKILL", self.unit])
            if self._is_down_within(self.KILL_SECONDS):
                return
        raise sq.ServiceError("%s does not stop, not even by SIGKILL: see systemctl status %s" % (self.unit, self.unit))

    def _is_down_within(self, seconds):
        deadline = time.monotonic() + seconds
        while sq.query("systemd", self.unit)["state"] not in ("stopped", "failed", "absent"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def take_notice(self):
        if sq.query("systemd", self.unit).get("reload_needed"):
            self._systemctl("daemon-reload")

    def refresh(self):
        self.take_notice()

    def stopped_along(self):
        return dependents.recorded(self.unit)

    def rejoin(self):
        return dependents.rejoin(self.unit)

    def is_enabled(self):
        return sq.run(["systemctl", "is-enabled", self.unit])[1].strip() == "enabled"

    def enable(self, wanted):
        self._systemctl("enable" if wanted else "disable")


class Supervisor:
    """What is told to supervisord."""

    START_SECONDS = 15.0
    ORPHAN_SECONDS = 5.0

    def __init__(self, params):
        self.name = params["name"]
        self.state_dir = params["state_dir"]
        self.patience = params["stop_timeout"] + 60
        self.daemon = params["supervisord"]

    def _ensure_daemon(self):
        if not self.daemon or sq.supervisor(self.state_dir) is not None:
            return
        # Services get what their units say, not what the operator's shell happened to hold.
        kept = {key: os.environ[key] for key in _DAEMON_ENVIRONMENT if key in os.environ}
        code, out, err = sq.run(self.daemon, environment=kept)
        if code != 0:
            raise sq.ServiceError("%s: %s" % (" ".join(self.daemon), (err or out).strip()))
        deadline = time.monotonic() + self.START_SECONDS
        while sq.supervisor(self.state_dir) is None:
            if time.monotonic() > deadline:
                raise sq.ServiceError("%s: does not answer" % sq.supervisor_socket(self.state_dir))
            time.sleep(0.1)

    def _call(self, method, *arguments, **options):
        proxy = sq.supervisor(self.state_dir, timeout=self.patience)
        if proxy is None:
            raise sq.ServiceError("%s: supervisord is not running" % sq.supervisor_socket(self.state_dir))
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except xmlrpc.client.Fault as fault:
            if any(word in fault.faultString for word in options.get("ignore", ())):
                return None
            raise sq.ServiceError("supervisord: %s %s: %s" % (method, self.name, fault.faultString)) from fault
        except (OSError, http.client.HTTPException, xmlrpc.client.Error) as error:
            raise sq.ServiceError("supervisord: %s %s: %s" % (method, self.name, error)) from error

    def _reread(self):
        """Take in the program's file as it lies there; the program must not be running."""
        self._call("reloadConfig")
        self._call("removeProcessGroup", self.name, ignore=("BAD_NAME",))

    def start(self):
        self._ensure_daemon()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(sq.pids_file(self.state_dir, self.name))
        self._reread()
        self._call("addProcessGroup", self.name)
        self._call("startProcess", self.name, False)

    def stop(self, members):
        if sq.supervisor(self.state_dir) is not None:
            self._call("stopProcess", self.name, True, ignore=("NOT_RUNNING", "BAD_NAME"))
        # supervisord kills a group only with its leader. A server that is told to stop while it loads leaves workers behind.
        for sign in (signal.SIGTERM, signal.SIGKILL):
            hp.tell(members, sign)
            if hp.wait_until_gone(members, self.ORPHAN_SECONDS):
                return

    def take_notice(self):
        if sq.supervisor(self.state_dir) is None:
            return
        ((added, changed, removed),) = self._call("reloadConfig")
        if self.name in changed + removed:
            self._call("removeProcessGroup", self.name, ignore=("BAD_NAME",))
        if self.name in added + changed:
            self._call("addProcessGroup", self.name)

    def refresh(self):
        """Nothing: supervisord takes a program in only while it does not run."""

    def stopped_along(self):
        return []

    rejoin = stopped_along

    def is_enabled(self):
        return None

    def enable(self, wanted):
        """supervisord is started by the role, so nothing starts with the host."""


class Container:
    """What is told to podman or docker about the operator's container and its capture container."""

    def __init__(self, engine, params):
        self.engine, self.name = engine, params["name"]
        self.capture = cq.capture_name(self.name)
        self.seconds = params["stop_timeout"]
        path = params["container_command"]
        self.command = pr.read(path)["command"] if path else []

    def _tell(self, *words):
        argv = [self.engine, *words]
        code, out, err = sq.run(argv, timeout=self.seconds + 120)
        if code != 0:
            raise sq.ServiceError("%s: %s" % (" ".join(argv[:3]), (err or out).strip()[-500:]))

    def _is_there(self, name):
        return cq.inspect(self.engine, name) is not None

    def start(self):
        """Run the capture container where there is a command for one; otherwise start the operator's."""
        if self._is_there(self.capture):
            self._tell("rm", "--force", self.capture)
        if self.command:
            self._tell(*self.command[1:])
        else:
            self._tell("start", self.name)

    def stop(self, _members):
        for name in (self.capture, self.name):
            if self._is_there(name):
                self._tell("stop", "-t", str(self.seconds), name)

    def take_notice(self):
        if self._is_there(self.capture) and cq.inspect(self.engine, self.capture)["State"].get("Status") != "running":
            self._tell("rm", "--force", self.capture)

    def refresh(self):
        """Nothing: a container is made anew for other settings."""

    def stopped_along(self):
        return []

    rejoin = stopped_along

    def is_enabled(self):
        return None

    def enable(self, wanted):
        """A restart policy of the operator's container stays as it is."""


def of(manager, params):
    """The controls of one service; ``params`` are those of the module managed_service."""
    if manager in cq.ENGINES:
        return Container(manager, params)
    return (Systemd if manager == "systemd" else Supervisor)(params)
