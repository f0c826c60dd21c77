# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases, the table of capture flags, what corrupts states, and the model directory."""

from __future__ import annotations

import json
import sys

import pytest

import sglang_release as sr


@pytest.mark.parametrize(
    "older, newer",
    [
        ("0.4.10", "0.5.1"),
        ("0.5.9", "0.5.10"),
        ("0.5.10rc0", "0.5.10"),
        ("0.5.10", "0.5.10.post1"),
        ("0.5.4.post2", "0.5.4.post3"),
        ("0.5.20.dev3", "0.5.20rc1"),
    ],
)
def test_releases_are_ordered(older, newer):
    assert sr.release_key(older) < sr.release_key(newer)


@pytest.mark.parametrize("text", ["", None, "main", "0.5"])
def test_no_release(text):
    with pytest.raises(sr.ReleaseError, match="no SGLang release"):
        sr.release_key(text)


BASE = ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
NO_FUSION = ["--enforce-disable-flashinfer-allreduce-fusion"]


@pytest.mark.parametrize(
    "release, more",
    [
        ("0.4.0", []),
        ("0.4.10.post2", []),
        ("0.5.9", []),
        ("0.5.10rc0", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.10.post1", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.13", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.14", ["--disable-prefill-cuda-graph"]),
        ("0.5.20", ["--disable-prefill-cuda-graph"]),
        ("0.5.23", ["--disable-prefill-cuda-graph"]),
        ("0.5.99", ["--disable-prefill-cuda-graph"]),
    ],
)
def test_capture_arguments(release, more):
    assert sr.capture_arguments(release) == BASE + more


def test_capture_environment():
    assert sr.capture_environment("0.5.9") == {"SGLANG_IS_FLASHINFER_AVAILABLE": "false"}
    assert sr.capture_environment("0.5.20") == {}


def test_config_file():
    assert not sr.reads_config_file("0.4.10")
    assert sr.reads_config_file("0.5.20")


# What a server of 0.5.20 in capture mode reports.
GOOD = {
    "version": "0.5.20",
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "tp_size": 8,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "enable_layernorm_sp": False,
    "enable_attn_tp_input_scattered": False,
    "moe_a2a_backend": "none",
    "moe_dense_tp_size": None,
    "enable_two_batch_overlap": False,
    "enable_mixed_chunk": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},
}


def problems(arguments=BASE, **changed):
    return sr.capture_problems(sr.server_facts(dict(GOOD, **changed)), arguments)


def test_a_right_server_has_no_problems():
    assert problems() == []


CORRUPTING = {
    "disable_radix_cache": False,
    "chunked_prefill_size": 8192,
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "attn_cp_size": 2,
    "enable_prefill_cp": True,
    "enable_prefill_context_parallel": True,
    "enable_nsa_prefill_context_parallel": True,
    "enable_layernorm_sp": True,
    "enable_attn_tp_input_scattered": True,
    "moe_a2a_backend": "deepep",
    "enable_deepep_moe": True,
    "moe_dense_tp_size": 1,
    "enable_two_batch_overlap": True,
    "enable_mixed_chunk": True,
    "speculative_algorithm": "EAGLE3",
    "disaggregation_mode": "prefill",
}


@pytest.mark.parametrize("field", CORRUPTING)
def test_each_corrupting_setting_is_named_with_its_remedy(field):
    (problem,) = problems(**{field: CORRUPTING[field]})
    assert problem.startswith("%s is %r" % (field, CORRUPTING[field])) and "remedy: " in problem


def test_every_rule_is_tried():
    assert {rule[0] for rule in sr.CAPTURE_RULES} <= set(CORRUPTING)


def test_prefill_graphs_are_judged_by_their_backend():
    (problem,) = problems(cuda_graph_config={"prefill": {"backend": "breakable"}}, disable_prefill_cuda_graph=True)
    assert "--disable-prefill-cuda-graph" in problem
    assert problems(disable_prefill_cuda_graph=False) == []


def test_a_chunk_size_that_was_asked_for_is_right():
    assert problems(arguments=[*BASE, "--chunked-prefill-size", "4096"], chunked_prefill_size=4096) == []


def test_server_facts_hold_no_key():
    facts = sr.server_facts(dict(GOOD, api_key="tell-nobody", admin_api_key="nor-this", launch_command="--api-key tell-nobody"))
    assert "tell-nobody" not in json.dumps(facts) and "nor-this" not in json.dumps(facts)
    assert facts["tp_size"] == 8 and facts["prefill_graph_backend"] == "disabled"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-dp-attention"],
        ["--pp-size", "2"],
        ["--pipeline-parallel-size=4"],
        ["--speculative-algorithm", "EAGLE"],
        ["--enable-two-batch-overlap"],
        ["--moe-a2a-backend=deepep"],
        ["--enable-mixed-chunk"],
    ],
)
def test_contradictions(arguments):
    (message,) = sr.contradictions(["--tp", "8", *arguments])
    assert message.startswith(arguments[0].split("=")[0]) and "remedy: " in message


def test_no_contradiction():
    assert sr.contradictions(["--tp", "8", "--pp-size", "1", "--moe-a2a-backend=none", "--trust-remote-code"]) == []


# -- installations ------------------------------------------------------------------------------------


def test_no_interpreter():
    with pytest.raises(sr.ReleaseError, match="sglang_server_python"):
        sr.installation("/nowhere/python")


def test_an_interpreter_without_sglang():
    with pytest.raises(sr.ReleaseError, match="has no SGLang"):
        sr.installation(sys.executable)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of SGLang that must not be imported."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return package


def test_a_source_tree(tree):
    (tree / "version.py").write_text('__version__ = "0.5.6"\n')
    found = sr.installation(sys.executable)
    assert (found["release"], found["package"]) == ("0.5.6", str(tree))
    assert found["models"] == str(tree / "srt" / "models")


def test_package_metadata_goes_before_the_tree(tree):
    (tree / "version.py").write_text('__version__ = "0.0.0"\n')
    information = tree.parent / "sglang-0.5.20.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.20\n")
    assert sr.installation(sys.executable)["release"] == "0.5.20"


def test_a_tree_without_a_release(tree):
    with pytest.raises(sr.ReleaseError, match=r"neither package metadata nor version\.py"):
        sr.installation(sys.executable)


# -- models -------------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "torch_dtype": "float32",
}


def write_model(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model-00001.safetensors").write_bytes(b"x" * 10)
    (directory / "model.safetensors.index.json").write_text("{}")


def test_model(tmp_path):
    write_model(tmp_path, CONFIG)
    facts = sr.model_facts(str(tmp_path))
    assert len(facts.pop("fingerprint")) == 64
    assert facts == {
        "architecture": "DeepseekV3ForCausalLM",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "vocab_size": 512,
        "dtype": "float32",
    }


def test_the_text_model_of_a_multimodal_config(tmp_path):
    text = {key: CONFIG[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    write_model(tmp_path, {"architectures": ["KimiK25ForConditionalGeneration"], "dtype": "bfloat16", "text_config": text})
    facts = sr.model_facts(str(tmp_path))
    assert (facts["hidden_size"], facts["dtype"]) == (64, "bfloat16")


def test_the_fingerprint_follows_config_index_and_sizes(tmp_path):
    write_model(tmp_path, CONFIG)
    seen = {sr.model_facts(str(tmp_path))["fingerprint"]}
    (tmp_path / "README.md").write_text("no part of the weights")
    assert sr.model_facts(str(tmp_path))["fingerprint"] in seen
    (tmp_path / "model-00001.safetensors").write_bytes(b"x" * 11)
    seen.add(sr.model_facts(str(tmp_path))["fingerprint"])
    (tmp_path / "model.safetensors.index.json").write_text('{"a": 1}')
    seen.add(sr.model_facts(str(tmp_path))["fingerprint"])
    (tmp_path / "config.json").write_text(json.dumps(dict(CONFIG, vocab_size=513)))
    seen.add(sr.model_facts(str(tmp_path))["fingerprint"])
    assert len(seen) == 4


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "sglang_server_model"),
        ("{", "not a model's configuration"),
        ("[]", "not a model's configuration"),
        (json.dumps({"hidden_size": 64}), "has no num_hidden_layers"),
    ],
)
def test_a_model_directory_that_is_none(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(sr.ReleaseError, match=message):
        sr.model_facts(str(tmp_path))
