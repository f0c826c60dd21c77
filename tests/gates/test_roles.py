# SPDX-License-Identifier: GPL-3.0-or-later
"""Every role has the same shape, and its documented options are its defaults."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROLES = sorted(path for path in (Path(__file__).resolve().parents[2] / "roles").iterdir() if path.is_dir())


def load(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_is_complete(role):
    missing = [name for name in ("defaults/main.yml", "meta/argument_specs.yml", "meta/main.yml") if not (role / name).is_file()]
    assert not missing


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_argument_specs_equal_defaults(role):
    """In every entry point: an option has the default that the role has, or is required and has none."""
    defaults = load(role / "defaults" / "main.yml")
    wrong = []
    documented = set()
    for entry, spec in load(role / "meta" / "argument_specs.yml")["argument_specs"].items():
        options = spec.get("options", {})
        documented |= options.keys()
        for name, option in options.items():
            if not name.startswith(role.name):
                wrong.append(f"{entry}: {name} does not begin with the role's name")
            if name in defaults and option.get("default") != defaults[name]:
                wrong.append(f"{entry}: {name} is {defaults[name]!r} in defaults, {option.get('default')!r} in argument_specs")
            if name not in defaults and "default" in option:
                wrong.append(f"{entry}: {name} has the default {option['default']!r} here, and none in defaults")
    wrong += [f"{name} is in defaults only" for name in defaults.keys() - documented]
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_entry_point_has_its_tasks(role):
    entries = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    assert [entry for entry in entries if not (role / "tasks" / f"{entry}.yml").is_file()] == []


def names_set_by(tasks: list[dict]) -> set[str]:
    """The variables that tasks register or set as facts, in blocks too."""
    names = set()
    for task in tasks:
        names |= {task["register"]} if "register" in task else set()
        names |= task.get("ansible.builtin.set_fact", {}).keys() - {"cacheable"}
        for part in ("block", "rescue", "always"):
            names |= names_set_by(task.get(part, []))
    return names


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_variables_begin_with_the_name_of_the_role(role):
    """Private ones with underscores before it. ansible-lint has this rule, but not for private roles."""
    wrong = []
    for path in sorted(role.glob("*/*.yml")):
        content = load(path)
        names = set()
        if path.parent.name in ("defaults", "vars"):
            names = set(content)
        elif path.parent.name in ("tasks", "handlers"):
            names = names_set_by(content)
        prefix = role.name.lstrip("_") + "_"
        wrong += [f"{path.relative_to(role)}: {name}" for name in names if not name.lstrip("_").startswith(prefix)]
    assert not wrong, "\n".join(sorted(wrong))


def test_the_page_of_variables_is_what_the_specs_say(root):
    done = subprocess.run([sys.executable, root / "docs" / "make_variables.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
