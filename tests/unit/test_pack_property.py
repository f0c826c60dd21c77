# SPDX-License-Identifier: GPL-3.0-or-later
"""For any sources, the packed set is what a few lines of plain Python give."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from packing import SUFFIXES, contents, packed, write

from hidden_state_bridge.errors import Refusal
from hidden_state_bridge.sources import copies, read_config, shuffled

RECORD = st.integers(1, 12).flatmap(
    lambda length: st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length),
            "loss_mask": st.lists(st.integers(0, 1), min_size=length, max_size=length),
        }
    )
)
SHARE = st.fixed_dictionaries({}, optional={"weight": st.floats(0.1, 3), "max_records": st.integers(1, 9)})
NAMES = st.sampled_from([f"{stem}{suffix}" for stem in "ab" for suffix in SUFFIXES])
FILES = st.dictionaries(NAMES, st.lists(RECORD, min_size=1, max_size=6), min_size=1, max_size=3)
# Of each source the files, by name; its share.
SOURCES = st.dictionaries(
    st.sampled_from(["A2_kimik25", "B1", "b1", "ß", "C 3"]),
    st.tuples(FILES, SHARE),
    min_size=1,
    max_size=4,
)
SETTINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**40)},
    optional={
        "max_length": st.integers(1, 14),
        "min_tokens": st.integers(1, 5),
        "max_tokens": st.integers(5, 12),
        "untrained": st.sampled_from(["keep", "drop"]),
    },
)


def reference(sources: list[dict], files: dict[str, dict[str, list]], options: dict) -> list[tuple]:
    """(source, file, line, token ids, mask) of each record in order. Only the permutation is the packer's own."""
    merged = []
    cut = options.get("max_length")
    for source in read_config({"sources": sources, **options})[0]:
        kept = []
        for name, rows in sorted(files[source.name].items()):
            for line, row in enumerate(rows, 1):
                ids, mask = row["input_ids"][:cut], row["loss_mask"][:cut]
                inside = options.get("min_tokens", 1) <= len(row["input_ids"]) <= options.get("max_tokens", math.inf)
                if inside and (any(mask) or options.get("untrained") != "drop"):
                    kept.append((source.name, name, line, ids, mask))
        for record, times in zip(kept, copies(source, len(kept))):
            merged += [record] * times
    return [merged[place] for place in shuffled(len(merged), options["seed"])]


@settings(max_examples=150, deadline=None, database=None)
@given(SOURCES, SETTINGS, st.randoms())
def test_any_sources_give_what_plain_python_gives(sources, options, order):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = []
        for number, (source, (files, share)) in enumerate(sources.items()):
            for file, records in files.items():
                write(directory / str(number) / file, records)
            rows.append({"name": source, "path": str(directory / str(number)), **share})
        expected = reference(rows, {source: files for source, (files, _share) in sources.items()}, options)
        try:
            data, result = packed(directory / "out", rows, **options)
        except Refusal as error:
            assert not expected and "no records that are kept" in str(error)
            return
        assert contents(data) == expected
        order.shuffle(rows)
        assert packed(directory / "again", rows, **options)[1]["meta"] == result["meta"]
        other = packed(directory / "other", rows, **{**options, "seed": options["seed"] + 1})[0]
        if not any(share for _files, share in sources.values()):
            assert sorted(contents(other)) == sorted(expected)


@settings(deadline=None, database=None)
@given(st.integers(0, 200), st.floats(0.01, 5), st.one_of(st.none(), st.integers(1, 300)), st.integers(0, 9))
def test_copies_come_to_the_share_and_are_even(records, weight, most, seed):
    row = {"name": "a", "path": "x", "weight": weight, "max_records": most}
    (source,), _settings = read_config({"sources": [row], "seed": seed})
    found = copies(source, records)
    wanted = math.floor(records * weight + 0.5)
    assert found.sum() == (0 if not records else min(wanted, most or wanted))
    assert not records or found.max() - found.min() <= 1
