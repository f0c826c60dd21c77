# SPDX-License-Identifier: Apache-2.0
"""What happens when a patched model opens the capture, on stand-ins for the parts of SGLang that are asked."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hs_capture import capture, directory, engine, follower, guards


def engine_modules(record: Any, monkeypatch: pytest.MonkeyPatch, rank: int = 0, rids: bool = True, **names: Any) -> None:
    """Stand in for the parts of SGLang that the runtime asks."""
    runtime = ModuleType("sglang.srt.runtime_context")
    batches = ModuleType("sglang.srt.model_executor.forward_batch_info")
    batches.ForwardBatch = SimpleNamespace(__dataclass_fields__={"rids": None} if rids else {})
    runtime.get_parallel = lambda: SimpleNamespace(tp_rank=rank, tp_size=2)
    arguments = ModuleType("sglang.srt.server_args")
    version = ModuleType("sglang.version")
    version.__version__ = "0.5.20"
    if record is not None:
        runtime.get_server_args = lambda: record
    for name, value in names.items():
        setattr(arguments, name, value)
    for module in (
        ModuleType("sglang"),
        ModuleType("sglang.srt"),
        runtime,
        arguments,
        version,
        ModuleType("sglang.srt.model_executor"),
        batches,
    ):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("owner", ["sglang.srt.distributed", "vllm.distributed"])
def test_the_rank_is_read_from_who_keeps_it(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    """The context of 0.5.19 and later aside, SGLang's own state, or vLLM's in the first releases."""
    engine_modules(None, monkeypatch)
    for name in ("sglang.srt.runtime_context", "sglang.srt.distributed"):
        monkeypatch.setitem(sys.modules, name, None)
    state = ModuleType(owner)
    state.get_tensor_model_parallel_rank = lambda: 1
    state.get_tensor_model_parallel_world_size = lambda: 4
    monkeypatch.setitem(sys.modules, owner.partition(".")[0], sys.modules.get(owner.partition(".")[0], ModuleType("vllm")))
    monkeypatch.setitem(sys.modules, owner, state)
    assert engine.tensor_parallel() == (1, 4)


def test_settings_in_effect_are_read_by_each_accessor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_modules(SimpleNamespace(pp_size=1, resolved_dict=lambda: {"pp_size": 2}), monkeypatch)
    assert engine.server_settings()("pp_size") == 2
    resolved = SimpleNamespace(pp_size=3)
    engine_modules(SimpleNamespace(pp_size=1, dcp_size=4, _resolved=lambda: resolved), monkeypatch)
    assert [engine.server_settings()(name) for name in ("pp_size", "dcp_size", "unknown")] == [3, 4, None]
    engine_modules(None, monkeypatch, get_global_server_args=lambda: SimpleNamespace(pp_size=5))
    assert engine.server_settings()("pp_size") == 5
    engine_modules(None, monkeypatch)
    early = ModuleType("sglang.srt.managers.schedule_batch")
    early.global_server_args_dict = {"enable_dp_attention": True}
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", ModuleType("sglang.srt.managers"))
    monkeypatch.setitem(sys.modules, early.__name__, early)
    assert [engine.server_settings()(name) for name in ("enable_dp_attention", "pp_size")] == [True, None]
    assert engine.tensor_parallel() == (0, 2)
    assert engine.sglang_version() == "0.5.20"


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's process has opened nothing yet."""
    monkeypatch.setattr(capture, "_opened", None)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_fusion_is_switched_off_where_no_flag_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    asked = SimpleNamespace(enable_flashinfer_allreduce_fusion=True)
    engine_modules(None, monkeypatch, rank=rank, get_global_server_args=lambda: asked)
    open_capture("B")
    assert asked.enable_flashinfer_allreduce_fusion is False
    # From 0.5.10 on there is a flag, and what it came to is SGLang's.
    flagged = SimpleNamespace(enable_flashinfer_allreduce_fusion=True, enforce_disable_flashinfer_allreduce_fusion=False)
    engine_modules(flagged, monkeypatch, rank=rank)
    engine.switch_fusion_off()
    assert flagged.enable_flashinfer_allreduce_fusion is True


def test_early_releases_keep_the_fusion_in_a_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_modules(None, monkeypatch)
    early = ModuleType("sglang.srt.managers.schedule_batch")
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", ModuleType("sglang.srt.managers"))
    monkeypatch.setitem(sys.modules, early.__name__, early)
    for asked, left in (({"enable_flashinfer_allreduce_fusion": True}, {"enable_flashinfer_allreduce_fusion": False}), ({}, {})):
        early.global_server_args_dict = asked
        engine.switch_fusion_off()
        assert asked == left


class Opened:
    """In the place of a Writer: whether it was closed."""

    def __init__(self, *_given: Any) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_of_two_patched_classes_opens_one_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch, rank=rank)
    made: list[Opened] = []
    monkeypatch.setattr(capture, "open_writer", lambda *given: made.append(Opened()) or made[-1])

    def built(name: str) -> Any:
        return type(name, (), {"blocks": [None] * 8, "ln_f": SimpleNamespace(weight=SimpleNamespace(shape=(64,)))})()

    model = built("Qwen3Model")
    first, second = (capture.open_capture(model, "blocks", "ln_f", patch_version="1", family="tuple") for _class in range(2))
    assert first is not second
    assert [one.closed for one in made] == ([True, False] if rank == 0 else [])
    with pytest.raises(guards.CaptureRefused, match=r"Qwen3Model and Qwen2Model of one process.*take the patch out"):
        capture.open_capture(built("Qwen2Model"), "blocks", "ln_f", patch_version="1", family="tuple")
    assert [one.closed for one in made] == ([True, False] if rank == 0 else [])


def open_capture(family: str = "D", **norm: Any) -> capture.Capture | follower.Follower | None:
    norm = norm or {"weight": SimpleNamespace(shape=(64,))}
    model = SimpleNamespace(blocks=[None] * 8, ln_f=SimpleNamespace(**norm), config=SimpleNamespace(hidden_size=64))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(capture, "_opened", None)
        patched.setattr(capture, "open_writer", lambda asked, *_rest: directory.DumpDirectory(asked.directory))
        return capture.open_capture(model, "blocks", "ln_f", patch_version="1", family=family)


def test_only_rank_0_captures_and_makes_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dumps"
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(path))
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch, rank=1)
    assert open_capture().begin(SimpleNamespace(forward_mode=SimpleNamespace(name="EXTEND"), rids=["hsb-a", "hsb-fp"])) is None
    assert not path.exists()
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch)
    assert isinstance(open_capture(), capture.Capture)
    assert path.is_dir()


@pytest.mark.parametrize(("nodes", "prints"), [(1, True), (2, False), (None, True)])
def test_ranks_on_other_nodes_write_no_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int | None, prints: bool
) -> None:
    """Nobody would read or remove them there."""
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(nnodes=nodes), monkeypatch, rank=1)
    assert (open_capture()._fingerprints is not None) == prints


@pytest.mark.parametrize("norm", [{"weight": SimpleNamespace(shape=(64,))}, {"weight": None, "normalized_shape": (64,)}, {"weight": None}])
def test_the_width_is_what_the_final_norm_takes_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: dict[str, Any]) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch)
    opened = open_capture(**norm)
    assert (opened._layer_count, opened._width) == (8, 64)


def test_a_model_without_a_norm_has_no_final_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch)
    model = SimpleNamespace(layer=[None] * 8, config=SimpleNamespace(hidden_size=64))
    with pytest.raises(
        guards.CaptureRefused, match="SGLANG_HS_DUMP_FINAL is post_norm, and this model has no final norm; set SGLANG_HS_DUMP_FINAL=none"
    ):
        capture.open_capture(model, "layer", None, patch_version="2", family="single")


def test_other_ranks_follow_where_a_collective_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch, rank=1)
    made = SimpleNamespace(forward_mode=SimpleNamespace(name="EXTEND"), rids=["hsb-a"])
    for family in ("stream", "keyword-stream"):
        assert isinstance(open_capture(family).begin(made), follower.FollowerBatch)
    assert open_capture("E").begin(made) is None
    engine_modules(SimpleNamespace(pp_size=1), monkeypatch)
    for family, follows in (("stream", True), ("keyword-stream", True), ("E", False)):
        assert open_capture(family)._follows == follows


def test_without_rids_requests_are_expected_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dumps"
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(path))
    engine_modules(SimpleNamespace(chunked_prefill_size=-1, disable_radix_cache=True), monkeypatch, rids=False)
    open_capture("B")
    assert stat.S_IMODE((path / "expect").stat().st_mode) == 0o700
    engine_modules(SimpleNamespace(chunked_prefill_size=8192, disable_radix_cache=True), monkeypatch, rids=False)
    with pytest.raises(guards.CaptureRefused, match="chunked_prefill_size is 8192, .*--chunked-prefill-size -1"):
        open_capture("B")
    cached = SimpleNamespace(chunked_prefill_size=-1, disable_radix_cache=False)
    engine_modules(cached, monkeypatch, rids=False)
    with pytest.raises(guards.CaptureRefused, match="the prefix cache is on, .*--disable-radix-cache"):
        open_capture("B")
    # With rids, each request that meets it gets an error marker.
    engine_modules(cached, monkeypatch)
    open_capture("C")


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    engine_modules(SimpleNamespace(pp_size=2), monkeypatch, rank=rank)
    with pytest.raises(guards.CaptureRefused, match="pp_size is 2 .*--pp-size 1"):
        open_capture()
    assert not (tmp_path / "dumps").exists()
