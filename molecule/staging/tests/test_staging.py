# SPDX-License-Identifier: GPL-3.0-or-later
"""What every host holds at the end: the same set, whole, for its owner alone."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

ENGINE = os.environ.get("HSB_CONTAINER_ENGINE", "podman")
testinfra_hosts = [f"{ENGINE}://hsb-staging-{number}" for number in range(1, 9)]

PLACE = "/var/lib/hidden_state_bridge/datasets"
DATA = os.path.join(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "datasets")


@pytest.fixture(scope="module")
def original() -> str:
    """The set's directory on the controller."""
    (name,) = [name for name in os.listdir(DATA) if os.path.isfile(os.path.join(DATA, name, "meta.json"))]
    return os.path.join(DATA, name)


@pytest.mark.parametrize("directory", [PLACE, "/shared/hosts", "/shared/controller"])
def test_every_byte_is_the_controllers(host, original, directory):
    with open(os.path.join(original, "meta.json"), encoding="utf-8") as stream:
        names = sorted([*json.load(stream)["files"], "meta.json"])
    found = host.run(f"cd {directory}/{os.path.basename(original)} && sha256sum *")
    assert found.rc == 0, found.stderr
    expected = []
    for name in names:
        with open(os.path.join(original, name), "rb") as stream:
            expected.append(f"{hashlib.sha256(stream.read()).hexdigest()}  {name}")
    assert found.stdout.split("\n")[:-1] == expected


def test_it_is_for_its_owner_alone(host, original):
    directory = f"{PLACE}/{os.path.basename(original)}"
    assert (host.file(directory).mode, host.file(PLACE).mode) == (0o700, 0o700)
    modes = host.run(f"stat --format %a:%U {directory}/*").stdout.split()
    assert set(modes) == {"600:root"}
