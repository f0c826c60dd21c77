# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file whose time says until when a host counts as looked on by a play (see server_return.py).

PRIVATE to the collection.
"""

from __future__ import annotations

import os
import time


def attend(path, seconds=0, lower=True):
    """Set the time of the file to ``seconds`` from this moment, where it is there; without ``lower`` never to an earlier one."""
    until = time.time() + seconds
    try:
        if lower or os.stat(path).st_mtime < until:
            os.utime(path, (until, until))
    except (FileNotFoundError, PermissionError):
        # No return by itself was ordered, or a user looks on who has no say in it.
        return
