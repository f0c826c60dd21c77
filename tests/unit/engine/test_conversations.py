# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations become what transformers' apply_chat_template makes of them, masks included."""

from __future__ import annotations

import json
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hs_tokenizer
from hidden_state_bridge import streams
from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.pack import pack
from hidden_state_bridge.packed import PackedDataset

# ChatML, with the assistant's part marked or not.
TEMPLATE = (
    "{%% if tools %%}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{%% endif %%}"
    "{%% for message in messages %%}<|im_start|>{{ message.role }}\n"
    "{%% if message.role == 'assistant' %%}%s{{ message.content }}<|im_end|>%s{{ '\n' }}"
    "{%% else %%}{{ message.content }}<|im_end|>\n{%% endif %%}{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)
MARKED = TEMPLATE % ("{% generation %}", "{% endgeneration %}")
PLAIN = TEMPLATE % ("", "")
# Leaves the earlier answers out, as templates of reasoning models do with thoughts.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role != 'assistant' or loop.last %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('the user begins') }}{% endif %}" + PLAIN
TALKS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "2 + 2 is 4."},
        {"role": "user", "content": "And  twice that?\n"},
        {"role": "assistant", "content": "8, <|im_start|> and ünïcode 漢字."},
    ],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!\n"}],
    [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "Say something."}],
]


def make_tokenizer(directory, template):
    """A byte-level BPE tokenizer with two special tokens, saved as a model's directory."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["assistant user system tools Hello what is that and twice"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


def pack_talks(tmp_path, rows, tokenizer, **settings):
    """{line: (token ids, mask)} of the packed rows."""
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    result = pack({"sources": [{"name": "talks", "path": str(path)}], "tokenizer": tokenizer, **settings}, str(tmp_path / "out"))
    data = PackedDataset(result["path"])
    records = map(data.record, range(len(data)))
    return {record.line: (record.input_ids.tolist(), record.loss_mask.tolist()) for record in records}, result


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_ids_and_masks_are_those_of_transformers(tmp_path, template):
    """The masks of the marked template are transformers' own; those of the plain one, worked out here, are the same."""
    found, result = pack_talks(tmp_path, [{"messages": talk} for talk in TALKS], make_tokenizer(tmp_path / "model", template))
    reference = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "reference", MARKED))
    for line, talk in enumerate(TALKS, 1):
        expected = reference.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert found[line] == (expected["input_ids"], expected["assistant_masks"])
        assert 1 in found[line][1] and 0 in found[line][1]
    learned = [token for token, bit in zip(*found[1]) if bit]
    assert reference.decode(learned) == "2 + 2 is 4.<|im_end|>8, <|im_start|> and ünïcode 漢字.<|im_end|>"
    assert result["meta"]["tokenizer"]["files"] == hs_tokenizer.file_hashes(str(tmp_path / "model"))
    assert result["meta"]["tokenizer"]["transformers"].startswith("5.")


def test_other_names_and_tools(tmp_path):
    talk = TALKS[0]
    other = {"user": "human", "assistant": "gpt"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    rows = [
        {"conversations": [{"from": other.get(item["role"], item["role"]), "value": item["content"]} for item in talk]},
        {"messages": talk, "tools": tools},
        {"dialogue": talk, "messages": TALKS[1]},
    ]
    path = make_tokenizer(tmp_path / "model", PLAIN)
    found, _ = pack_talks(tmp_path, rows[:2], path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert found[1][0] == tokenizer.apply_chat_template(talk, return_dict=False)
    assert found[2][0] == tokenizer.apply_chat_template(talk, tools=tools, return_dict=False)
    assert [token for token, bit in zip(*found[1]) if bit] == [token for token, bit in zip(*found[2]) if bit]
    found, _ = pack_talks(tmp_path, rows[2:], path, messages_field="dialogue")
    assert found[1][0] == tokenizer.apply_chat_template(talk, return_dict=False)


def test_tokens_and_conversations_in_one_source_cut_and_in_several_processes(tmp_path, monkeypatch):
    rows = [{"messages": TALKS[0]}, {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}] * 30
    path = make_tokenizer(tmp_path / "model", PLAIN)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 2000)
    found, result = pack_talks(tmp_path, rows, path, max_length=20)
    whole = AutoTokenizer.from_pretrained(path).apply_chat_template(TALKS[0], return_dict=False)
    assert len(found) == 60 and found[1][0] == found[59][0] == whole[:20] and found[60] == ([5, 6, 7], [0, 1, 1])
    assert result["meta"]["sources"][0]["cut"] == 30


BAD = {
    "not a list": ({"messages": "hello"}, "the conversation is a string; give a list of messages"),
    "empty": ({"messages": []}, "the conversation is empty; give a list of messages"),
    "no object": ({"messages": ["hello"]}, "message 0 is a string, not an object"),
    "no role": ({"messages": [{"content": "x"}]}, "message 0 has no role"),
    "no content": ({"messages": [{"role": "user"}]}, "message 0 has no content"),
    "nothing to learn": (
        {"messages": [{"role": "user", "content": "x"}]},
        "no message is the assistant's, so there is nothing to train on",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_conversation_is_named_or_skipped(tmp_path, case):
    row, reason = BAD[case]
    path = make_tokenizer(tmp_path / "model", PLAIN)
    rows = [{"messages": TALKS[1]}, row]
    with pytest.raises(Refusal) as caught:
        pack_talks(tmp_path, rows, path)
    assert str(caught.value).startswith(f"talks {tmp_path}/talks.jsonl:2: {reason}") and ";" in str(caught.value)
    found, result = pack_talks(tmp_path, rows, path, on_bad="skip")
    assert list(found) == [1] and result["meta"]["sources"][0]["rejected"] == 1


def test_a_template_that_refuses_or_rewrites_is_no_silent_mask(tmp_path):
    with pytest.raises(Refusal, match=r"talks\.jsonl:1: the chat template does not take the conversation \(the user begins\)"):
        pack_talks(tmp_path, [{"messages": TALKS[0]}], make_tokenizer(tmp_path / "strict", STRICT))
    path = make_tokenizer(tmp_path / "forgetful", FORGETFUL)
    with pytest.raises(Refusal, match=r"talks\.jsonl:1: what the chat template writes for message 2 depends on the messages after it"):
        pack_talks(tmp_path, [{"messages": TALKS[0]}], path)
    found, _ = pack_talks(tmp_path, [{"messages": TALKS[1]}], path)
    assert sum(found[1][1]) > 1


def test_ids_of_another_model_are_outside_the_vocabulary(tmp_path):
    with pytest.raises(Refusal, match=r"talks\.jsonl:1: input_ids\[\d+\] is \d+, outside the vocabulary of 10"):
        pack_talks(tmp_path, [{"messages": TALKS[1]}], make_tokenizer(tmp_path / "model", PLAIN), vocab_size=10)


CODE = """
from transformers import PreTrainedTokenizerFast

open({marker!r}, "w").close()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_remote_code_runs_only_when_allowed(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = make_tokenizer(tmp_path / "model", PLAIN)
    config = tmp_path / "model" / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings.update(tokenizer_class="OwnTokenizer", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    config.write_text(json.dumps(settings))
    ran = tmp_path / "ran"
    (tmp_path / "model" / "own.py").write_text(CODE.format(marker=str(ran)))
    with pytest.raises(Refusal, match=r"brings Python code of its own, which is not run unless you allow it; .*trust_remote_code"):
        pack_talks(tmp_path, [{"messages": TALKS[1]}], path)
    assert not ran.exists()
    found, _ = pack_talks(tmp_path, [{"messages": TALKS[1]}], path, trust_remote_code=True)
    assert ran.exists() and len(found) == 1


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    rows = [{"messages": TALKS[1]}]
    with pytest.raises(Refusal, match="the sources hold conversations and no tokenizer is named; set tokenizer"):
        pack_talks(tmp_path, rows, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="holds no file of a tokenizer; give the model's directory"):
        pack_talks(tmp_path, rows, str(tmp_path / "empty"))
    with pytest.raises(Refusal, match="has no chat template; give the directory of a chat model"):
        pack_talks(tmp_path, rows, make_tokenizer(tmp_path / "bare", None))
    path = make_tokenizer(tmp_path / "broken", PLAIN)
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(Refusal, match="cannot be loaded"):
        pack_talks(tmp_path, rows, path)
    path = make_tokenizer(tmp_path / "model", PLAIN)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("hidden_state_bridge.reading._encoders", {})
    with pytest.raises(Refusal, match=r"a source of conversations needs the Python package transformers, .*pip install transformers"):
        pack_talks(tmp_path, rows, path)


def test_another_tokenizer_or_release_packs_again(tmp_path, monkeypatch):
    rows = [{"messages": TALKS[1]}]
    path = make_tokenizer(tmp_path / "model", PLAIN)
    _, first = pack_talks(tmp_path, rows, path)
    assert not pack_talks(tmp_path, rows, make_tokenizer(tmp_path / "copy", PLAIN))[1]["changed"], "the place of the tokenizer matters"
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "9.9")
    assert pack_talks(tmp_path, rows, path)[1]["meta"]["sha256"] != first["meta"]["sha256"]
