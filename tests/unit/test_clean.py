# SPDX-License-Identifier: GPL-3.0-or-later
"""clean.yml lists, adopts and deletes runs, and touches nothing that is not a named run of ours."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible.module_utils.testing import patch_module_args

import hs_manifest as hm
from ansible_collections.hidden_state.bridge.plugins.module_utils import run_directories as rd
from ansible_collections.hidden_state.bridge.plugins.modules import extraction_runs

ROOT = Path(__file__).resolve().parents[2]


def make_run(path: Path, records: int = 2, layer: int = 1) -> str:
    """An output directory with records; returns the run's name."""
    identity = {"dataset": "d", "layers": [layer]}
    hm.claim_directory(str(path), hm.run_of(identity))
    hm.claim_run(str(path), identity, {})
    (path / "specforge").mkdir()
    writer = hm.ManifestWriter(str(path))
    for number in range(records):
        name = f"specforge/data_{number}.ckpt"
        (path / name).write_bytes(b"x" * 5000)
        writer.append([{"id": number, "source": "a", "line": 1, "file": name, "bytes": 5000, "tokens": 10, "sha256": "0"}])
    writer.close()
    return hm.run_of(identity)


@pytest.fixture
def data(tmp_path):
    """Three runs of one host, two of them earlier, and something that is no run."""
    make_run(tmp_path / "data" / "now" / "gpu-1", layer=9)
    make_run(tmp_path / "data" / "old" / "gpu-1", records=3)
    make_run(tmp_path / "data" / "older" / "gpu-1", layer=2)
    (tmp_path / "data" / "foreign" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "foreign" / "deep" / "states.ckpt").write_bytes(b"y" * 9000)
    return tmp_path / "data"


@pytest.fixture
def call(data, capsys):
    def module(check=False, **arguments):
        keep = {str(data / "now" / "gpu-1"): "the current run"}
        with patch_module_args({"roots": [str(data)], "keep": keep, "_ansible_check_mode": check, **arguments}), pytest.raises(SystemExit):
            extraction_runs.main()
        return json.loads(capsys.readouterr().out)

    return module


def tree(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


def test_the_list(data, call):
    with os.scandir(data / "old" / "gpu-1" / "specforge") as entries:
        for entry in entries:
            os.utime(entry.path, (time.time() - 86400 * 3,) * 2)
    before = tree(data)
    found = call()
    assert found["changed"] is False and tree(data) == before
    runs = {os.path.relpath(item["path"], data): item for item in found["runs"]}
    assert sorted(runs) == ["now/gpu-1", "old/gpu-1", "older/gpu-1"]
    old = runs["old/gpu-1"]
    assert (old["kind"], old["records"], old["tokens"], old["running"]) == ("extraction", 3, 30, False)
    assert old["run"] == hm.run_of({"dataset": "d", "layers": [1]}) and old["bytes"] > 15000
    assert 0 <= old["age"] < 3600 and time.time() - old["oldest"] > 86400 * 2


@pytest.mark.parametrize("by", ["path", "name"])
def test_what_is_named_is_deleted_and_nothing_else(data, call, by):
    name = {"path": str(data / "old" / "gpu-1"), "name": hm.run_of({"dataset": "d", "layers": [1]})}[by]
    before = tree(data)
    dry = call(check=True, remove=[name])
    assert dry["changed"] and dry["removed"] == [str(data / "old" / "gpu-1")] and dry["freed"] > 15000 and tree(data) == before
    done = call(remove=[name])
    assert (done["changed"], done["removed"], done["freed"]) == (True, dry["removed"], dry["freed"])
    assert tree(data) == [item for item in before if not item.startswith("old/gpu-1")]
    again = call(remove=[name])
    assert again["failed"] and ("is not there" in again["msg"] or "no run" in again["msg"])


def test_one_refusal_and_nothing_is_deleted(data, call):
    before = tree(data)
    found = call(remove=[str(data / "old" / "gpu-1"), str(data / "foreign")])
    assert found["failed"] and found["msg"].startswith("nothing was deleted: ") and tree(data) == before
    assert f"{data}/foreign has no marker of ours (.hidden_state_bridge); if its content is an old run, adopt it first" in found["msg"]


def test_a_collection_is_listed_and_deleted_like_a_run_and_its_links_are_not_followed(data, call):
    run, path = hm.run_of({"dataset": "d", "layers": [1]}), data / "all"
    hm.claim_directory(str(path), run, kind=hm.COLLECTION)
    (path / "specforge").mkdir()
    (path / "specforge" / "data_0.ckpt").symlink_to(data / "old" / "gpu-1" / "specforge" / "data_0.ckpt")
    writer = hm.ManifestWriter(str(path))
    writer.append([{"id": 0, "source": "a", "line": 1, "file": "specforge/data_0.ckpt", "bytes": 5000, "tokens": 10, "sha256": "0"}])
    writer.close()
    [found] = [item for item in call()["runs"] if item["path"] == str(path)]
    assert (found["kind"], found["records"], found["tokens"]) == ("collection", 1, 10)
    lock = hm.Lock(str(path))
    assert "an extractor is at work there" in call(remove=[str(path)])["msg"]
    lock.close()
    assert call(remove=[str(path)])["removed"] == [str(path)] and not path.exists()
    assert (data / "old" / "gpu-1" / "specforge" / "data_0.ckpt").exists()


def test_a_link_inside_a_run_that_points_outside(data, call, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("mine")
    run = data / "old" / "gpu-1"
    (run / "specforge" / "directory").symlink_to(outside)
    (run / "specforge" / "file").symlink_to(outside / "precious")
    (run / "loop").symlink_to(".")
    os.link(outside / "precious", run / "hard")
    assert call(remove=[str(run)])["changed"]
    assert not run.exists() and (outside / "precious").read_text() == "mine"


REFUSED = {
    "no marker": ("foreign", "has no marker of ours"),
    "the current run": ("now/gpu-1", r"\(the current run\); it is not deleted"),
    "what holds the current run": ("now", "has no marker of ours"),
    "dots": ("old/../old/gpu-1", r"is not a plain path \(it holds"),
    "dots that lead outside": ("old/gpu-1/../../../other", r"is not a plain path \(it holds"),
    "a double slash": ("old//gpu-1", "is not a plain path"),
    "through a link": ("link/gpu-1", "leads through a symbolic link to"),
    "a link to a run": ("straight", "leads through a symbolic link to"),
    "a file": ("old/gpu-1/run.json", "is not there"),
    "a directory of a run": ("old/gpu-1/specforge", "has no marker of ours"),
    "nothing": ("nowhere", "is not there"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_must_not_be_deleted(data, call, case):
    name, reason = REFUSED[case]
    (data / "link").symlink_to("old")
    (data / "straight").symlink_to("old/gpu-1")
    before = tree(data)
    found = call(remove=[f"{data}/{name}"])
    assert found["failed"] and re.search(reason, found["msg"]) and tree(data) == before


@pytest.mark.parametrize("name", ["old/gpu-1", "../old", "", ".", "0123456789ab", "*"])
def test_a_name_that_is_no_path(data, call, name):
    before = tree(data)
    found = call(remove=[name])
    assert found["failed"] and tree(data) == before
    assert "is not an absolute path" in found["msg"] or "no run 0123456789ab is here" in found["msg"]


def test_the_current_run_by_its_name(data, call):
    found = call(remove=[hm.run_of({"dataset": "d", "layers": [9]})])
    assert found["failed"] and "the current run" in found["msg"] and (data / "now" / "gpu-1" / "run.json").exists()


def test_a_run_that_is_at_work(data, call):
    lock = hm.Lock(str(data / "old" / "gpu-1"))
    try:
        assert [item["running"] for item in call()["runs"]] == [False, True, False]
        found = call(remove=[str(data / "old" / "gpu-1")])
        assert found["failed"] and "an extractor is at work there; stop it first" in found["msg"]
    finally:
        lock.close()


def test_a_run_that_holds_another_or_a_mount(data, call, monkeypatch):
    make_run(data / "old" / "gpu-1" / "inner" / "gpu-1")
    found = call(remove=[str(data / "old" / "gpu-1")])
    assert found["failed"] and "holds other runs" in found["msg"]
    mount = str(data / "older" / "gpu-1" / "specforge")
    monkeypatch.setattr(rd.os.path, "ismount", lambda path: path == mount)
    found = call(remove=[str(data / "older" / "gpu-1")])
    assert found["failed"] and f"is or holds a mounted file system ({mount}); unmount it first" in found["msg"]


def test_a_marker_that_is_a_link_or_damaged_is_no_leave_to_delete(data, call):
    (data / "foreign" / hm.MARKER).symlink_to(data / "old" / "gpu-1" / hm.MARKER)
    assert "has no marker of ours" in call(remove=[str(data / "foreign")])["msg"]
    (data / "older" / "gpu-1" / hm.MARKER).write_text("{")
    assert call(remove=[str(data / "older" / "gpu-1")])["failed"]
    assert {item["kind"] for item in call()["runs"]} == {"extraction", "damaged"}


def test_a_deletion_that_broke_off_goes_on(data, call, monkeypatch):
    run = data / "old" / "gpu-1"
    unlink = os.unlink

    def failing(name, **options):
        if name == "manifest.jsonl":
            raise OSError(5, "Input/output error")
        unlink(name, **options)

    monkeypatch.setattr(rd.os, "unlink", failing)
    assert "; see to the file system and the permissions there" in call(remove=[str(run)])["msg"]
    monkeypatch.undo()
    assert (run / hm.MARKER).exists(), "the marker went first"
    assert call(remove=[str(run)])["removed"] == [str(run)] and not run.exists()


def test_an_extractor_that_begins_meanwhile_keeps_its_directory(data, call, monkeypatch):
    """Between the look and the deletion: its manifest would go on in a file that is gone, and end as done."""
    run, begun, check = data / "old" / "gpu-1", [], rd.check_removable
    hm.Lock(str(run)).close()

    def begin(path, *arguments):
        check(path, *arguments)
        begun.append(hm.Lock(path))

    monkeypatch.setattr(rd, "check_removable", begin)
    before = tree(run)
    found = call(remove=[str(run)])
    begun[0].close()
    assert found["failed"] and "an extractor has begun to work there; it is not deleted" in found["msg"] and tree(run) == before


def test_no_extractor_begins_in_what_is_being_deleted(data, call, monkeypatch):
    run, unlink, refused = data / "old" / "gpu-1", os.unlink, []
    hm.Lock(str(run)).close()

    def begin(name, **options):
        try:
            hm.Lock(str(run), patience=0).close()
        except hm.ManifestError as error:
            refused.append(str(error))
        unlink(name, **options)

    monkeypatch.setattr(rd.os, "unlink", begin)
    assert call(remove=[str(run)])["removed"] == [str(run)] and not run.exists()
    # Three records, manifest, run.json, marker, and the lock itself.
    assert len(refused) == 7 and all("is locked by another extractor" in text for text in refused)


def test_the_list_while_an_extractor_renames_its_temporary_files(data, call, monkeypatch):
    waiting = data / "old" / "gpu-1" / "specforge" / ".data_9.ckpt.tmp-1"
    waiting.touch()
    scandir = os.scandir

    class Late:
        def __init__(self, path):
            self.entries = scandir(path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.entries.close()

        def __iter__(self):
            for entry in list(self.entries):
                if entry.name == waiting.name:
                    waiting.unlink()
                yield entry

    monkeypatch.setattr(rd.os, "scandir", Late)
    [found] = [item for item in call()["runs"] if item["path"] == str(data / "old" / "gpu-1")]
    assert found["records"] == 3 and not waiting.exists()


@pytest.mark.parametrize("gone", ["specforge/data_1.ckpt", "specforge", "manifest.jsonl", hm.MARKER, "."])
def test_what_another_host_removes_meanwhile_is_removed(data, monkeypatch, gone):
    """On a shared file system all hosts delete what is named at once: each step may find its work done, by a host just ahead."""
    run = data / "old" / "gpu-1"
    target = run / gone
    ahead = {name: getattr(os, name) for name in ("lstat", "unlink", "rmdir", "open", "listdir")}

    def behind(function):
        def call(name, *arguments, **options):
            if os.path.basename(str(name)) == target.name and target.exists():
                subprocess.run(["rm", "-r", str(target)], check=True)
            return ahead[function](name, *arguments, **options)

        return call

    for function in ("lstat", "unlink", "rmdir"):
        with monkeypatch.context() as patched:
            patched.setattr(rd.os, function, behind(function))
            rd.remove(str(run))
        assert not run.exists()
        make_run(run)
    shutil.rmtree(run)
    rd.remove(str(run))
    assert rd.measure(str(run))["files"] == 0


def test_adoption(data, call):
    path = str(data / "foreign")
    found = call(adopt=[path])
    assert found["changed"] is False and not (data / "foreign" / hm.MARKER).exists()
    (candidate,) = found["candidates"]
    assert (candidate["files"], candidate["names"], candidate["adopted"]) == (1, ["deep"], False) and candidate["bytes"] > 8000
    assert call(check=True, adopt=[path], confirmed=True)["changed"] and not (data / "foreign" / hm.MARKER).exists()
    assert call(adopt=[path], confirmed=True)["changed"]
    assert call(adopt=[path], confirmed=True)["changed"] is False
    assert [item["kind"] for item in call()["runs"] if item["path"] == path] == ["adopted"]
    with pytest.raises(hm.ManifestError, match="is marked as 'adopted', not as an extraction"):
        hm.claim_directory(path, "run")
    assert call(remove=[path])["removed"] == [path] and not (data / "foreign").exists()


NOT_ADOPTED = {
    "/": "is too near to the root",
    "/usr": "is too near to the root",
    "{data}/now": r"holds or lies in .*\(the current run\)",
    "{data}/now/gpu-1/specforge": r"holds or lies in .*\(the current run\)",
    "{data}": r"holds or lies in .*\(the current run\)",
    "{data}/old": "holds .*/old/gpu-1; it is no old run by itself",
    "{data}/old/gpu-1": "carries our marker already",
    "{data}/foreign/../foreign": "is not a plain path",
    "{data}/link": "leads through a symbolic link",
    "foreign": "is not an absolute path",
    "{data}/nowhere": "is not a directory",
}


@pytest.mark.parametrize("path", NOT_ADOPTED)
def test_what_cannot_be_adopted(data, call, path):
    (data / "link").symlink_to("foreign")
    before = tree(data)
    found = call(adopt=[path.format(data=data)], confirmed=True)
    assert found["failed"] and re.search(NOT_ADOPTED[path], found["msg"]) and tree(data) == before


@pytest.fixture
def playbook(data, tmp_path):
    """Runs clean.yml on this machine as the host gpu-1."""
    (tmp_path / "ansible.cfg").touch()
    (tmp_path / "report.json").write_text(json.dumps({"run": hm.run_of({"dataset": "d", "layers": [1]})}))
    variables = {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "extraction_output_dir": str(data / "now"),
        "extraction_report_dir": str(tmp_path),
        "extraction_state_dir": str(tmp_path / "state"),
        "extraction_code_dir": str(tmp_path / "code"),
        "extraction_dataset_dir": str(tmp_path / "datasets"),
    }
    inventory = tmp_path / "hosts.json"
    inventory.write_text(json.dumps({"sglang": {"hosts": {"gpu-1": variables}}}))
    environment = {**os.environ, "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"), "LC_ALL": "C.UTF-8"}
    environment["ANSIBLE_COLLECTIONS_PATH"] = str(ROOT / "playbooks" / "collections")

    def run(*arguments):
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "hidden_state.bridge.clean", "-i", str(inventory), *arguments]
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return run


def test_the_playbook_lists_shows_and_deletes(data, playbook):
    status, said = playbook()
    assert status == 0 and "changed=0" in said, said
    assert re.search(r"old/gpu-1: run \w{12}, 0\.000 GB, 3 records, 0\.0 days old, with a report", said), said
    assert re.search(r"older/gpu-1: .* no report here", said) and re.search(r"now/gpu-1: .*, current", said), said
    status, said = playbook("-e", f"clean_runs=[{data}/old/gpu-1, {data}/older/gpu-1]")
    assert status != 0 and "is half a list" in said and (data / "old" / "gpu-1").exists(), said
    name = f"clean_runs=[{data}/old/gpu-1,{data}/older/gpu-1]"
    status, said = playbook("-e", name, "--check")
    assert status == 0 and "old/gpu-1 would be deleted" in said and "GB would be freed" in said and (data / "old" / "gpu-1").exists(), said
    status, said = playbook("-e", name)
    assert status == 0 and "older/gpu-1 deleted" in said and "GB freed" in said and "changed=1" in said, said
    assert not (data / "old" / "gpu-1").exists() and not (data / "older" / "gpu-1").exists() and (data / "now" / "gpu-1").exists()


def test_the_playbook_keeps_the_current_runs_of_other_hosts_on_a_shared_file_system(data, playbook):
    run = make_run(data / "now" / "gpu-2", layer=9)
    make_run(data / "now" / "gpu-3", layer=9)
    (data / "now" / "gpu-1").rename(data / "gone")
    for name in (f"{data}/now/gpu-2", run):
        status, said = playbook("-e", f"clean_runs=[{name}]")
        assert status != 0 and "now/gpu-2 is, holds or lies in" in said and "(the current run); it is not deleted" in said, said
    assert (data / "now" / "gpu-2" / hm.MARKER).exists() and (data / "now" / "gpu-3" / hm.MARKER).exists()
    assert re.search(r"now/gpu-2: .*, current", playbook()[1])


def test_the_playbook_asks_before_it_adopts(data, playbook):
    status, said = playbook("-e", f"clean_adopt=[{data}/foreign]")
    assert status != 0 and "foreign: 1 files" in said and "Nothing was marked or deleted. Answer yes" in said, said
    assert not (data / "foreign" / hm.MARKER).exists()
    status, said = playbook(
        "-e", json.dumps({"clean_adopt": [f"{data}/foreign"], "clean_confirm": True, "clean_runs": [f"{data}/now/gpu-1"]})
    )
    assert status != 0 and "(the current run); it is not deleted" in said and not (data / "foreign" / hm.MARKER).exists(), said
    status, said = playbook("-e", f"clean_adopt=[{data}/foreign]", "-e", "clean_confirm=true")
    assert status == 0 and re.search(r"foreign: adopted, .* 2 files", said) and (data / "foreign" / hm.MARKER).exists(), said
