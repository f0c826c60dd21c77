# SPDX-License-Identifier: GPL-3.0-or-later
"""Releases, installations and the model directory."""

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
