# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules that hold for every file of the repository."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import yaml

CODE = {".py", ".sh", ".yml", ".yaml", ".j2", ".toml", ".cfg"}
LINES = 400
LICENCES = {"GPL-3.0-or-later", "Apache-2.0"}
# The patcher runs by itself on a host with nothing but Python, so it is one file.
ONE_FILE = "plugins/module_utils/hs_patcher.py"
# Texts for readers and of licences, formats without comments, and the ignore files, whose lines ansible-test reads one by one.
WITHOUT_SPDX = re.compile(r"^LICENSES/|\.(json|md)$|^tests/sanity/ignore-.*\.txt$|^tests/.*\.(jsonl|npy|safetensors)$")
# What lands in or beside SGLang.
BESIDE_SGLANG = re.compile(
    r"^plugins/module_utils/(hs_patcher|hs_manifest|hs_progress|hs_capture/.*)\.py$|^plugins/module_utils/hs_capture/|^roles/_bridge/files/hidden_state_bridge/"
)
SPDX = re.compile(r"SPDX-License-Identifier: ([^\s*]+(?: AND [^\s*]+)*)")
HOME = re.compile(r"(?<![\w}.$])/(?:root|home)/\w")
CLIMB = re.compile(r"(?<![\w./})\]*-])(?:\.\./)+[\w./-]*")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def test_every_file_names_its_licence(root, files):
    wrong = []
    for path in files:
        if (root / path).is_symlink() or WITHOUT_SPDX.search(path.as_posix()):
            continue
        found = SPDX.search("\n".join(text_of(root / path).splitlines()[:8]))
        expected = {"Apache-2.0"} if BESIDE_SGLANG.search(path.as_posix()) else LICENCES
        if not found or not set(found[1].split(" AND ")) <= expected:
            wrong.append(f"{path}: {found[1] if found else 'no SPDX-License-Identifier in the first lines'}")
    assert not wrong, "\n".join(wrong)


def test_no_code_is_longer_than_a_reader_bears(root, files):
    wrong = []
    for path in files:
        if (path.suffix in CODE or path.name == "Makefile") and path.as_posix() != ONE_FILE:
            lines = 0 if (root / path).is_symlink() else text_of(root / path).count("\n")
            if lines > LINES:
                wrong.append(f"{path}: {lines} lines, at most {LINES}")
    assert not wrong, "\n".join(wrong)


def test_names_of_playbooks_have_no_dashes(root):
    assert [path.name for path in (root / "playbooks").glob("*.yml") if not re.fullmatch(r"[a-z_]+\.yml", path.name)] == []


def test_every_playbook_begins_with_the_play_that_sees_hosts(root):
    playbooks = {path.name: yaml.safe_load(path.read_text()) for path in (root / "playbooks").glob("*.yml")}

    def sees(name):
        first = playbooks[name][0]
        return name == "hosts.yml" or sees(first.get("ansible.builtin.import_playbook", ""))

    assert [name for name in playbooks if "ansible.builtin.import_playbook" not in playbooks[name][0] and name != "hosts.yml"] == []
    assert all(sees(name) for name in playbooks)


def test_nothing_points_outside_the_repository(root, files):
    wrong = []
    for path in files:
        if (root / path).is_symlink():
            target = os.path.realpath(root / path)
            if target != str(root) and not target.startswith(f"{root}{os.sep}"):
                wrong.append(f"{path}: a link to {os.readlink(root / path)}")
            elif os.path.isabs(os.readlink(root / path)) or not os.path.exists(target):
                wrong.append(f"{path}: a link that is absolute or dangles: {os.readlink(root / path)}")
            continue
        # What lies beside a checkout is of one machine, unless every machine has that directory.
        common = root.parent in (Path("/"), Path(tempfile.gettempdir()))
        beside = f"{root.parent}{os.sep}"
        for number, line in enumerate(text_of(root / path).splitlines(), 1):
            for climb in CLIMB.findall(line):
                # Documentation gives commands as they are called inside playbooks/, and links from its own directory.
                bases = [path.parent, Path("playbooks")] if path.suffix == ".md" else [path.parent]
                if all(os.path.normpath(base / climb).startswith("..") for base in bases):
                    wrong.append(f"{path}:{number}: {climb}")
            if HOME.search(line) or (not common and re.search(rf"(?<![\w.])(?:{re.escape(beside)})\w", line)):
                wrong.append(f"{path}:{number}: a path of one machine: {line.strip()}")
    assert not wrong, "\n".join(wrong)


def test_links_in_the_documentation_lead_somewhere(root, files):
    wrong = []
    for path in files:
        if path.suffix == ".md":
            for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text_of(root / path)):
                if not (root / path.parent / target).exists():
                    wrong.append(f"{path}: {target}")
    assert not wrong, "\n".join(wrong)


def test_every_make_command_in_the_documentation_exists(root, files):
    targets = set(re.findall(r"^([a-z0-9-]+):(?!=)", text_of(root / "Makefile"), re.MULTILINE))
    documents = [path for path in files if path.suffix == ".md"]
    assert Path("README.md") in documents
    named = {
        (path, name) for path in documents for name in re.findall(r"(?:`|^\s+|\$ )make ([a-z0-9-]+)", text_of(root / path), re.MULTILINE)
    }
    assert {"demo", "test"} <= {name for path, name in named if path == Path("README.md")}
    assert {f"{path}: make {name}" for path, name in named if name not in targets} == set()


def test_every_playbook_in_the_documentation_exists(root, files):
    wrong = set()
    for path in files:
        if path.suffix == ".md":
            for name in re.findall(r"\bansible-playbook (?:playbooks/)?([\w-]+\.yml)", text_of(root / path)):
                if not (root / "playbooks" / name).exists():
                    wrong.add(f"{path}: {name}")
            for name in re.findall(r"\bansible-playbook hidden_state\.bridge\.(\w+)", text_of(root / path)):
                if not (root / "playbooks" / f"{name}.yml").exists():
                    wrong.add(f"{path}: hidden_state.bridge.{name}")
    assert not wrong, "\n".join(sorted(wrong))


def test_no_molecule_scenario_holds_variables_that_molecule_leaves_out(root):
    """Beside links, which all scenarios have, molecule does not read those of molecule.yml."""
    lost = []
    for path in (root / "molecule").glob("*/molecule.yml"):
        inventory = yaml.safe_load(path.read_text()).get("provisioner", {}).get("inventory", {})
        lost += [f"{path.parent.name}: {name}" for name in ("group_vars", "host_vars") if name in inventory]
    assert not lost, "\n".join(lost)
