# SPDX-License-Identifier: Apache-2.0
"""The parts of the capture runtime that need no torch."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hs_capture import capture, counters, directory, dumpfile, guards, layers, settings, spool


@pytest.mark.parametrize(("count", "expected"), [(61, [1, 29, 57]), (8, [1, 3, 4]), (7, [1, 2, 3])])
def test_default_layers(count: int, expected: list[int]) -> None:
    assert layers.default_layers(count) == expected
    assert layers.parse_layers(" ", count) == expected


@pytest.mark.parametrize("count", [1, 4, 6])
def test_default_layers_of_a_small_model_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="name the layers"):
        layers.default_layers(count)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,3,3", "repeat"),
        ("3,1", "not ascending; write 1,3"),
        ("1,8", "layer 8 is out of range; the model has layers 0 to 7"),
        ("-1,3", "'-1' is not a layer number"),
        ("1,,3", "'' is not a layer number"),
        ("one", "not a layer number"),
        ("²", "not a layer number"),
    ],
)
def test_layers_that_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layers.parse_layers(text, 8)
    with pytest.raises(guards.CaptureRefused, match="correct SGLANG_HS_DUMP_LAYERS"):
        settings.read_settings({"SGLANG_HS_DUMP_DIR": "/d", "SGLANG_HS_DUMP_LAYERS": text}, 8)


def test_layers_round_trip() -> None:
    assert layers.parse_layers("0, 3,7", 8) == [0, 3, 7]
    assert layers.format_layers([0, 3, 7]) == "0,3,7"
    with pytest.raises(ValueError, match="name at least one"):
        layers.check_layers([], 8)


def test_settings_of_the_environment() -> None:
    read = settings.read_settings({"SGLANG_HS_DUMP_DIR": "/d", "SGLANG_HS_DUMP_FINAL": ""}, 61)
    assert read == settings.Settings("/d", (1, 29, 57), "post_norm", "hsb-")
    assert read.tensor_names() == ("layer_1", "layer_29", "layer_57", "final_post_norm")
    both = settings.read_settings(
        {
            "SGLANG_HS_DUMP_DIR": "/d",
            "SGLANG_HS_DUMP_LAYERS": "2",
            "SGLANG_HS_DUMP_FINAL": "both",
            "SGLANG_HS_DUMP_RID_PREFIX": "run7-",
        },
        8,
    )
    assert both.tensor_names() == ("layer_2", "final_post_norm", "final_pre_norm")
    assert both.rid_prefix == "run7-"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_HS_DUMP_DIR", "dumps"),
        ("SGLANG_HS_DUMP_FINAL", "postnorm"),
        ("SGLANG_HS_DUMP_RID_PREFIX", "../"),
    ],
)
def test_settings_that_are_refused_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(guards.CaptureRefused, match=f"{name}=.*unset SGLANG_HS_DUMP_DIR"):
        settings.read_settings({"SGLANG_HS_DUMP_DIR": "/d", name: value}, 8)


HEALTHY = {
    "pp_size": 1,
    "attn_cp_size": 1,
    "moe_a2a_backend": "none",
    "disaggregation_mode": "null",
    "enable_dp_attention": False,
    "speculative_algorithm": None,
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},
}


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("pp_size", 2, "--pp-size 1"),
        ("enable_dp_attention", True, "drop --enable-dp-attention"),
        ("dp_size", 2, "start with --dp-size 1"),
        ("enable_two_batch_overlap", True, "drop --enable-two-batch-overlap"),
        ("speculative_algorithm", "EAGLE3", "drop --speculative-algorithm"),
        ("moe_a2a_backend", "deepep", "--moe-a2a-backend none"),
        ("enable_deepep_moe", True, "drop --enable-deepep-moe"),
        ("moe_dp_size", 2, "--moe-dp-size 1"),
        ("attn_dp_size", 2, "--attn-dp-size 1"),
        ("dwdp_size", 8, "--dwdp-size 1"),
        ("enable_nsa_prefill_context_parallel", True, "drop --enable-nsa-prefill-context-parallel"),
        ("moe_dense_tp_size", 1, "drop --moe-dense-tp-size"),
        ("enable_attn_tp_input_scattered", True, "drop --enable-attn-tp-input-scattered"),
        ("enable_layernorm_sp", True, "drop --enable-layernorm-sp"),
        ("attn_cp_size", 2, "--attn-cp-size 1"),
        ("dcp_size", 2, "--dcp-size 1"),
        ("enable_prefill_cp", True, "drop --enable-prefill-cp"),
        ("enable_prefill_context_parallel", True, "drop --enable-prefill-context-parallel"),
        ("enable_dsa_prefill_context_parallel", True, "drop --enable-dsa-prefill-context-parallel"),
        ("enable_mixed_chunk", True, "drop --enable-mixed-chunk"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode null"),
        ("enable_pdmux", True, "drop --enable-pdmux"),
        ("dllm_algorithm", "LowConfidence", "drop --dllm-algorithm"),
        ("cuda_graph_config", {"prefill": {"backend": "breakable"}}, "--disable-prefill-cuda-graph"),
        ("cuda_graph_config", SimpleNamespace(prefill=SimpleNamespace(backend="full")), "--disable-prefill-cuda-graph"),
    ],
)
def test_server_settings_that_corrupt_states_are_refused(name: str, value: Any, remedy: str) -> None:
    guards.check_settings(HEALTHY.get)
    with pytest.raises(guards.CaptureRefused, match=f"{remedy}, or unset SGLANG_HS_DUMP_DIR"):
        guards.check_settings({**HEALTHY, name: value}.get)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("disable_piecewise_cuda_graph", False, "start with --disable-piecewise-cuda-graph"),
        ("enable_piecewise_cuda_graph", True, "drop --enable-piecewise-cuda-graph"),
    ],
)
def test_prefill_graphs_of_releases_without_a_configuration_are_refused(name: str, value: bool, remedy: str) -> None:
    early = {key: setting for key, setting in HEALTHY.items() if key != "cuda_graph_config"}
    guards.check_settings({**early, name: not value}.get)
    with pytest.raises(guards.CaptureRefused, match=f"{remedy}, or unset SGLANG_HS_DUMP_DIR"):
        guards.check_settings({**early, name: value}.get)


def test_dump_directory_is_made_private_and_swept(tmp_path: Path) -> None:
    path = tmp_path / "made" / "dumps"
    directory.DumpDirectory(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    alive = os.getppid()
    names = ["a.0.safetensors"] + [dumpfile.temporary_name("a.0.safetensors", pid) for pid in (gone.pid, os.getpid(), alive)]
    for name in names:
        (path / name).touch()
    directory.DumpDirectory(str(path))
    assert sorted(entry.name for entry in path.iterdir()) == sorted([names[0], names[3]])


def test_ranks_of_the_same_pid_leave_each_others_files_alone(tmp_path: Path) -> None:
    """Each is in a pid namespace of its own."""
    one, other = directory.DumpDirectory(str(tmp_path / "dumps")), directory.DumpDirectory(str(tmp_path / "dumps"), owner=False)
    under_way = one.temporary()
    os.close(one.make(under_way, one.handle()))
    other.put("hsb-a.0.fp1", b"content", other.handle())
    assert dumpfile.temporary_pid(under_way) == os.getpid()
    assert sorted(os.listdir(tmp_path / "dumps")) == sorted([under_way, "hsb-a.0.fp1"])


def test_a_temporary_file_of_another_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = directory.DumpDirectory(str(tmp_path / "dumps"))
    under_way = held.temporary()
    os.close(held.make(under_way, held.handle()))
    monkeypatch.setattr(held, "temporary", lambda: under_way)
    writes = spool.Spool(held, 1 << 20, 1.0, counters.Counters())
    for write in (lambda: held.put("hsb-a.error.json", b"", held.handle()), lambda: writes.publish("hsb-a.0.safetensors", [b"a"])):
        with pytest.raises(FileExistsError):
            write()
        assert os.listdir(tmp_path / "dumps") == [under_way]


@pytest.mark.parametrize("kind", ["link", "file", "open", "unmakable", "another's"])
def test_dump_directory_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "dumps"
    (tmp_path / "real").mkdir(mode=0o700)
    if kind == "link":
        path.symlink_to(tmp_path / "real")
    elif kind == "file":
        path.touch()
    elif kind == "open":
        path.mkdir()
        path.chmod(0o755)
    elif kind == "unmakable":
        (tmp_path / "plain").touch()
        path = tmp_path / "plain" / "dumps"
    else:
        path.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    reasons = {
        "link": "is a link or a file",
        "file": "is a link or a file",
        "open": f"mode 0755.*run: chmod 700 {path}",
        "unmakable": "cannot be made",
        "another's": "belongs to uid",
    }
    with pytest.raises(guards.CaptureRefused, match=reasons[kind]):
        directory.DumpDirectory(str(path))


@pytest.mark.parametrize("rid", ["", ".x", "a/b", "a b", "x" * 129, "a\n", "é"])
def test_rids_that_cannot_name_a_file(rid: str) -> None:
    for name in (lambda: dumpfile.dump_name(rid, 0), lambda: dumpfile.error_name(rid)):
        with pytest.raises(dumpfile.DumpError, match="cannot name a dump"):
            name()


def test_names() -> None:
    assert dumpfile.dump_name("hsb-x.1", 16) == "hsb-x.1.16.safetensors"
    assert dumpfile.error_name("hsb-x") == "hsb-x.error.json"
    assert dumpfile.temporary_pid(dumpfile.temporary_name("a.0.safetensors")) == os.getpid()
    assert dumpfile.temporary_pid("a.0.safetensors") is None
    with pytest.raises(dumpfile.DumpError, match="cannot start"):
        dumpfile.dump_name("a", -1)


def test_error_marker_round_trip(tmp_path: Path) -> None:
    path = tmp_path / dumpfile.error_name("hsb-1")
    path.write_bytes(dumpfile.encode_error("the reason", "the remedy"))
    assert dumpfile.read_error(path) == {"reason": "the reason", "remedy": "the remedy"}
    path.write_text("[]")
    with pytest.raises(dumpfile.DumpError, match="not an error marker"):
        dumpfile.read_error(path)


def test_importing_the_runtime_imports_no_third_party_package() -> None:
    code = "import sys, hs_capture; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    root = str(Path(capture.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": root})
