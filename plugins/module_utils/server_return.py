# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host keeps so that it can bring its server back by itself, and what it says of that.

PRIVATE to the collection. In STATE_DIR/server/NAME, which nobody but the connecting user enters, lie

- ``unattended.json``: the order, while a return by itself is asked for. A play takes it away once it has brought the server back.
- ``attended``: its time of change is when a play last looked on. A play that changes the server sets it ahead, past its own end.
- ``unattended.lock``: whoever changes the server or the two above holds it, the play for an instant, return_service while it stops and
  starts the server.
- ``returned.json``: what return_service has done.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils.attended import attend
from ansible_collections.hidden_state.bridge.plugins.module_utils.hs_progress import duration

ORDER, ATTENDED, LOCK, JOURNAL = "unattended.json", "attended", "unattended.lock", "returned.json"


class ReturnError(Exception):
    """A server cannot be brought back, or its return not be held off; the message says why."""


class Taken(ReturnError):
    """Another process holds the lock."""


class Return:
    """The files of one server's return by itself. ``name`` is the server's in the inventory."""

    def __init__(self, state_dir, name):
        self.state_dir, self.name = state_dir, name
        self.home = os.path.join(state_dir, "server", name)
        # The service that brings the server back, one a server.
        self.service = "hidden-state-return-" + name

    def _path(self, name):
        return os.path.join(self.home, name)

    def order(self):
        """The order, as the module server_return wrote it; None without one."""
        return pr.read(self._path(ORDER))

    def journal(self):
        """What was done by itself: ``state`` (returning, started, returned, left, failed), ``to``, ``at``, ``since``, ``why``; {} for nothing."""
        return pr.read(self._path(JOURNAL)) or {}

    def note(self, state, why="", to="serving"):
        """Write down what was done. ``since``, in seconds since the epoch, is when it came to that state."""
        pr.write(self._path(JOURNAL), {"state": state, "to": to, "why": why, "at": hs_manifest.utc_now(), "since": time.time()})
        hs_manifest.fsync_directory(self.home)

    def give(self, order):
        """Ask for a return, or for another one; returns whether that is a change. What an earlier one has done is forgotten."""
        changed = pr.write(self._path(ORDER), order)
        if changed:
            self._remove(JOURNAL)
        with open(self._path(ATTENDED), "a", encoding="ascii"):
            os.chmod(self._path(ATTENDED), 0o600)
        self.attend()
        return changed

    def drop(self):
        """Ask for none any more; returns whether one was asked for."""
        there = self._remove(ORDER)
        return self._remove(ATTENDED) or there

    def _remove(self, name):
        try:
            os.unlink(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def attended(self):
        """Until when the host counts as looked on, in seconds since the epoch; 0 where nobody ever did."""
        try:
            return os.stat(self._path(ATTENDED)).st_mtime
        except FileNotFoundError:
            return 0.0

    def attend(self, seconds=0):
        """Count as looked on for that long from this moment."""
        attend(self._path(ATTENDED), seconds)

    @contextlib.contextmanager
    def lock(self, patience=0.0):
        """Hold the lock; Taken where another process still has it after ``patience`` seconds."""
        handle = os.open(self._path(LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            deadline = time.monotonic() + patience
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        raise
                if time.monotonic() >= deadline:
                    raise Taken(
                        "%s is being brought back by the host itself (service %s), for more than %d s. See its log, or stop that service,"
                        " and run this again" % (self.name, self.service, patience)
                    )
                time.sleep(0.1)
            yield
        finally:
            os.close(handle)


def layer_files(manager, service, state_dir):
    """What makes a service capture, and is taken away for its return."""
    if manager == "systemd":
        return list(layer.unit_files(service))
    return [
        os.path.join(state_dir, "supervisor", "layers", service + ".conf"),
        os.path.join(state_dir, "services", service, "run-layer"),
    ]


def own_files(manager, service, state_dir):
    """What makes a service of ours be there at all, its directory last."""
    units = ["/etc/systemd/system", layer.UNITS_DIR]
    if manager == "systemd":
        files = [os.path.join(directory, service + ".service") for directory in units]
    else:
        files = [os.path.join(state_dir, "supervisor", "programs", service + ".conf")]
    return files + [os.path.join(state_dir, "services", service)]


def line(returning, capturing, now):
    """One line on whether, when and how the host brings its server back by itself; "" where there is nothing to say of it."""
    done, order = returning.journal(), returning.order()
    if done:
        return _DONE[done["state"]].format(**done)
    if not order:
        return "returns by a play alone (extract.yml or serve.yml)" if capturing else ""
    service = sq.query(order["manager"], returning.service, returning.state_dir)["state"]
    if service not in ("running", "starting") and not capturing:
        # A reboot took both away.
        return ""
    if service not in ("running", "starting"):
        return "should return by itself, but its service %s is %s: run extract.yml, or serve.yml to give up" % (returning.service, service)
    ahead = returning.attended() - now
    seen = "a play is changing the server" if ahead > 0 else "a play looked on %s ago" % duration(-ahead)
    return "returns by itself once the extraction has ended and no play has looked on for %s (%s)" % (duration(order["after"]), seen)


_DONE = {
    "returning": "returning to {to} by itself since {at}",
    "started": "started in serving mode by itself at {at}, and loading",
    "returned": "returned to {to} by itself at {at}{why}",
    "left": "not returned by itself at {at}: {why}",
    "failed": "could not return to {to} by itself at {at}: {why}. Run serve.yml",
}
