# SPDX-License-Identifier: Apache-2.0
"""Conversations to token ids and loss masks, with the chat template of the model's own tokenizer directory.

The ids are those of the tokenizer's `apply_chat_template`. The loss mask is 1 on what the assistant says: where the
template marks that itself (`{% generation %}`), just there; else on what the template adds to the generation prompt for
each of the assistant's turns, up to the special token that ends the turn.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from typing import Any

import hs_tokenizer

from .errors import Refusal
from .records import BadRecord, kind_name
from .sources import Settings
from .streams import missing_package

# Names of the ShareGPT style; others are handed on as they are.
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def describe(settings: Settings) -> dict[str, Any] | None:
    """What the packed set says of its tokenizer: hashes of its files, and the release of transformers (null without it).

    None where no tokenizer is named. Raises Refusal where it is no tokenizer's directory.
    """
    if not settings.tokenizer:
        return None
    try:
        files = hs_tokenizer.file_hashes(settings.tokenizer)
    except OSError as error:
        raise Refusal(f"tokenizer {settings.tokenizer} cannot be read: {error.strerror}; give the model's directory") from error
    if not files:
        raise Refusal(f"tokenizer {settings.tokenizer} holds no file of a tokenizer; give the model's directory")
    try:
        release = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        release = None
    return {"files": files, "transformers": release}


def normalized(messages: object) -> list[dict[str, Any]]:
    """A conversation as a list of messages with `role` and `content`. Raises BadRecord."""
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"the conversation is {kind_name(messages) if messages else 'empty'}; give a list of messages")
    result = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRecord(f"message {number} is {kind_name(message)}, not an object; give each message its role and content")
        message = {key: value for key, value in message.items() if value is not None}
        if "role" not in message and "from" in message:
            message = {**{key: value for key, value in message.items() if key not in ("from", "value")}, "role": message["from"]}
            message["content"] = messages[number].get("value")
        role = message.get("role")
        if not isinstance(role, str):
            raise BadRecord(f"message {number} has no role; give each message its role and content")
        message["role"] = ROLES.get(role, role)
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            raise BadRecord(f"message {number} has no content; give each message its role and content")
        message.setdefault("content", "")
        result.append(message)
    if not any(message["role"] == "assistant" for message in result):
        raise BadRecord("no message is the assistant's, so there is nothing to train on; take the record out")
    return result


class Encoder:
    """Calls the tokenizer; it is loaded at the first conversation. Packing of token ids needs no transformers."""

    def __init__(self, path: str | None, trust_remote_code: bool) -> None:
        self._path, self._trust = path, trust_remote_code
        self._tokenizer: Any = None
        self._marked = False

    def __call__(self, row: dict[str, Any], messages: object) -> tuple[list[int], list[int]]:
        """Token ids and loss mask of the conversation in a row. Raises BadRecord, or Refusal where no tokenizer loads."""
        conversation = normalized(messages)
        if self._tokenizer is None:
            self._load()
        options = {"tools": row["tools"]} if row.get("tools") else {}
        try:
            if self._marked:
                found = self._tokenizer.apply_chat_template(
                    conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
                )
                return list(found["input_ids"]), list(found["assistant_masks"])
            return self._by_turns(conversation, options)
        except (BadRecord, MemoryError):
            raise
        except Exception as error:
            # A template raises what it likes: it is the record that does not fit it.
            raise BadRecord(f"the chat template does not take the conversation ({error}); mend the record or take it out") from error

    def _ids(self, conversation: list[dict[str, Any]], **options: Any) -> list[int]:
        found = self._tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False, **options)
        return list(found)

    def _by_turns(self, conversation: list[dict[str, Any]], options: dict[str, Any]) -> tuple[list[int], list[int]]:
        ids = self._ids(conversation, **options)
        mask = [0] * len(ids)
        for number, message in enumerate(conversation):
            if message["role"] != "assistant":
                continue
            head = self._ids(conversation[:number], add_generation_prompt=True, **options)
            turn = self._ids(conversation[: number + 1], **options)
            if ids[: len(turn)] != turn or turn[: len(head)] != head:
                raise BadRecord(
                    f"what the chat template writes for message {number} depends on the messages after it, so the assistant's part is not"
                    " known; split the conversation there, tokenize it yourself, or mark the part in the template (generation)"
                )
            end = next((place + 1 for place in range(len(turn) - 1, len(head) - 1, -1) if turn[place] in self._special), len(turn))
            mask[len(head) : end] = [1] * (end - len(head))
        return ids, mask

    def _load(self) -> None:
        path, trust = self._path, self._trust
        if not path:
            raise Refusal("the sources hold conversations and no tokenizer is named; set tokenizer to the model's directory")
        if not os.path.isdir(path):
            raise Refusal(f"tokenizer {path} is no directory; give the model's directory, on the machine that packs")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise missing_package("transformers", "a source of conversations") from None
        if not trust and hs_tokenizer.needs_code(path):
            raise Refusal(
                f"tokenizer {path} brings Python code of its own, which is not run unless you allow it; read it, then set"
                " trust_remote_code (dataset_stage_trust_remote_code)"
            )
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust, local_files_only=True)
        except Exception as error:
            raise Refusal(f"tokenizer {path} cannot be loaded: {error}; give the model's directory") from error
        template = self._tokenizer.get_chat_template() if getattr(self._tokenizer, "chat_template", None) else None
        if not template:
            self._tokenizer = None
            raise Refusal(f"tokenizer {path} has no chat template; give the directory of a chat model")
        # Only tokenizers that know the place of each token in the text can say what a template marks.
        self._marked = bool(MARKED.search(template)) and self._tokenizer.is_fast
        self._special = set(self._tokenizer.all_special_ids) | _added_special(self._tokenizer)


def _added_special(tokenizer: Any) -> set[int]:
    """Ids of added special tokens; all_special_ids may leave out those that have no role."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {number for number, token in added.items() if getattr(token, "special", False)}
