# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with a message for people."""

from __future__ import annotations


class Refusal(Exception):
    """The command cannot do what was asked; the message names the thing and the remedy. Exit status 1."""

    exit_status = 1


class ConfigError(Refusal):
    """Starting again cannot help until somebody changes something. Exit status 2 (service managers do not restart on it)."""

    exit_status = 2
