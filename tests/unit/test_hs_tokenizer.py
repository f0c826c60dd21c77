# SPDX-License-Identifier: GPL-3.0-or-later
"""Two directories are of the same tokenizer when the files that map text to ids are the same."""

from __future__ import annotations

import json

import hs_tokenizer
from ansible_collections.hidden_state.bridge.plugins.modules import sglang_info


def test_what_counts_and_what_does_not(tmp_path):
    assert hs_tokenizer.file_hashes(str(tmp_path)) == {}
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tiktoken.model").write_text("abc")
    first = hs_tokenizer.file_hashes(str(tmp_path))
    assert sorted(first) == ["tiktoken.model", "tokenizer.json"]
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "y"}))
    assert hs_tokenizer.file_hashes(str(tmp_path)) == first
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "<end>"}}}))
    added = hs_tokenizer.file_hashes(str(tmp_path))
    assert set(added) - set(first) == {"tokenizer_config.json:added_tokens_decoder"}
    (tmp_path / "tiktoken.model").write_text("abd")
    assert hs_tokenizer.file_hashes(str(tmp_path))["tiktoken.model"] != first["tiktoken.model"]


def test_code_of_its_own(tmp_path):
    assert not hs_tokenizer.needs_code(str(tmp_path))
    for content, needed in (
        ("{", False),
        ("[]", False),
        ('{"auto_map": {"AutoModel": "x"}}', False),
        ('{"auto_map": {"AutoTokenizer": ["a.B", null]}}', True),
    ):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert hs_tokenizer.needs_code(str(tmp_path)) is needed


def test_the_model_of_a_host_is_told_with_its_tokenizer(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    service = dict.fromkeys(("manager", "name", "state", "pid", "since", "detail", "environment"))
    monkeypatch.setattr(sglang_info.sr, "installation", lambda *_asked: {"package": "/sglang", "release": "0.5.20", "models": "/models"})
    monkeypatch.setattr(sglang_info.sr, "model_facts", lambda _model: {"num_hidden_layers": 61})
    monkeypatch.setattr(sglang_info.sq, "query", lambda *_asked: {**service, "argv": [], "processes": []})
    monkeypatch.setattr(sglang_info.probe, "health", lambda *_asked: ("down", ""))
    monkeypatch.setattr(sglang_info.hp, "port_holders", lambda *_asked: [])
    asked = {"python": "python", "pythonpath": "", "model": str(tmp_path), "host": "127.0.0.1", "port": 1, "manager": "supervisor"}
    asked.update(name="sglang", state_dir=str(tmp_path), user="root", api_key="", arguments=[], extra_arguments=[], visible_gpus="")
    assert sglang_info.gather(asked)["model"]["tokenizer"] == hs_tokenizer.file_hashes(str(tmp_path)) != {}
