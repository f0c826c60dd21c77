# SPDX-License-Identifier: GPL-3.0-or-later
"""Write docs/support.md from the released wheels of SGLang: what the patcher does with each of them.

python docs/make_support.py           writes the page, for every release that the package index has
python docs/make_support.py --check   exits 1 when the page is not what the releases that it lists say
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import TYPE_CHECKING

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "releases"))

import matrix
import wheels

if TYPE_CHECKING:
    from collections.abc import Mapping

    Outcomes = Mapping[tuple[str, str], matrix.Outcome]

PAGE = wheels.ROOT / "docs" / "support.md"
HEAD = """# Supported releases and models

Which SGLang you can extract from. The patcher goes by the structure of the model file on the host, not by the number of the release:
a file that is not shaped as one of these is refused before anything is stopped, with the reason. To ask about one file, without
changing it:

    python3 hs_patcher.py check .../sglang/srt/models/deepseek_v2.py

This page is made by `docs/make_support.py`, which patches the files of the released wheels and takes the patch out again. Of each
file it checks that it compiles, that without the patch it is the original to the byte, that nothing it returns has changed, and that
what is captured is what the final norm takes in. `structure` stands for these checks. `run` means besides that the tests
install that release and compare every state with Hugging Face transformers on the same weights. The families and shapes are
described in [architecture.md](architecture.md#shapes-of-decoder-loops).
"""
MAIN = """
## deepseek_v2.py

The model file of DeepSeek-V2, V3 and R1 and of Kimi-K2; Kimi-K2.5 uses it from 0.5.9 on. The patch adds so many lines, at these
places of the patched file: after the imports, at the end of the model's `__init__`, in the layer loop, at the final norm.
`SGLANG_HS_DUMP_FINAL` takes the final states listed, or both, or `none`.

| release | family | lines added | at | final states | checked |
|---|---|---|---|---|---|
"""
OTHERS = """
## {release}: other models

{applied} of {all} model files with a decoder can be patched. A file that is refused would give states that cannot be shown to be right, or none.
All are checked by structure; where `deepseek_v2.py` is run besides, the table above says.

| model file | shape, or why it is refused |
|---|---|
"""
_ROW = re.compile(r"^\| (\d[^ ]*) \| ", re.MULTILINE)


def rows(outcomes: Outcomes) -> list[str]:
    """The row of each outcome, in their order."""
    return [_release_row(outcome) if outcome.model == matrix.MAIN_MODEL else _model_row(outcome) for outcome in outcomes.values()]


def _release_row(outcome: matrix.Outcome) -> str:
    checked = "run" if outcome.release in wheels.RUN else "structure"
    if outcome.refusal:
        return f"| {outcome.release} | refused: {_cell(outcome.refusal)} | | | | {checked} |"
    places = ", ".join(map(str, outcome.places))
    return f"| {outcome.release} | {outcome.family} | {outcome.lines} | {places} | {', '.join(outcome.finals)} | {checked} |"


def _model_row(outcome: matrix.Outcome) -> str:
    return f"| `{outcome.model}` | {outcome.family or 'refused: ' + _cell(outcome.refusal)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(outcomes: Outcomes) -> str:
    """The whole page."""
    main = [outcome for outcome in outcomes.values() if outcome.model == matrix.MAIN_MODEL]
    parts = [HEAD, MAIN, *(f"{_release_row(outcome)}\n" for outcome in reversed(main))]
    for release in reversed(wheels.ALL_MODELS):
        found = [outcome for outcome in outcomes.values() if outcome.release == release]
        applied = sum(outcome.family is not None for outcome in found)
        parts.append(OTHERS.format(release=release, applied=applied, all=len(found)))
        parts += [f"{_model_row(outcome)}\n" for outcome in sorted(found, key=lambda outcome: outcome.model)]
    return "".join(parts)


def releases_of(text: str) -> list[str]:
    """The releases that a page lists, oldest first."""
    return wheels.sort(_ROW.findall(text))


def main(arguments: list[str]) -> str | None:
    """Write or check the page; return what is wrong, for sys.exit."""
    committed = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    try:
        names = releases_of(committed) if "--check" in arguments else wheels.releases()[0]
        wheels.fetch(names)
    except wheels.Unavailable as error:
        return str(error)
    made = page(matrix.outcomes(names))
    if "--check" not in arguments:
        PAGE.write_text(made, encoding="utf-8")
    elif committed != made:
        return "docs/support.md is not what the releases say: run python docs/make_support.py"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
