# SPDX-License-Identifier: GPL-3.0-or-later
"""Write docs/variables.md from the argument specs of the roles, which a gate holds equal to the defaults.

python docs/make_variables.py           writes the page
python docs/make_variables.py --check   exits 1 when the page is not what the specs say
"""

from __future__ import annotations

import pathlib
import re
import sys

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "variables.md"
ROLES = ("sglang_server", "hs_patch", "dataset_stage", "extraction")
HEAD = """# Variables

Set them in the inventory, under the group `sglang`. Made by `docs/make_variables.py` from the roles' argument specs.
"""
MARKUP = re.compile(r"\b[A-Z]\(([^()]*(?:\([^()]*\)[^()]*)*)\)")


def text(description: str | list[str]) -> str:
    """Return a description as one Markdown cell."""
    joined = " ".join(description) if isinstance(description, list) else description
    return MARKUP.sub(r"`\1`", " ".join(joined.split())).replace("|", "\\|")


def shown(value: object) -> str:
    """Return a default as it would be written in YAML."""
    if isinstance(value, str) and not value:
        return "empty"
    return "`" + yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip().replace("|", "\\|") + "`"


def table(role: str) -> str:
    specs = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    options = {name: option for spec in specs.values() for name, option in spec["options"].items()}
    rows = [
        f"| `{name}` | {text(option['description'])}{choices(option)} | {shown(option['default']) if 'default' in option else 'has to be set'} |"
        for name, option in options.items()
    ]
    return "\n".join(
        [f"\n## {role}\n", text(specs["main"]["short_description"]) + ".\n", "| variable | meaning | default |", "|---|---|---|", *rows]
    )


def choices(option: dict) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in option['choices'])}." if "choices" in option else ""


def page() -> str:
    return HEAD + "\n".join(table(role) for role in ROLES) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        if PAGE.read_text() != page():
            sys.exit("docs/variables.md is not what the argument specs say: run python docs/make_variables.py")
    else:
        PAGE.write_text(page())
