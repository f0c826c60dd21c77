# SPDX-License-Identifier: GPL-3.0-or-later
"""What modules return has no key that Ansible takes for something else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
MODULES = sorted((PLUGINS / "modules").glob("*.py"))
# A list that is not empty, or a text, is true: the task fails, or counts as changed, whatever the module meant.
VERDICTS = {"changed", "failed", "skipped", "unreachable"}
# Set by Ansible itself, or acted upon.
RESERVED = {
    *("ansible_facts", "ansible_job_id", "ansible_loop_var", "attempts", "deprecations", "exception", "failed_when_result"),
    *("finished", "invocation", "results", "retries", "started", "warnings"),
}


def returned(path: Path) -> dict:
    """The documented return values of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "RETURN":
            return yaml.safe_load(ast.literal_eval(node.value)) or {}
    return {}


def wrong_keys(values: dict) -> set[str]:
    return {name for name, value in values.items() if name in RESERVED or (name in VERDICTS and value.get("type") != "bool")}


def test_a_key_that_ansible_takes_for_a_verdict_is_found():
    values = {"failed": {"type": "list"}, "changed": {"type": "bool"}, "results": {"type": "list"}, "failures": {"type": "list"}}
    assert wrong_keys(values) == {"failed", "results"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_return_value_has_a_name_that_ansible_keeps(path):
    assert wrong_keys(returned(path)) == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_every_module_documents_what_it_returns(path):
    assert returned(path)
