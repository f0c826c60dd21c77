# SPDX-License-Identifier: Apache-2.0
"""Conversions: the same states in another format, what cannot be converted, and every way to be interrupted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import hosts
import pytest
import torch

import hs_manifest as hm
import hs_progress
from hidden_state_bridge import convert, store
from hidden_state_bridge.__main__ import main
from hidden_state_bridge.errors import ConfigError
from hidden_state_bridge.formats import FORMATS
from hidden_state_bridge.verify import verify
from hs_capture import dumpfile

RECORDS = 8
NAMES = [dumpfile.layer_name(layer) for layer in hosts.LAYERS]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return hosts.make_dataset(tmp_path_factory.mktemp("set"), RECORDS)


@pytest.fixture(autouse=True)
def signals():
    """A conversion handles them as the service that it is."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Run:
    """One host's output directory, and conversions of it."""

    def __init__(self, directory, packed):
        self.directory, self.packed = directory, packed
        self.source, self.output = directory / "one", directory / "converted" / "one"

    def make(self, *formats, final="both"):
        hosts.make_host(self.source, self.packed, list(range(RECORDS)), formats, final)
        return self

    def convert(self, *formats, status=0, **changes):
        config = {"source_dir": str(self.source), "output_dir": str(self.output), "format": list(formats), "min_free_bytes": 0}
        config.update({"dataset_dir": str(Path(self.packed.path).parent), **changes})
        file = self.directory / "convert.json"
        file.write_text(json.dumps(config))
        assert main(["convert", "--config", str(file)]) == status

    def check(self, *formats):
        """Each record once, in each format, with just the states that were captured."""
        entries = hm.Manifest(str(self.output)).entries
        assert sorted(entries) == list(range(RECORDS))
        result = verify(str(self.output), None)
        assert result["ok"], result["problems"]
        source = hm.Manifest(str(self.source)).entries
        for record, entry in entries.items():
            for key in ("source", "source_file", "line", "tokens", "sglang_version"):
                assert entry[key] == source[record][key]
            assert [file["file"].partition("/")[0] for file in hm.files_of(entry)] == list(formats)
            for name, file in zip(formats, hm.files_of(entry)):
                content = FORMATS[name].load(str(self.output / file["file"]), NAMES)
                assert content.input_ids.tolist() == self.packed.record(record).input_ids.tolist()
                if name != "speculators":
                    assert content.loss_mask.tolist() == self.packed.record(record).loss_mask.tolist()
                for state, tensor in content.tensors.items():
                    assert torch.equal(tensor, hosts.state(record, state, entry["tokens"]))
        assert hm.read_json(str(self.output / hm.RUN))["identity"] == hm.read_json(str(self.source / hm.RUN))["identity"]
        assert hs_progress.observe(str(self.output))["state"] == "done"


@pytest.fixture
def run(tmp_path, packed):
    return Run(tmp_path, packed)


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (["safetensors"], ["specforge", "speculators", "modelopt", "safetensors_zstd"]),
        (["safetensors_zstd"], ["safetensors"]),
        (["specforge"], ["modelopt"]),
        (["modelopt"], ["specforge", "safetensors"]),
        (["speculators"], ["safetensors"]),
        (["modelopt", "speculators"], ["speculators"]),
        (["modelopt", "safetensors"], ["safetensors_zstd"]),
        (["modelopt", "safetensors"], ["specforge", "speculators"]),
    ],
)
def test_one_format_becomes_others(run, source, targets):
    run.make(*source).convert(*targets)
    run.check(*targets)
    before = {path: path.stat().st_ino for path in run.output.rglob("*") if path.name != hm.STATUS}
    run.convert(*targets)
    assert {path: path.stat().st_ino for path in run.output.rglob("*") if path.name != hm.STATUS} == before


def test_a_state_that_is_not_there_is_not_made_up(run, capsys):
    run.make("specforge", "modelopt")
    run.convert("speculators", status=2)
    message = capsys.readouterr().err
    assert "format speculators needs final pre_norm or both, not post_norm, which is what files of the format specforge hold" in message
    assert "One state cannot be made from the other" in message and "extraction_final: both" in message
    assert not run.output.exists()
    # Plain files of these hold no more than they did, whatever the run captured.
    run.convert("safetensors")
    run.source, run.output = run.output, run.directory / "again"
    run.convert("speculators", status=2)
    assert "which is what files of the format safetensors hold" in capsys.readouterr().err


def test_all_that_was_captured_is_kept_where_one_of_several_formats_keeps_it(run):
    run.make("modelopt", "safetensors").convert("safetensors_zstd")
    entry = hm.Manifest(str(run.output)).entries[0]
    content = FORMATS["safetensors_zstd"].load(str(run.output / entry["file"]), NAMES)
    assert {dumpfile.POST_NORM, dumpfile.PRE_NORM} <= set(content.tensors)


def test_formats_that_no_one_format_serves_are_converted_one_at_a_time(run, capsys):
    run.make("specforge", "speculators").convert("modelopt", "speculators", status=2)
    message = capsys.readouterr().err
    assert "No one format there serves all of modelopt, speculators, but each is served by one: convert them one at a time" in message
    assert "extract again" not in message
    run.convert("modelopt")
    run.check("modelopt")


def test_a_bad_file_of_a_conversion_names_the_conversion(run, capsys):
    run.make("safetensors").convert("safetensors_zstd")
    run.source, run.output = run.output, run.directory / "again"
    flipped = run.source / "safetensors_zstd/rows_0-2000/data_2.safetensors.zst"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x7f")
    repair = f"verify.yml -e verify_repair=true -e extraction_output_dir={run.source.parent}"
    run.convert("specforge", status=1)
    assert f"has another SHA-256 than the manifest says; run {repair} and convert.yml" in capsys.readouterr().out
    [problem] = verify(str(run.source), None)["problems"]
    assert f"{repair} puts it back into the plan, and the next convert.yml writes it again" in problem["reason"]
    result = hosts.collection(run.directory / "collected", [run.source], run.packed, mode="copy")
    assert f"run {repair} and convert.yml, then collect again" in result["problems"][0]["reason"]
    assert verify(str(run.source), None, repair=True)["writer"] == "convert.yml"


def test_a_bad_file_is_named_and_the_others_are_converted(run, capsys):
    run.make("safetensors")
    flipped, torn = (run.source / f"safetensors/rows_0-2000/data_{record}.safetensors" for record in (2, 5))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x7f")
    lines = [json.loads(line) for line in (run.source / hm.MANIFEST).read_text().splitlines()]
    torn.write_bytes(b"no safetensors")
    lines[5].update(bytes=14, sha256=convert.file_hash(str(torn)))
    hm.write_lines(str(run.source / hm.MANIFEST), lines)
    run.convert("specforge", status=1)
    said = capsys.readouterr().out
    assert f"record 2 failed: {flipped} has another SHA-256 than the manifest says; run verify.yml -e verify_repair=true" in said
    assert f"record 5 failed: {torn} cannot be read as safetensors" in said
    status = hm.read_json(str(run.output / hm.STATUS))
    assert (status["state"], status["failed_total"], status["records_done"]) == ("failed", 2, RECORDS - 2)
    assert verify(str(run.output), None)["ok"]
    verify(str(run.source), None, repair=True)
    for path in (flipped, torn):
        path.unlink(missing_ok=True)
    manifest = hm.Manifest(str(run.source))
    manifest.repair(without=[2, 5])
    hosts.make_host(run.source, run.packed, [2, 5], ("safetensors",))
    run.convert("specforge")
    run.check("specforge")


def test_files_of_another_record_are_not_taken(run, capsys):
    run.make("speculators")
    lines = [json.loads(line) for line in (run.source / hm.MANIFEST).read_text().splitlines()]
    for key in ("file", "bytes", "sha256"):
        lines[3][key], lines[4][key] = lines[4][key], lines[3][key]
    hm.write_lines(str(run.source / hm.MANIFEST), lines)
    run.convert("safetensors", status=1)
    assert "has other token ids than record 3 of the data set" in capsys.readouterr().out


@pytest.mark.parametrize("stage", [1, 5, 9, 14])
def test_killed_anywhere_and_started_again(run, monkeypatch, stage):
    """Killed as a file or a manifest becomes durable: the second start leaves each record once."""
    run.make("safetensors")
    hosts.die_at(monkeypatch, stage)
    with pytest.raises(KeyboardInterrupt):
        run.convert("specforge", workers=1)
    monkeypatch.undo()
    with (run.output / hm.MANIFEST).open("a") as stream:
        stream.write('{"id": 1, "sou')
    for path in run.output.glob("specforge/*"):
        (path / dumpfile.temporary_name("data_1.ckpt", 7)).write_bytes(b"torn")
    run.convert("specforge")
    run.check("specforge")


def test_a_stop_finishes_what_is_at_work_and_the_next_start_goes_on(run, monkeypatch):
    run.make("safetensors")
    original = store.save

    def stop(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(store, "save", stop)
    run.convert("specforge", workers=1)
    status = hm.read_json(str(run.output / hm.STATUS))
    assert status["state"] == "stopped" and 0 < status["records_done"] < RECORDS
    assert "start the conversion again and it goes on" in status["message"]
    monkeypatch.undo()
    run.convert("specforge")
    run.check("specforge")


def test_what_is_under_way_keeps_its_room(run, monkeypatch, capsys):
    """As many files as are at work at once would go beyond the low-water mark before the first of them is on the disk."""
    run.make("safetensors")
    sizes = sorted(entry["bytes"] for entry in hm.Manifest(str(run.source)).entries.values())
    monkeypatch.setattr(convert, "free_bytes", lambda _path: 3 * sizes[-1])
    run.convert("specforge", "modelopt", status=2, workers=RECORDS)
    assert "that are in flight or next, and 0 B stay free (min_free_bytes); make room and start again" in capsys.readouterr().err
    assert len(list(run.output.glob("*/*/*"))) <= 4 * 2
    monkeypatch.undo()
    run.convert("specforge", "modelopt")
    run.check("specforge", "modelopt")


def test_what_cannot_be_done_is_refused(run, capsys, monkeypatch):
    run.make("safetensors")
    for changes, text in [
        ({"output_dir": str(run.source)}, "is, holds or lies in source_dir"),
        ({"output_dir": str(run.source / "more")}, "is, holds or lies in source_dir"),
        ({"output_dir": str(run.directory)}, "is, holds or lies in source_dir"),
        ({"output_dir": "relative"}, "output_dir is 'relative'; give an absolute path"),
        ({"format": "parquet"}, "format is 'parquet'; it must be one of specforge"),
        ({"surplus": 1}, "unknown setting surplus"),
        ({"source_dir": str(run.directory / "nothing")}, "has no run.json; give one host's output directory"),
        ({"min_free_bytes": 1 << 60}, "make room and start again: the conversion goes on where it stopped"),
    ]:
        run.convert("specforge", status=2, **changes)
        assert text in capsys.readouterr().err
    run.convert("specforge")
    run.convert("modelopt", status=2)
    assert "holds files of the format specforge, and this run writes modelopt" in capsys.readouterr().err
    lock = hm.Lock(str(run.output))
    monkeypatch.setattr(hm.Lock.__init__, "__defaults__", (0.1,))
    run.convert("specforge", status=2)
    assert "is locked by another extractor" in capsys.readouterr().err
    lock.close()
    with pytest.raises(ConfigError, match="a conversion needs source_dir, output_dir and format"):
        convert.read_convert_config({"format": "specforge"})


def test_files_without_a_mask_need_the_data_set(run, capsys):
    run.make("speculators").convert("safetensors", status=2, dataset_dir=None)
    assert "files of the format speculators hold no loss mask, and the packed data set" in capsys.readouterr().err
    hosts.make_host(run.directory / "empty", run.packed, [], ("safetensors",))
    run.source = run.directory / "empty"
    run.convert("specforge", status=2)
    assert "has no record that is done; run extract.yml first" in capsys.readouterr().err
