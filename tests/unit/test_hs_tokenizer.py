# SPDX-License-Identifier: GPL-3.0-or-later
"""Two directories are of the same tokenizer when the files that map text to ids are the same."""

from __future__ import annotations

import json

import hs_tokenizer


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
