# SPDX-License-Identifier: Apache-2.0
"""Every format holds just what was captured, and gives it back; one record in several formats has one line."""

from __future__ import annotations

import errno

import hosts
import pytest
import torch
from fake_server import LAYERS, FakeServer, expected_state
from small_tmpfs import small_tmpfs

import hs_manifest
from hidden_state_bridge import store
from hidden_state_bridge.formats import FORMATS
from hidden_state_bridge.formats.files import Stored
from hidden_state_bridge.hashes import file_hash
from hidden_state_bridge.verify import verify
from hs_capture import dumpfile

RECORDS = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("formats")
    dataset = hosts.make_dataset(directory, RECORDS)
    return dataset, hosts.make_host(directory / "one", dataset, list(range(RECORDS)), tuple(FORMATS))


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_gives_back_what_was_captured(made, name):
    dataset, host = made
    for record, entry in hs_manifest.Manifest(str(host)).entries.items():
        tokens = entry["tokens"]
        [file] = [file for file in hs_manifest.files_of(entry) if file["file"].startswith(f"{name}/")]
        path = host / file["file"]
        assert (path.stat().st_size, file_hash(str(path))) == (file["bytes"], file["sha256"])
        content = FORMATS[name].load(str(path), [dumpfile.layer_name(layer) for layer in hosts.LAYERS])
        assert content.input_ids.tolist() == dataset.record(record).input_ids.tolist()
        assert (content.loss_mask is None) == (name == "speculators")
        if content.loss_mask is not None:
            assert content.loss_mask.tolist() == dataset.record(record).loss_mask.tolist()
        finals = {"post_norm": [dumpfile.POST_NORM], "pre_norm": [dumpfile.PRE_NORM], None: [dumpfile.POST_NORM, dumpfile.PRE_NORM]}
        assert sorted(content.names) == sorted(content.layer_names + finals[FORMATS[name].KEEPS])
        for state in content.names:
            assert torch.equal(content.tensors[state], hosts.state(record, state, tokens))


@pytest.mark.parametrize("name", ["specforge", "speculators", "modelopt"])
def test_a_file_of_other_layers_is_not_read(made, name):
    _dataset, host = made
    entry = hs_manifest.Manifest(str(host)).entries[0]
    [file] = [file for file in hs_manifest.files_of(entry) if file["file"].startswith(f"{name}/")]
    with pytest.raises(ValueError, match="are not those of 5 layers"):
        FORMATS[name].load(str(host / file["file"]), [f"layer_{layer}" for layer in range(5)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_full_file_system_is_said_as_that_and_leaves_nothing(made, tmp_path, name):
    """Writers make errors of their own of it, which no remedy could be given for."""
    dataset, _host = made
    record = dataset.record(0)
    names = [dumpfile.layer_name(layer) for layer in hosts.LAYERS]
    tensors = {state: torch.randn((len(record.input_ids), 1 << 15)) for state in (*names, dumpfile.POST_NORM, dumpfile.PRE_NORM)}
    states = Stored(torch.tensor(record.input_ids), None, names, tensors)
    with small_tmpfs(tmp_path / "out", "300k"):
        with pytest.raises(OSError, match="data_0|hs_0") as caught:
            store.save(str(tmp_path / "out"), (name,), store.Access(), record, states)
        assert caught.value.errno == errno.ENOSPC
        assert not list(store.files_below(str(tmp_path / "out")))


def test_zstd_holds_a_file_of_the_format_safetensors(made, tmp_path):
    import zstandard

    _dataset, host = made
    packed = next((host / "safetensors_zstd").rglob("*.zst"))
    with packed.open("rb") as stream, (tmp_path / packed.stem).open("wb") as plain:
        zstandard.ZstdDecompressor().copy_stream(stream, plain)
    names = [dumpfile.layer_name(layer) for layer in hosts.LAYERS]
    ours = FORMATS["safetensors"].load(str(tmp_path / packed.stem), names)
    other = FORMATS["safetensors"].load(str(host / "safetensors" / packed.parent.name / packed.stem), names)
    assert ours.metadata == other.metadata and ours.metadata["final"] == "both"
    assert all(torch.equal(ours.tensors[name], other.tensors[name]) for name in other.names)


def test_one_line_names_the_files_of_all_formats(site):
    formats = ["specforge", "modelopt", "safetensors"]
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, format=formats)
        asked = len(server.requests)
        site.run(url=server.url, format=formats)
        assert len(server.requests) == asked
        out = site.run(status=2, url=server.url, format=formats[:1])
    assert "holds files of the format modelopt, safetensors, specforge, and this run writes specforge" in out
    lines = site.lines()
    assert len(lines) == len(site.dataset)
    for entry in lines:
        files = entry["files"]
        assert [file["file"].partition("/")[0] for file in files] == formats
        assert entry["bytes"] == sum((site.output / file["file"]).stat().st_size for file in files)
        content = torch.load(site.output / files[1]["file"], weights_only=True)
        ids = site.dataset.record(entry["id"]).input_ids.tolist()
        assert torch.equal(content["aux_hidden_states"], torch.cat([expected_state(ids, layer) for layer in LAYERS], dim=-1))
        assert content["hidden_states_prenorm"] is False
    result = verify(str(site.output), None)
    assert result["ok"] and result["checked"] == 3 * len(lines)
    (site.output / lines[0]["files"][2]["file"]).unlink()
    (site.output / lines[1]["files"][1]["file"]).write_bytes(b"")
    result = verify(str(site.output), None)
    assert {problem["id"] for problem in result["problems"]} == {lines[0]["id"], lines[1]["id"]}
    with FakeServer(site.dumps) as server:
        site.run(url=server.url, format=formats)
        assert len(server.requests) == 2
    assert verify(str(site.output), None)["ok"]
