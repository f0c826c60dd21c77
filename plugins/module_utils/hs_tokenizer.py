# Copyright (c) hidden_state.bridge contributors
# Apache License 2.0 (see LICENSES/Apache-2.0.txt or https://www.apache.org/licenses/LICENSE-2.0)
# SPDX-License-Identifier: Apache-2.0
"""Owner of what tells two tokenizers apart: hashes of the files that map text to token ids.

Chat templates and other settings do not count, so a directory whose template was edited is still of the same tokenizer.
It needs nothing but the standard library, so it runs under any Python 3.9+ of a host.
"""

from __future__ import annotations

import hashlib
import json
import os

CONFIG = "tokenizer_config.json"
ADDED = "added_tokens_decoder"
NAMES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json")
SUFFIXES = (".tiktoken", "tiktoken.model")


def _sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _config(path):
    try:
        with open(os.path.join(path, CONFIG), encoding="utf-8") as stream:
            found = json.load(stream)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def file_hashes(path):
    """{name: sha256} of the files in a tokenizer's directory that decide token ids; empty where it holds none.

    The special tokens that a tokenizer's configuration adds are an entry of their own. Raises OSError.
    """
    names = sorted(name for name in os.listdir(path) if name in NAMES or name.endswith(SUFFIXES))
    found = {name: _sha256(os.path.join(path, name)) for name in names}
    added = _config(path).get(ADDED)
    if added:
        text = json.dumps(added, sort_keys=True, separators=(",", ":"))
        found["%s:%s" % (CONFIG, ADDED)] = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return found


def needs_code(path):
    """Whether the tokenizer there is a class that the directory's own Python code defines."""
    mapped = _config(path).get("auto_map")
    return isinstance(mapped, (list, dict)) and "AutoTokenizer" in mapped
