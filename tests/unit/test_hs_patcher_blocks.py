# SPDX-License-Identifier: Apache-2.0
"""A patched file that something else has written to: upgraded, overwritten, edited, torn or newer than the patcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from model_source import SOURCE

import hs_patcher

DATA = SOURCE.encode()
PIECES = ("imports", "init", "loop", "own", "collector", "norm")
BEGIN, END = "# hidden_state.bridge begin ", "# hidden_state.bridge end "


@pytest.fixture
def patched(model: Path, originals: str) -> str:
    return hs_patcher.apply(model, originals=originals).after.decode()


def refused(model: Path, originals: str, action=hs_patcher.apply) -> str:
    data = model.read_bytes()
    with pytest.raises(hs_patcher.Refused) as refusal:
        action(model, originals=originals)
    assert model.read_bytes() == data
    return str(refusal.value)


def has_diff(message: str, *lines: str) -> bool:
    """Whether a unified diff follows the first line of `message`, with `lines` in it."""
    first, _, diff = message.partition("\n")
    shown = diff.splitlines()
    return "--- " not in first and shown[0].startswith("--- ") and shown[1].startswith("+++ ") and all(line in shown for line in lines)


def block(patched: str, piece: str) -> str:
    found = re.search(rf"^ *{BEGIN}{piece}\n(?:.*\n)*? *{END}{piece}\n", patched, re.M)
    assert found
    return found[0]


# --- edits outside of what the patch put in: only the stored original can tell --------------------


def torn(patched: str, piece: str, edge: str) -> str:
    text = block(patched, piece)
    return patched.replace(text, re.sub(rf" *{re.escape(edge + piece)}\n", "", text))


EDITS_AROUND = {
    **{f"no begin of {piece}": lambda text, piece=piece: torn(text, piece, BEGIN) for piece in PIECES},
    **{f"no end of {piece}": lambda text, piece=piece: torn(text, piece, END) for piece in PIECES},
    "an edit just before a block": lambda text: text.replace("logger = ", "LOGGER = "),
    "a line just before a block": lambda text: text.replace(block(text, "imports"), "import os\n" + block(text, "imports")),
    "a line just behind a block": lambda text: text.replace(block(text, "imports"), block(text, "imports") + "import os\n"),
    "a line end less behind a block": lambda text: text.replace(END + "imports\n\n", END + "imports\n"),
    "a space at the end of a mark": lambda text: text.replace(BEGIN + "loop\n", BEGIN + "loop \n"),
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "a block doubled": lambda text: text.replace(block(text, "norm"), block(text, "norm") * 2),
    "a block within a block": lambda text: text.replace(block(text, "norm"), "").replace(
        BEGIN + "init\n", BEGIN + "init\n" + block(text, "norm")
    ),
    "an end before its begin": lambda text: (
        text.replace(BEGIN + "init", "@").replace(END + "init", BEGIN + "init").replace("@", END + "init")
    ),
    "an unknown mark": lambda text: text.replace("logger = ", "# hidden_state.bridge was here\nlogger = "),
    "a mark in a string": lambda text: text.replace("logger = ", 'm = "# hidden_state.bridge end loop"\nlogger = '),
    "checksum altered": lambda text: re.sub("original sha256 [0-9a-f]{8}", "original sha256 00000000", text),
    "checksum cut": lambda text: re.sub("(original sha256 [0-9a-f]{8})[0-9a-f]+", r"\1", text),
    "no block with the head": lambda text: text.replace(block(text, "imports"), ""),
    "no head": lambda text: re.sub("# hidden_state.bridge patch .*\n", "", text),
    "two heads": lambda text: re.sub("(# hidden_state.bridge patch .*\n)", r"\1\1", text),
    "cut within a block": lambda text: text[: text.index(END + "norm")],
    "cut behind a block": lambda text: text[: text.index(END + "norm") + len(END + "norm\n")],
    "the file twice": lambda text: text * 2,
}


@pytest.mark.parametrize("name", EDITS_AROUND)
def test_an_edit_that_hides_the_original_is_refused_with_a_diff(model: Path, originals: str, patched: str, name: str) -> None:
    damaged = EDITS_AROUND[name](patched)
    assert damaged != patched
    model.write_bytes(damaged.encode())
    messages = {refused(model, originals, action) for action in (hs_patcher.apply, hs_patcher.revert)}
    assert len(messages) == 1
    message = messages.pop()
    assert str(model) in message
    assert "reinstall SGLang, then patch again" in message
    assert has_diff(message), message
    # What it says to do, done: all is well again.
    stored, target = re.search(r"\(cp (\S+) (\S+)\)", message).groups()
    Path(target).write_bytes(Path(stored).read_bytes())
    hs_patcher.apply(model, originals=originals)
    assert model.read_text() == patched


def test_the_diff_shows_the_edit_and_nothing_else(model: Path, originals: str, patched: str) -> None:
    model.write_text(patched.replace("logger = ", "LOGGER = "))
    diff = refused(model, originals).partition("\n")[2].splitlines()
    assert [line for line in diff[2:] if line[0] in "+-"] == [
        "-logger = logging.getLogger(__name__)",
        "+LOGGER = logging.getLogger(__name__)",
    ]


def test_without_a_stored_original_the_message_says_so(model: Path, originals: str, patched: str) -> None:
    for stored in Path(originals).iterdir():
        stored.unlink()
    model.write_text(patched.replace("logger = ", "LOGGER = "))
    message = refused(model, originals)
    assert f"{originals} does not have the original, so reinstall SGLang" in message
    assert has_diff(message)
    model.write_text(torn(patched, "loop", END))
    assert "does not have the original" in refused(model, originals)


def test_a_damaged_stored_original_is_not_offered(model: Path, originals: str, patched: str) -> None:
    for stored in Path(originals).iterdir():
        stored.write_bytes(DATA + b"#\n")
    model.write_text(patched.replace("logger = ", "LOGGER = "))
    assert "(cp " not in refused(model, originals)


def test_a_long_diff_is_cut(model: Path, originals: str, patched: str) -> None:
    model.write_text(patched + "# more\n" * 1000)
    message = refused(model, originals)
    assert len(message.splitlines()) < 100
    assert re.search(r"… 9\d\d lines more", message)


# --- edits of what the patch put in: the original is proved ---------------------------------------

EDITS_WITHIN = {
    **{f"no {piece}": lambda text, piece=piece: text.replace(block(text, piece), "") for piece in PIECES[1:]},
    **{
        f"half of {piece}": lambda text, piece=piece: text.replace(
            block(text, piece), "".join(line for line in block(text, piece).splitlines(True) if "# hidden_state.bridge" in line)
        )
        for piece in PIECES
    },
    "a foreign line": lambda text: text.replace(BEGIN + "norm\n", BEGIN + "norm\n                    print(hidden_states)\n"),
    "a foreign comment": lambda text: text.replace(BEGIN + "loop\n", BEGIN + "loop\n# TODO\n"),
    "an argument": lambda text: text.replace("_hs.begin(forward_batch)", "_hs.begin(None)"),
    "bytes that are no text": lambda text: text.replace(BEGIN + "loop\n", BEGIN + "loop\n# \udce9\n"),
    "marks moved to the left": lambda text: re.sub(r" +(# hidden_state.bridge \w+ loop)", r"\1", text),
    "a block moved": lambda text: text.replace(block(text, "init"), "").replace(
        block(text, "norm"), block(text, "init") + block(text, "norm")
    ),
}


@pytest.mark.parametrize("name", EDITS_WITHIN)
def test_an_edit_of_the_patch_is_refused_with_a_diff_and_reverted(model: Path, originals: str, patched: str, name: str) -> None:
    damaged = EDITS_WITHIN[name](patched)
    assert damaged != patched
    model.write_bytes(damaged.encode("utf-8", "surrogateescape"))
    for stored in Path(originals).iterdir():
        stored.unlink()
    message = refused(model, originals)
    assert "the inserted code was edited. Run revert (unpatch.yml)" in message
    assert has_diff(message)
    result = hs_patcher.revert(model, originals=originals)
    assert result.changed
    assert result.diff()
    assert model.read_bytes() == DATA
    assert not (model.parents[1] / "hs_capture").exists()


# --- versions ---------------------------------------------------------------------------------


def test_an_older_patch_is_upgraded_with_its_runtime(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as past:
        past.setattr(hs_patcher, "PATCH_VERSION", "0")
        hs_patcher.apply(model, originals=originals)
    seen = hs_patcher.apply(model, originals=originals, dry_run=True)
    assert (seen.changed, seen.found_version, seen.runtime_changed) == (True, "0", [hs_patcher.MARKER_FILE])
    hs_patcher.apply(model, originals=originals)
    assert f"patch {hs_patcher.PATCH_VERSION}, family D" in model.read_text()
    assert len(list(Path(originals).iterdir())) == 1
    hs_patcher.revert(model, originals=originals)
    assert model.read_bytes() == DATA


def test_patch_2_is_recognised_upgraded_and_reverted(model: Path, originals: str, patched: str) -> None:
    """Its loader had no _hs_of, and its forward read the attribute of the model."""
    loader = patched[patched.index("\n\ndef _hs_of(") : patched.index("# hidden_state.bridge end imports")]
    second = patched.replace(loader, "").replace(hs_patcher._BEGUN, "_hs = self._hs_capture")
    second = second.replace(f"bridge patch {hs_patcher.PATCH_VERSION},", "bridge patch 2,")
    second = second.replace(f'patch_version="{hs_patcher.PATCH_VERSION}"', 'patch_version="2"')
    assert second.count("_hs_of") == second.count("_hs_asked") == 0
    model.write_text(second)
    assert hs_patcher.revert(model, originals=originals, dry_run=True).after == DATA
    result = hs_patcher.apply(model, originals=originals)
    assert (result.found_version, model.read_text()) == ("2", patched)
    model.write_text(second)
    assert hs_patcher.revert(model, originals=originals).found_version == "2"
    assert model.read_bytes() == DATA


@pytest.mark.parametrize("version", [str(int(hs_patcher.PATCH_VERSION) + 1), "1000", f"{hs_patcher.PATCH_VERSION}.1", "next"])
def test_a_patch_from_the_future_is_refused_by_apply_and_reverted(model: Path, originals: str, patched: str, version: str) -> None:
    future = patched.replace(f"bridge patch {hs_patcher.PATCH_VERSION},", f"bridge patch {version},")
    future = future.replace(" loop\n", " turn-3\n").replace("_hs.begin(forward_batch)", "_hs.start(forward_batch, self)")
    model.write_text(future)
    message = refused(model, originals)
    assert f"carries patch {version}, and this patcher knows patch {hs_patcher.PATCH_VERSION}" in message
    assert "upgrade the collection" in message
    assert "revert (unpatch.yml), then apply (patch.yml)" in message
    assert hs_patcher.revert(model, originals=originals).found_version == version
    assert model.read_bytes() == DATA


def test_a_patch_from_the_future_whose_original_is_not_proved_stays(model: Path, originals: str, patched: str) -> None:
    future = patched.replace(f"bridge patch {hs_patcher.PATCH_VERSION},", "bridge patch 1000,").replace("logger = ", "LOGGER = ")
    model.write_text(future)
    for action in (hs_patcher.apply, hs_patcher.revert):
        message = refused(model, originals, action)
        assert "was edited after it was patched" in message
        assert has_diff(message, "-logger = logging.getLogger(__name__)", "+LOGGER = logging.getLogger(__name__)")


@pytest.mark.parametrize("action", ["apply", "revert"])
def test_a_package_upgrade_that_overwrote_the_file(model: Path, originals: str, patched: str, action: str) -> None:
    other = DATA.replace(b"llama_4_scaling", b"llama_5_scaling")
    model.write_bytes(other)
    runtime = model.parents[1] / "hs_capture"
    (runtime / "writer.py").write_text("# of the release before\n")
    result = getattr(hs_patcher, action)(model, originals=originals)
    assert (result.changed, result.found_version, "writer.py" in result.runtime_changed) == (True, None, True)
    if action == "apply":
        assert len(list(Path(originals).iterdir())) == 2
        assert not hs_patcher.apply(model, originals=originals).changed
    hs_patcher.revert(model, originals=originals)
    assert model.read_bytes() == other
    assert not runtime.exists()


def test_a_newer_runtime_that_another_model_needs_is_not_replaced(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as future:
        future.setattr(hs_patcher, "PATCH_VERSION", "1000")
        hs_patcher.apply(model, originals=originals)
    other = model.with_name("other.py")
    other.write_bytes(DATA)
    message = refused(other, originals)
    assert "is of patch 1000 and serves deepseek_v2.py" in message
    assert "upgrade the collection" in message
    hs_patcher.revert(model, originals=originals)
    assert hs_patcher.apply(other, originals=originals).changed
