# SPDX-License-Identifier: GPL-3.0-or-later
"""The operator's host: its unit, and what that started before anything of ours."""

from __future__ import annotations

import os
import sys

import pytest

sys.path.append(os.path.join(os.environ["MOLECULE_PROJECT_DIRECTORY"], "tests"))

from container_host import ContainerHost

UNIT = "/etc/systemd/system/operators.service"
SCRIPT = "/usr/local/bin/operators-server"
DROPIN = "/run/systemd/system/operators.service.d/50-hidden-state-bridge.conf"


class OperatorsHost(ContainerHost):
    """``before`` is what the operator's unit started, and ``files`` the hashes of the files that are the operator's."""

    def __init__(self) -> None:
        super().__init__("hsb-server")
        self.host.check_output("systemctl enable --now operators")
        self.wait()
        self.before = self.started()
        self.files = {path: self.host.file(path).sha256sum for path in (UNIT, SCRIPT)}
        self.source = self.host.check_output("find / -xdev -path '*/sglang/srt/models/deepseek_v2.py' -print -quit")
        self.drive("restored")

    def is_as_before(self) -> None:
        """The operator's server answers, started as before, from the operator's own files, with nothing of ours on top."""
        self.wait()
        assert self.started() == self.before
        assert {path: self.host.file(path).sha256sum for path in self.files} == self.files
        assert not self.host.file(DROPIN).exists

    def is_patched(self) -> bool:
        return self.host.file(self.source).contains("hidden_state.bridge begin")


@pytest.fixture(scope="session")
def server():
    return OperatorsHost()
