# SPDX-License-Identifier: GPL-3.0-or-later
"""Writes the demo's eight sources: text that comes with every Python, one byte a token.

    make_sources.py --output DIRECTORY [--records N]

A token id is the byte plus 3; 0 begins a record, 2 separates prompt and response, 1 ends the record. The loss mask is 1
on the response and its end. The same interpreter gives the same bytes. A source that is there already is left alone.
"""

from __future__ import annotations

import argparse
import builtins
import importlib
import inspect
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

BEGIN, END, SEPARATOR, FIRST_BYTE = 0, 1, 2, 3
SHORTEST, LONGEST, MEAN = 20, 500, 330

Pair = tuple[str, str]
"""Prompt and response."""


def documentation(owner: object, label: str = "") -> Iterator[Pair]:
    """What the public members of a module or class say of themselves, in the order of their names."""
    for name, member in sorted(vars(owner).items()):
        text = getattr(member, "__doc__", None)
        if not name.startswith("_") and callable(member) and isinstance(text, str):
            yield f"What is {label}{name}?", inspect.cleandoc(text)


def of_modules(*names: str) -> Iterator[Pair]:
    for name in names:
        yield from documentation(importlib.import_module(name), f"{name}.")


def of_types(*types: type) -> Iterator[Pair]:
    for owner in types:
        yield from documentation(owner, f"{owner.__name__}.")


def of_topics() -> Iterator[Pair]:
    for name, text in sorted(topics.items()):
        yield f"Explain {name}.", text.strip()


def of_sources(*names: str) -> Iterator[Pair]:
    for name in names:
        for function, member in sorted(vars(importlib.import_module(name)).items()):
            if inspect.isfunction(member) and member.__module__ == name:
                yield f"Show the code of {name}.{function}.", inspect.getsource(member)


def of_headers(*names: str) -> Iterator[Pair]:
    for name in names:
        text = inspect.getdoc(importlib.import_module(name))
        if text:
            yield f"What does the module {name} do?", text


MODULES = [
    *["argparse", "ast", "asyncio", "base64", "bisect", "calendar", "codecs", "configparser", "contextlib", "copy", "csv"],
    *["datetime", "difflib", "doctest", "fractions", "functools", "gettext", "glob", "hashlib", "heapq", "hmac", "json"],
    *["logging", "mailbox", "pickle", "pprint", "random", "re", "sched", "shlex", "shutil", "statistics", "string"],
    *["struct", "subprocess", "tarfile", "tempfile", "textwrap", "timeit", "tokenize", "unittest", "uuid", "zipfile"],
]

SOURCES = {
    "d1_topics": of_topics(),
    "d2_builtins": documentation(builtins),
    "d3_types": of_types(str, bytes, list, dict, set, int, float),
    "d4_modules": of_headers(*MODULES),
    "d5_functions": of_modules("os", "shutil"),
    "d6_iteration": of_modules("itertools", "functools", "heapq", "bisect", "statistics"),
    "d7_code": of_sources("textwrap", "shlex", "bisect", "heapq", "fnmatch", "glob"),
    "d8_mathematics": of_modules("math", "cmath", "random", "operator"),
}


def tokens(text: str) -> list[int]:
    return [byte + FIRST_BYTE for byte in text.encode()]


def records(pairs: Iterator[Pair], limit: int, rng: random.Random) -> Iterator[dict[str, list[int]]]:
    """At most `limit` records of SHORTEST to LONGEST tokens, MEAN in the mean where the text is long enough."""
    chosen = [pair for pair in pairs if len(tokens(pair[1])) >= SHORTEST]
    rng.shuffle(chosen)
    for prompt, response in chosen[:limit]:
        length = min(LONGEST, SHORTEST + int(rng.expovariate(1 / (MEAN - SHORTEST))))
        head = [BEGIN, *tokens(prompt), SEPARATOR]
        body = [*tokens(response)[: max(SHORTEST, length - len(head)) - 1], END]
        yield {"input_ids": head + body, "loss_mask": [0] * len(head) + [1] * len(body)}


def write(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    temporary.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--records", type=int, default=35, metavar="N", help="records of each source (default: 35)")
    arguments = parser.parse_args()
    directory = arguments.output
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    total = 0
    for name, pairs in SOURCES.items():
        lines = list(records(pairs, arguments.records, random.Random(name)))
        length = sum(len(line["input_ids"]) for line in lines)
        write(directory / f"{name}.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        print(f"{name:16} {len(lines):3} records {length:6} tokens")
        total += length
    print(f"{'all':16} {total:>18} tokens in {directory}")


if __name__ == "__main__":
    main()
