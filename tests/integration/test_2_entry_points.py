# SPDX-License-Identifier: GPL-3.0-or-later
"""The three ways to call the job: from the checkout, from inside playbooks/, and from the installed collection."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from conftest import BIN, ROOT, recap


def run(arguments, cwd, environment):
    done = subprocess.run(arguments, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout


def test_inside_playbooks_with_an_inventory_named_prod(site, tmp_path):
    shutil.copytree(ROOT, tmp_path / "checkout", symlinks=True, ignore=shutil.ignore_patterns(".cache", ".demo", ".venv", ".git", "*.ckpt"))
    playbooks = tmp_path / "checkout" / "playbooks"
    (playbooks / "prod").unlink()
    shutil.copy(site.inventory, playbooks / "prod")
    output = run([BIN / "ansible-playbook", "extract.yml", "-i", "prod"], playbooks, site.environment())
    assert recap(output)["changed"] == 0


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("installed")
    subprocess.run([BIN / "ansible-galaxy", "collection", "build", ROOT, "--output-path", directory], check=True)
    archive = next(directory.glob("hidden_state-bridge-*.tar.gz"))
    subprocess.run(
        [BIN / "ansible-galaxy", "collection", "install", archive, "-p", directory / "collections", "--offline", "--force"], check=True
    )
    return directory / "collections"


def test_as_an_installed_collection(site, installed, tmp_path):
    settings = tmp_path / "ansible.cfg"
    settings.touch()
    environment = {**site.environment(), "ANSIBLE_COLLECTIONS_PATH": str(installed), "ANSIBLE_CONFIG": str(settings)}
    output = run([BIN / "ansible-playbook", "hidden_state.bridge.extract", "-i", str(site.inventory)], tmp_path, environment)
    assert recap(output)["changed"] == 0
