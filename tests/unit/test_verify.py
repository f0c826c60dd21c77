# SPDX-License-Identifier: Apache-2.0
"""What verify finds, and that it finds nothing where all is well."""

from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest

import hs_manifest as hm
from ansible_collections.hidden_state.bridge.plugins.module_utils import run_directories
from hidden_state_bridge import verify as verify_module
from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.verify import verify

RECORDS = 20


@pytest.fixture
def out(tmp_path):
    path = tmp_path / "host"
    hm.claim_directory(str(path), "0" * 12)
    (path / "specforge" / "rows_0-2000").mkdir(parents=True)
    writer = hm.ManifestWriter(str(path))
    for record in range(RECORDS):
        name = f"specforge/rows_0-2000/data_{record}.ckpt"
        content = bytes([record]) * (50 + record)
        (path / name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        entry = {"id": record, "source": "a", "line": 1, "file": name, "bytes": len(content), "tokens": 3, "sha256": digest}
        writer.append([entry])
    writer.close()
    return path


def file(out, record):
    return out / f"specforge/rows_0-2000/data_{record}.ckpt"


def test_all_is_well(out, capsys):
    assert main(["verify", "--output-dir", str(out), "--all"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.pop("problems") == result.pop("repaired") == []
    total = sum(50 + record for record in range(RECORDS))
    assert result == {
        "ok": True,
        "checked": RECORDS,
        "records": RECORDS,
        "tokens": 60,
        "bytes": total,
        "running": False,
        "writer": "extract.yml",
    }
    assert verify(str(out), 5)["checked"] == 5
    assert verify(str(out), 500)["checked"] == RECORDS


def test_a_flipped_byte_is_found_by_all_and_by_a_sample_that_meets_it(out, capsys):
    file(out, 7).write_bytes(b"\xff" + file(out, 7).read_bytes()[1:])
    assert main(["verify", "--output-dir", str(out), "--all"]) == 1
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem == {
        "id": 7,
        "file": "specforge/rows_0-2000/data_7.ckpt",
        "reason": "its content has another SHA-256 than the manifest says; verify.yml -e verify_repair=true puts it back into the plan,"
        " and the next extraction writes it again",
    }
    found = {bool(verify(str(out), 10, seed)["problems"]) for seed in range(12)}
    assert found == {True, False}
    assert verify(str(out), 10, 3) == verify(str(out), 10, 3)


@pytest.mark.parametrize(
    ("spoil", "record", "reason"),
    [
        (lambda out: file(out, 3).unlink(), 3, "is missing; the next extraction writes it again"),
        (lambda out: file(out, 3).write_bytes(b"x"), 3, "has 1 bytes, the manifest says otherwise"),
        (lambda out: (out / "specforge/rows_0-2000/data_99.ckpt").write_bytes(b""), None, "is not in the manifest"),
        (lambda out: (out / "specforge/rows_0-2000/.data_9.ckpt.tmp-77").write_bytes(b""), None, "that was killed"),
        (lambda out: (out / ".manifest.jsonl.tmp-77").write_bytes(b""), None, "that was killed"),
        (lambda out: (out / hm.MANIFEST).open("a").write('{"id":'), None, "its last line is torn (6 bytes)"),
        (lambda out: (out / hm.MANIFEST).open("a").write("{}\n"), None, "line 21 is not valid"),
        (
            lambda out: (out / hm.MANIFEST).open("a").write((out / hm.MANIFEST).read_text().splitlines()[4] + "\n"),
            4,
            "the record has more than one line",
        ),
    ],
)
def test_each_kind_of_damage_has_its_name(out, spoil, record, reason):
    spoil(out)
    result = verify(str(out), 0)
    [problem] = result["problems"]
    assert not result["ok"] and problem["id"] == record and reason in problem["reason"]


def test_files_in_the_making_are_no_problem_while_an_extractor_works(out):
    (out / "specforge/rows_0-2000/.data_99.ckpt.tmp-77").write_bytes(b"")
    lock = hm.Lock(str(out))
    assert verify(str(out), 0)["ok"] and verify(str(out), 0)["running"]
    lock.close()
    assert not verify(str(out), 0)["ok"]


def test_a_directory_that_is_not_ours_is_refused(tmp_path, capsys):
    assert main(["verify", "--output-dir", str(tmp_path)]) == 1
    assert f"verify: {tmp_path} has no .hidden_state_bridge" in capsys.readouterr().err
    (tmp_path / hm.MARKER).write_text("{}")
    with pytest.raises(Refusal, match="a sample of -1 files"):
        verify(str(tmp_path), -1)


def test_what_was_adopted_is_left_alone(tmp_path):
    """States that others made, under names like ours, to be deleted as a whole."""
    path = tmp_path / "by_hand"
    (path / "specforge/rows_0-2000").mkdir(parents=True)
    (path / "specforge/rows_0-2000/data_0.ckpt").write_bytes(b"theirs")
    run_directories.adopt(str(path))
    for repair in (False, True):
        with pytest.raises(Refusal, match="by_hand is marked as 'adopted': .*; give an output directory of an extraction, or a collection"):
            verify(str(path), None, repair=repair)
    assert (path / "specforge/rows_0-2000/data_0.ckpt").read_bytes() == b"theirs"


def spoil(out):
    """Three files of records go bad, each in its way, and two are left over."""
    file(out, 3).unlink()
    file(out, 4).write_bytes(b"short")
    file(out, 5).write_bytes(b"\xff" + file(out, 5).read_bytes()[1:])
    (out / "specforge/rows_0-2000/data_99.ckpt").write_bytes(b"")
    (out / "specforge/rows_0-2000/.data_9.ckpt.tmp-77").write_bytes(b"")


def test_repair_puts_what_is_bad_back_into_the_plan_and_touches_nothing_else(out, capsys):
    spoil(out)
    (out / ".status.json.abc_1.tmp-77").write_bytes(b"")
    (out / "specforge/notes.txt").write_text("a foreign file")
    with (out / hm.MANIFEST).open("a") as stream:
        stream.write('{"id":')
    assert not verify(str(out), None)["ok"]
    assert main(["verify", "--output-dir", str(out), "--all", "--repair"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [problem["file"] for problem in result["problems"]] == ["specforge/notes.txt"]
    assert {problem["id"] for problem in result["repaired"]} == {None, 3, 4, 5}
    assert len(result["repaired"]) == 7
    (out / "specforge/notes.txt").unlink()
    result = verify(str(out), None)
    assert result["ok"] and result["records"] == RECORDS - 3
    assert not any(file(out, record).exists() for record in (3, 4, 5, 99))
    assert set(hm.Manifest(str(out)).entries) == set(range(RECORDS)) - {3, 4, 5}
    before = (out / hm.MANIFEST).stat().st_ino
    assert verify(str(out), None, repair=True)["ok"] and (out / hm.MANIFEST).stat().st_ino == before


def test_repair_follows_no_link_and_removes_no_directory(out, tmp_path):
    kept = tmp_path / "kept"
    (out / "specforge/rows_0-2000").rename(kept)
    (out / "specforge/rows_0-2000").symlink_to(kept)
    (kept / "data_3.ckpt").write_bytes(b"short")
    link = kept / "data_4.ckpt"
    link.unlink()
    link.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"")
    result = verify(str(out), None, repair=True)
    assert [problem["id"] for problem in result["problems"]] == [3, 4] and result["repaired"] == []
    assert (kept / "data_3.ckpt").exists() and link.is_symlink() and (tmp_path / "elsewhere").exists()
    # Their lines are gone all the same: the plan has them again.
    assert set(hm.Manifest(str(out)).entries) == set(range(RECORDS)) - {3, 4}


def test_repair_leaves_a_link_in_the_place_of_a_file(out, tmp_path):
    """It is nothing that an extractor writes; its record goes back into the plan."""
    file(out, 4).unlink()
    file(out, 4).symlink_to(tmp_path / "elsewhere")
    result = verify(str(out), None, repair=True)
    assert [problem["id"] for problem in result["problems"]] == [4] and file(out, 4).is_symlink()
    assert 4 not in hm.Manifest(str(out)).entries


def test_mending_does_what_a_start_of_the_extractor_would_and_no_more(out, capsys):
    """Names and sizes come right; a changed byte stays and is named."""
    spoil(out)
    assert main(["verify", "--output-dir", str(out), "--all", "--mend"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [problem["id"] for problem in result["problems"]] == [5] and file(out, 5).exists()
    assert sorted(str(problem["id"]) for problem in result["repaired"]) == ["3", "4", "None", "None"]
    assert not any(file(out, record).exists() for record in (3, 4, 99)) and result["records"] == RECORDS - 2
    again = verify(str(out), None, mend=True)
    assert [problem["id"] for problem in again["problems"]] == [5] and again["repaired"] == []


def test_nothing_is_mended_while_an_extractor_works(out):
    (out / "specforge/rows_0-2000/data_99.ckpt").write_bytes(b"")
    lock = hm.Lock(str(out))
    result = verify(str(out), 0, mend=True)
    assert result["ok"] and result["running"] and (out / "specforge/rows_0-2000/data_99.ckpt").exists()
    lock.close()


def test_repair_waits_for_no_extractor(out, monkeypatch):
    lock = hm.Lock(str(out))
    monkeypatch.setattr(hm.Lock.__init__, "__defaults__", (0.1,))
    with pytest.raises(Refusal, match="is locked by another extractor"):
        verify(str(out), None, repair=True)
    lock.close()


def failing_for(record, number, function):
    """A function on files that fails so for one record's."""

    def call(path, *arguments, **options):
        if str(path).endswith(f"data_{record}.ckpt"):
            raise OSError(number, os.strerror(number), path)
        return function(path, *arguments, **options)

    return call


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_repair_ends_where_a_file_cannot_be_looked_at(out, monkeypatch, capsys, number):
    before = (out / hm.MANIFEST).read_bytes()
    monkeypatch.setattr(os, "lstat", failing_for(3, number, os.lstat))
    assert main(["verify", "--output-dir", str(out), "--all", "--repair"]) == 1
    said = capsys.readouterr().err
    assert str(file(out, 3)) in said and os.strerror(number) in said and "then run it again" in said
    assert (out / hm.MANIFEST).read_bytes() == before and all(file(out, record).exists() for record in range(RECORDS))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT, errno.EIO])
def test_repair_keeps_what_may_be_read_later(out, monkeypatch, number):
    file(out, 5).write_bytes(b"\xff" + file(out, 5).read_bytes()[1:])
    monkeypatch.setattr(verify_module, "file_hash", failing_for(3, number, verify_module.file_hash))
    result = verify(str(out), None, repair=True)
    assert [problem["id"] for problem in result["repaired"]] == [5] and not result["ok"]
    [problem] = result["problems"]
    assert problem["id"] == 3 and problem["reason"].startswith(f"cannot be read: {os.strerror(number)}; see to ")
    assert file(out, 3).exists() and 3 in hm.Manifest(str(out)).entries


def test_repair_takes_what_vanished_meanwhile_for_missing(out, monkeypatch):
    monkeypatch.setattr(verify_module, "file_hash", failing_for(3, errno.ENOENT, verify_module.file_hash))
    assert [problem["id"] for problem in verify(str(out), None, repair=True)["repaired"]] == [3]


def test_repair_removes_nothing_where_the_manifest_is_gone(out, capsys):
    (out / hm.MANIFEST).rename(out.parent / "elsewhere")
    assert main(["verify", "--output-dir", str(out), "--all", "--repair"]) == 2
    said = capsys.readouterr().err
    assert f"{out} holds 20 files of records, and no manifest.jsonl that names them; bring it back" in said
    assert all(file(out, record).exists() for record in range(RECORDS))


@pytest.mark.parametrize("killed_at", ["fsync_directory", "unlink"])
def test_a_repair_that_is_killed_leaves_nothing_that_counts_as_done(out, monkeypatch, killed_at):
    """Killed after the lines are gone and before the files are, or in the middle of that."""
    file(out, 5).write_bytes(b"\xff" + file(out, 5).read_bytes()[1:])

    def die(*_arguments, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(hm if killed_at == "fsync_directory" else os, killed_at, die)
    with pytest.raises(KeyboardInterrupt):
        verify(str(out), None, repair=True)
    monkeypatch.undo()
    manifest = hm.Manifest(str(out))
    assert 5 not in manifest.entries and not manifest.torn and len(manifest.entries) == RECORDS - 1
    assert verify(str(out), None, repair=True)["ok"] and not file(out, 5).exists()
