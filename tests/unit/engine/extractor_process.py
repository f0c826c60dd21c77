# SPDX-License-Identifier: Apache-2.0
"""What runs in the process of an extractor under test."""

from __future__ import annotations

import os
import sys

import hidden_state_bridge.extract  # noqa: F401  (preloaded by the fork server)
from hidden_state_bridge.__main__ import main

# Records of the data set that a site has.
RECORDS = 40


def extract(config_file: str, log_file: str) -> None:
    """The command line `extract --config FILE` with its output in a file."""
    handle = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.exit(main(["extract", "--config", config_file]))
