# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Short commands of the host: service managers, container engines.

PRIVATE to the collection.
"""

from __future__ import annotations

import subprocess


class ServiceError(Exception):
    """A service manager or container engine cannot be asked, or did not do what it was told."""


class NoCommand(ServiceError):
    """This host has no such program."""


def run(argv, timeout=60, environment=None):
    """(return code, standard output, standard error) of a short command; ServiceError where it cannot run, NoCommand where it is not there."""
    try:
        done = subprocess.run(argv, capture_output=True, timeout=timeout, check=False, env=environment)
    except FileNotFoundError as error:
        raise NoCommand("%s: %s" % (" ".join(argv[:4]), error)) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError("%s: %s" % (" ".join(argv[:4]), error)) from error
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
