# SPDX-License-Identifier: Apache-2.0
"""Where SGLang is and which release, told by an interpreter and by files, without importing SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from model_source import PROGRAM, SOURCE, install

import hs_patcher

METADATA = "Metadata-Version: 2.4\nName: sglang\nVersion: {}\n"
# What SGLang's version.py looks like from 0.5.9 on: nothing in it names the release.
ASKS_THE_METADATA = """\
try:
    from sglang._version import __version__
except ImportError:
    try:
        import importlib.metadata

        __version__ = importlib.metadata.version("sglang")
    except Exception:
        __version__ = "0.0.0.dev0"
"""
FINDER = """\
import sys
from importlib.machinery import PathFinder
from importlib.util import spec_from_file_location

MAPPING = {{"sglang": {package!r}}}


class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return spec_from_file_location(name, MAPPING[name] + "/__init__.py")


def install():
    sys.meta_path.append(Finder)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The model of a source tree, whose package must not be imported."""
    model = install(tmp_path, SOURCE, None)
    model.parents[3].rename(tmp_path / "python")
    model = tmp_path / "python" / "sglang" / "srt" / "models" / model.name
    (model.parents[2] / "__init__.py").write_text("raise SystemExit('imported')\n")
    return model


@pytest.fixture(scope="module")
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, symlinks=True)
    return place


@pytest.fixture
def site(_environment: Path, monkeypatch: pytest.MonkeyPatch):
    """The site-packages of an environment of its own, left empty."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    place = next(_environment.glob("lib/python*/site-packages"))
    yield place
    for path in sorted(place.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def python(_environment: Path) -> str:
    return str(_environment / "bin" / "python")


def metadata(site: Path, release: str, project: Path | None = None) -> None:
    place = site / f"sglang-{release}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(METADATA.format(release))
    if project is not None:
        (place / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}, "url": project.as_uri()}))


def test_in_a_wheel(site: Path, python: str) -> None:
    package = site / "sglang"
    (package / "srt" / "models").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    (package / "srt" / "models" / "deepseek_v2.py").write_text(SOURCE)
    metadata(site, "0.5.19")
    found = hs_patcher.locate(python)
    assert found == (str(package / "srt" / "models" / "deepseek_v2.py"), None)
    assert hs_patcher.release_of(found.path) == "0.5.19"
    assert hs_patcher.find_model_file(python) == found.path


@pytest.mark.parametrize("style", ["path", "finder", "links"])
def test_in_an_editable_install(site: Path, python: str, tree: Path, tmp_path: Path, style: str) -> None:
    (tree.parents[2] / "version.py").write_text(ASKS_THE_METADATA)
    project, expected = tree.parents[3], tree
    if style == "path":
        (site / "__editable__.sglang-0.5.20.pth").write_text(f"{project}\n")
    elif style == "finder":
        (site / "__editable__.sglang-0.5.20.pth").write_text("import __editable___sglang_finder; __editable___sglang_finder.install()\n")
        (site / "__editable___sglang_finder.py").write_text(FINDER.format(package=str(tree.parents[2])))
    else:
        # What setuptools calls strict: a tree of links to the files of the project.
        farm = project / "build" / "__editable__" / "sglang"
        expected = farm / "srt" / "models" / tree.name
        expected.parent.mkdir(parents=True)
        expected.symlink_to(tree)
        (farm / "__init__.py").symlink_to(tree.parents[2] / "__init__.py")
        (site / "__editable__.sglang-0.5.20.pth").write_text(f"{farm.parent}\n")
    metadata(site, "0.5.20", project)
    assert hs_patcher.locate(python) == (str(expected), "0.5.20")
    result = hs_patcher.apply(*hs_patcher.locate(python)[:1], release="0.5.20", originals=str(tmp_path / "o"), dry_run=True)
    assert (result.model_file, result.sglang_version) == (str(tree), "0.5.20")


def test_the_metadata_of_another_tree_is_not_taken(site: Path, python: str, tree: Path, tmp_path: Path) -> None:
    (site / "sglang.pth").write_text(f"{tree.parents[3]}\n")
    metadata(site, "0.5.20", tmp_path / "elsewhere")
    assert hs_patcher.locate(python) == (str(tree), None)
    metadata(site, "0.5.19", tree.parents[3])
    assert hs_patcher.locate(python) == (str(tree), "0.5.19")
    for place in site.glob("*.dist-info"):
        (place / "direct_url.json").write_text("torn {")
    assert hs_patcher.locate(python) == (str(tree), None)


def test_in_a_source_tree_on_the_path_or_in_the_directory(
    site: Path, python: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parents[3])
    assert hs_patcher.locate(python, directory=str(tree.parents[3])).path == str(tree)
    # A module of Ansible is called anywhere: no directory counts there.
    with pytest.raises(hs_patcher.Refused, match="has no sglang"):
        hs_patcher.locate(python)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tree.parents[3]))
    assert hs_patcher.locate(python).path == str(tree)


@pytest.mark.parametrize(
    ("name", "content", "release"),
    [
        ("_version.py", "version: str\n__version__ = version = '0.5.21'\n", "0.5.21"),
        ("_version.py", "__version__ = '0.5.21.dev7+g0123456'\n", "0.5.21.dev7+g0123456"),
        ("version.py", '__version__ = "0.4.6.post1"\n', "0.4.6.post1"),
        ("version.py", ASKS_THE_METADATA, None),
        ("version.py", "__version__ = (\n", None),
        ("version.py", "__version__ = asked()\n", None),
        ("../sglang.egg-info/PKG-INFO", METADATA.format("0.5.18"), "0.5.18"),
        ("../sglang-0.5.18-py3.11.egg-info/PKG-INFO", METADATA.format("0.5.18"), "0.5.18"),
        ("../sglang-0.5.18.dist-info/METADATA", METADATA.format("0.5.18"), "0.5.18"),
        ("../sglang_router-0.1.0.dist-info/METADATA", METADATA.format("0.1.0"), None),
        ("README.md", "0.5.20\n", None),
    ],
)
def test_a_source_tree_tells_its_release(tree: Path, name: str, content: str, release: str | None) -> None:
    path = tree.parents[2] / name
    path.parent.resolve().mkdir(exist_ok=True) if ".." not in name else (tree.parents[3] / name.split("/")[1]).mkdir()
    path.write_text(content)
    assert hs_patcher.release_of(tree) == release
    assert hs_patcher.release_of(tree.parents[2]) == release


def test_what_the_package_says_goes_before_its_metadata(tree: Path) -> None:
    metadata(tree.parents[3], "0.5.17")
    (tree.parents[2] / "version.py").write_text('__version__ = "0.5.18"\n')
    assert hs_patcher.release_of(tree) == "0.5.18"
    (tree.parents[2] / "_version.py").write_text('__version__ = "0.5.19"\n')
    assert hs_patcher.release_of(tree) == "0.5.19"


def test_two_releases_in_one_place_tell_none(tree: Path) -> None:
    metadata(tree.parents[3], "0.5.17")
    metadata(tree.parents[3], "0.5.18")
    assert hs_patcher.release_of(tree) is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit(3)", "could not look for sglang .exit status 3.; give the Python that runs SGLang"),
        ("raise ValueError('no luck')", "could not look for sglang .ValueError: no luck."),
        ("print('no answer')\nimport os; os._exit(0)", "could not look for sglang"),
        ("", "has no sglang; give the Python that runs SGLang, or the model file itself"),
    ],
)
def test_an_interpreter_that_does_not_tell(site: Path, python: str, code: str, reason: str) -> None:
    (site / "sitecustomize.py").write_text("import importlib.util\ndef find(name):\n    " + (code.replace("\n", "\n    ") or "return None"))
    with open(site / "sitecustomize.py", "a", encoding="utf-8") as stream:
        stream.write("\nimportlib.util.find_spec = find\n")
    with pytest.raises(hs_patcher.Refused, match=reason):
        hs_patcher.locate(python)


def test_what_cannot_be_asked(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tree.parents[3]))
    with pytest.raises(hs_patcher.Refused, match="name another model"):
        hs_patcher.locate(sys.executable, "absent")
    with pytest.raises(hs_patcher.Refused, match="not the name of a module"):
        hs_patcher.locate(sys.executable, "../../etc/passwd")
    with pytest.raises(hs_patcher.Refused, match="no such interpreter"):
        hs_patcher.locate(str(tmp_path / "no-python"))
    with pytest.raises(hs_patcher.Refused, match="could not look for sglang .*Permission denied"):
        hs_patcher.locate(str(tmp_path))


def test_the_program_finds_the_file_by_the_interpreter(tree: Path, tmp_path: Path) -> None:
    def called(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAM), *arguments, "--originals", str(tmp_path / "o")]
        return subprocess.run(command, cwd=tree.parents[3], capture_output=True, text=True)

    by_python = ("--python", sys.executable, "--model", "deepseek_v2")
    checked = called("check", *by_python)
    assert checked.returncode == 0, checked.stderr
    assert f"file     {tree}\n" in checked.stdout
    assert "release  unknown: neither _version.py, version.py nor the package's metadata tells it\n" in checked.stdout
    assert called("apply", *by_python).returncode == 0
    assert called("diff", *by_python).stdout == ""
    assert "state    patched, complete\n" in called("check", *by_python).stdout
    assert called("revert", *by_python).returncode == 0
    assert tree.read_text() == SOURCE
    missing = called("check", "--python", sys.executable, "--model", "absent")
    assert (missing.returncode, "name another model" in missing.stderr) == (1, True)
    for wrong in ([], [str(tree), "--python", sys.executable]):
        both = called("check", *wrong)
        assert (both.returncode, "give either PATH or --python" in both.stderr) == (2, True)
