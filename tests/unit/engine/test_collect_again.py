# SPDX-License-Identifier: Apache-2.0
"""Collections that are collected into again: after hosts, files, lines or the mode have changed, and with hosts that are not asked."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil

import hosts
import pytest

import hs_manifest as hm
from hidden_state_bridge import collect as collect_module
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.verify import verify

RECORDS = 6
ONE, TWO = [0, 1, 2], [3, 4, 5]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return hosts.make_dataset(tmp_path_factory.mktemp("set"), RECORDS)


@pytest.fixture
def make(tmp_path, packed):
    """Hosts `one` and `two`, each with half of the records."""

    def make(*formats):
        return [hosts.make_host(tmp_path / name, packed, records, formats) for name, records in (("one", ONE), ("two", TWO))]

    return make


@pytest.fixture
def dest(tmp_path):
    return tmp_path / "collected"


def lines_of(dest):
    return {entry["id"]: entry for entry in hm.read_lines(str(dest / hm.MANIFEST)) if not entry.get("superseded")}


def file_of(directory, record):
    return directory / f"specforge/rows_0-2000/data_{record}.ckpt"


def flip(path):
    """Other bytes of the same size in another file, as a damaged disk or another extraction leaves them."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def lose(directory, *records):
    """What a repair does to damaged files: lines and files go."""
    for record in records:
        flip(file_of(directory, record))
    assert verify(str(directory), None, repair=True)["ok"]


def test_a_moved_link_that_is_to_be_a_copy_names_its_remedy(make, dest, packed):
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="symlink")
    flip(file_of(two, 4))
    result = hosts.collection(dest, [one], packed, mode="copy")
    [problem] = result["problems"]
    assert (problem["host"], problem["id"]) == ("two", 4)
    assert "has another SHA-256 than its manifest says; run verify --repair and collect.yml" in problem["reason"]
    assert not file_of(dest, 3).is_symlink() and sorted(lines_of(dest)) == list(range(RECORDS))


def test_what_is_kept_in_other_formats_is_refused(make, dest, packed):
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="copy")
    both = hosts.make_host(one.parent / "converted" / "one", packed, ONE, ("specforge", "speculators"))
    for formats in ([], ["speculators"]):
        with pytest.raises(
            Refusal, match="record 3 of two is in the collection in the format specforge, and .* collect from two as well, or"
        ):
            hosts.collection(dest, [both], packed, mode="copy", formats=formats)
    assert hosts.collection(dest, [both], packed, mode="copy", formats=["specforge"])["ok"]
    assert verify(str(dest), None)["ok"] and sorted(lines_of(dest)) == list(range(RECORDS))


def test_kept_records_are_cut_to_the_formats_that_are_asked_for(make, dest, packed):
    one, two = make("specforge", "safetensors")
    hosts.collection(dest, [one, two], packed, mode="copy")
    assert hosts.collection(dest, [one], packed, mode="copy", formats=["specforge"])["ok"]
    assert all(entry["file"].startswith("specforge/") for entry in lines_of(dest).values())
    assert verify(str(dest), None)["ok"] and not list(dest.glob("safetensors/*/*"))


def test_the_last_link_to_a_file_stays(make, dest, packed):
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="link")
    file_of(one, 1).unlink()
    for _time in range(2):
        result = hosts.collection(dest, [one, two], packed, mode="link")
        assert result["ok"] and not result["changed"] and result["records"] == RECORDS
    assert verify(str(dest), None)["ok"]


def test_what_replaces_a_copy_and_cannot_be_had_leaves_it(make, dest, packed):
    """The one file of a record comes, the other does not: neither is taken."""
    one, two = make("specforge", "safetensors")
    hosts.collection(dest, [one, two], packed, mode="copy")
    before = lines_of(dest)[1]
    hosts.make_host(one, packed, [1], ("specforge", "safetensors"))
    lines = [*hm.read_lines(str(one / hm.MANIFEST))]
    first, last = hm.files_of(lines[-1])
    flip(one / first["file"])
    first["sha256"] = collect_module.file_hash(str(one / first["file"]))
    hm.write_lines(str(one / hm.MANIFEST), lines)
    flip(one / last["file"])
    for _time in range(2):
        result = hosts.collection(dest, [one, two], packed, mode="copy")
        [problem] = result["problems"]
        assert not result["ok"] and (problem["id"], problem["file"]) == (1, last["file"]) and not result["changed"]
        assert lines_of(dest)[1] == before and verify(str(dest), None)["ok"]


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["link", "symlink", "copy"], 2)))
def test_another_mode_makes_other_files(make, dest, packed, before, after):
    """Also of a host that is not asked, from what is there: only a copy leads to no source."""
    one, two = make("specforge")
    for asked in ([one, two], [one]):
        shutil.rmtree(dest, ignore_errors=True)
        hosts.collection(dest, [one, two], packed, mode=before)
        assert hosts.collection(dest, asked, packed, mode=after)["changed"]
        for record in range(RECORDS):
            host = one if record in ONE else two
            ours, source = file_of(dest, record), file_of(host, record)
            if host in asked:
                assert ours.is_symlink() == (after == "symlink") and os.path.samefile(ours, source) == (after != "copy")
            elif before != "copy":
                assert not ours.is_symlink() or after == "symlink"
                assert os.path.samefile(ours, source) == (after != "copy")
        assert verify(str(dest), None)["ok"]
        assert hm.read_json(str(dest / hm.RUN))["provenance"]["mode"] == after
        assert not hosts.collection(dest, asked, packed, mode=after)["changed"]


@pytest.mark.parametrize(("before", "asked"), [("link", 6), ("symlink", 6), ("copy", 0)])
def test_what_is_pulled_replaces_links(make, dest, packed, before, asked):
    """Though a pull does not see the hosts' files."""
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode=before)
    result = hosts.collection(dest, [], packed, mode="ask", sources=pulled_from(one, two))
    assert sum(result["wanted"].values()) == asked
    for host in (one, two):
        pull(host, dest / ".incoming" / host.name)
    result = hosts.collection(
        dest, [], packed, mode="move", sources=pulled_from(one, two, root=lambda host: f"{dest}/.incoming/{host.name}")
    )
    assert result["ok"] and verify(str(dest), None)["ok"]
    assert all(file_of(dest, record).lstat().st_nlink == 1 and not file_of(dest, record).is_symlink() for record in range(RECORDS))


def pulled_from(*directories, root=lambda host: None):
    return [
        {
            "host": host.name,
            "manifest": str(host / hm.MANIFEST),
            "run": str(host / hm.RUN),
            "place": str(host),
            "root": root(host),
            "done": hm.encode_ranges(hm.Manifest(str(host)).entries),
        }
        for host in directories
    ]


def pull(host, incoming):
    """What states_fetch leaves of a host, whole."""
    incoming.mkdir(parents=True, exist_ok=True)
    shutil.copytree(host / "specforge", incoming / "specforge", dirs_exist_ok=True)
    shutil.copy(host / hm.MANIFEST, incoming / hm.MANIFEST)


def test_what_was_pulled_before_its_host_wrote_it_again_is_not_taken(make, dest, packed):
    """The pull was killed, and the next one could not reach the host."""
    one, two = make("specforge")
    sources = pulled_from(one, two)
    hosts.collection(dest, [], packed, mode="ask", sources=sources)
    pull(one, dest / ".incoming/one")
    pull(two, dest / ".incoming/two")
    lines = [*hm.read_lines(str(one / hm.MANIFEST))]
    flip(one / lines[1]["file"])
    lines[1]["sha256"] = collect_module.file_hash(str(one / lines[1]["file"]))
    hm.write_lines(str(one / hm.MANIFEST), lines)
    incoming = pulled_from(one, two, root=lambda host: str(dest / ".incoming" / host.name))
    result = hosts.collection(dest, [], packed, mode="move", sources=incoming)
    [problem] = result["problems"]
    assert (problem["host"], problem["id"]) == ("one", 1)
    assert "data_1.ckpt was not pulled as its line has it; see what the pull of one says" in problem["reason"]
    assert verify(str(dest), None)["ok"] and sorted(lines_of(dest)) == [0, 2, 3, 4, 5]
    pull(one, dest / ".incoming/one")
    assert hosts.collection(dest, [], packed, mode="move", sources=incoming)["ok"]
    assert verify(str(dest), None)["ok"] and not (dest / ".incoming").exists()


def test_what_was_pulled_from_a_host_that_is_not_asked_stays(make, dest, packed):
    one, two = make("specforge")
    hosts.collection(dest, [], packed, mode="ask", sources=pulled_from(one, two))
    for host in (one, two):
        pull(host, dest / ".incoming" / host.name)
    incoming = pulled_from(one, root=lambda host: str(dest / ".incoming" / host.name))
    assert hosts.collection(dest, [], packed, mode="move", sources=incoming, partial=True)["ok"]
    assert not (dest / ".incoming/one").exists() and len(list((dest / ".incoming/two").glob("specforge/*/*"))) == len(TWO)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("mode", ["list", "copy"])
def test_the_copy_that_is_there_is_used(make, dest, packed, tmp_path, said, mode):
    """Whether a host says itself what is done, or its files are seen."""
    one, two = make("specforge")
    third = hosts.make_host(tmp_path / "three", packed, [1], ("specforge",))
    file_of(one, 1).unlink()
    everywhere = pulled_from(one, two, third, root=str)
    if not said:
        everywhere = [{key: value for key, value in source.items() if key != "done"} for source in everywhere]
    result = hosts.collection(dest, [], packed, mode=mode, sources=everywhere)
    assert result["ok"] and result["hosts"] == {"one": 2, "two": 3, "three": 1} and result["superseded"] == 0
    if mode == "list":
        index = [json.loads(line) for line in (dest / collect_module.INDEX).read_text().splitlines()]
        assert all(os.path.exists(place.partition(":")[2]) for line in index for place in line["at"])


def test_a_record_that_is_nowhere_is_missing_in_an_index(make, dest, packed):
    one, two = make("specforge")
    file_of(one, 1).unlink()
    with pytest.raises(Refusal, match="1 of 6 records are done on no host"):
        hosts.collection(dest, [one, two], packed, mode="list")
    # Also where the directory is a collection that has a copy: an index is of the hosts.
    result = hosts.collection(dest, [one], packed, mode="list", partial=True)
    assert result["records"] == 2


def test_a_copy_stays_though_its_host_has_lost_the_record(make, dest, packed, tmp_path):
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="copy")
    lose(one, 1)
    for partial in (False, True):
        result = hosts.collection(dest, [one, two], packed, mode="copy", partial=partial)
        assert result["ok"] and result["hosts"] == {"one": 3, "two": 3} and file_of(dest, 1).exists()
    # Nobody vouches for it: where another host has the record, that copy is taken.
    third = hosts.make_host(tmp_path / "three", packed, [1], ("specforge",))
    assert hosts.collection(dest, [one, two, third], packed, mode="copy")["hosts"] == {"one": 2, "two": 3, "three": 1}
    assert verify(str(dest), None)["ok"]


def test_a_link_to_what_its_host_has_found_bad_does_not_stay(make, dest, packed):
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="link")
    with file_of(one, 1).open("r+b") as stream:
        stream.write(b"\xff")
    verify(str(one), None, repair=True)
    with pytest.raises(Refusal, match="1 of 6 records are done on no host"):
        hosts.collection(dest, [one, two], packed, mode="link")
    result = hosts.collection(dest, [one, two], packed, mode="link", partial=True)
    assert result["ok"] and result["records"] == 5 and verify(str(dest), None)["ok"]


def test_a_copy_that_cannot_be_read_and_that_nobody_else_has_stays(make, dest, packed, monkeypatch):
    """A mount that is away for a moment: the last copy is not taken for a damaged one, which a partial collection drops."""
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="copy")
    lose(one, 1)

    def away(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(collect_module, "file_hash", away)
    with pytest.raises(OSError, match="data_1"):
        hosts.collection(dest, [one, two], packed, mode="copy", partial=True)
    monkeypatch.undo()
    assert file_of(dest, 1).exists() and hosts.collection(dest, [one, two], packed, mode="copy")["records"] == RECORDS


@pytest.mark.parametrize("dataset_dir", [None, "/nowhere"])
def test_that_records_are_missing_is_not_left_unsaid(make, dest, packed, dataset_dir):
    one, _two = make("specforge")
    text = (
        rf"whether records are missing cannot be told .* not below {dataset_dir}; .*\(extraction_collect_dataset_dir\), or .*partial: true"
    )
    with pytest.raises(Refusal, match=text):
        hosts.collection(dest, [one], None, dataset_dir=dataset_dir)
    assert not (dest / hm.MANIFEST).exists()
    assert hosts.collection(dest, [one], None, dataset_dir=dataset_dir, partial=True)["expected"] is None


@pytest.mark.parametrize("content", [b"", b"torn", None])
def test_a_damaged_vocabulary_mapping_is_found_and_written_again(make, dest, packed, content):
    both = make("specforge")
    hosts.collection(dest, both, packed, draft_vocab_size=20)
    mapping = dest / "vocab_mapping.pt"
    good = mapping.read_bytes()
    mapping.write_bytes(good[:-5] + b"torn!" if content is None else content)
    [problem] = verify(str(dest), 0)["problems"]
    assert problem["file"] == "vocab_mapping.pt" and "run.json says" in problem["reason"]
    assert hosts.collection(dest, both, packed, draft_vocab_size=20)["changed"]
    assert mapping.read_bytes() == good and verify(str(dest), None)["ok"]
    # Where none is asked for, a damaged one goes.
    mapping.write_bytes(b"torn")
    assert hosts.collection(dest, both, packed)["changed"] and not mapping.exists() and verify(str(dest), None)["ok"]
    assert not hosts.collection(dest, both, packed)["changed"]


def test_what_is_of_all_records_is_not_whole_while_they_change(make, dest, packed, monkeypatch):
    """Killed between the records and the mapping of them: that is of the records before."""
    one, two = make("specforge")
    hosts.collection(dest, [one], packed, partial=True, draft_vocab_size=20)
    before = (dest / "vocab_mapping.pt").read_bytes()

    def die(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(collect_module.vocab, "write_vocab", die)
    with pytest.raises(KeyboardInterrupt):
        hosts.collection(dest, [one, two], packed, draft_vocab_size=20)
    monkeypatch.undo()
    [problem] = verify(str(dest), None)["problems"]
    assert problem["file"] == "vocab_mapping.pt" and "is not in run.json; the next collection brings it again" in problem["reason"]
    assert hosts.collection(dest, [one, two], packed, draft_vocab_size=20)["changed"] and verify(str(dest), None)["ok"]
    assert (dest / "vocab_mapping.pt").read_bytes() != before
    # Where the records change and none is asked for, the one of the records before goes.
    lose(one, 1)
    file_of(dest, 1).unlink()
    assert hosts.collection(dest, [one, two], packed, partial=True)["records"] == RECORDS - 1
    assert not (dest / "vocab_mapping.pt").exists() and verify(str(dest), None)["ok"]


def test_nothing_is_asked_for_into_a_collection_of_another_run(make, dest, packed, tmp_path):
    """It would be pulled, for hours, before the move is refused."""
    one, two = make("specforge")
    hosts.collection(dest, [one, two], packed, mode="copy")
    other = hosts.make_host(tmp_path / "other", packed, ONE, ("specforge",), "post_norm")
    with pytest.raises(Refusal, match="holds another run"):
        hosts.collection(dest, [other], packed, mode="ask", partial=True)
    assert not (dest / collect_module.INCOMING).exists()
