# SPDX-License-Identifier: Apache-2.0
"""What is no model file, or one of no known shape: refused with the reason and what to do, and not a byte touched."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import NOBODY, forked
from model_source import SOURCE, install

import hs_patcher

REMEDY = re.compile(
    r"reinstall SGLang|give the model file|Name the model file of the served model|run the patcher with SGLang's own interpreter|run as "
)
DATA = SOURCE.encode()
LOOP = SOURCE[SOURCE.index("        for i in range(self.start") : SOURCE.index("        if not self.pp_group")]
MODEL = SOURCE[SOURCE.index("class DeepseekV2Model") : SOURCE.index("\n\nclass DeepseekV3For")]
FORWARD = MODEL[MODEL.index("    def forward") :]
LATIN_1 = DATA.replace("é".encode(), b"\xe9")


def said_by(model: Path, originals: str) -> str:
    """The refusal of apply and check, which have to agree, after which everything has to be as it was."""
    tree = model.parents[2] if "sglang" in str(model) else model.parent
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in tree.rglob("*"))
    for dry_run in (True, False):
        with pytest.raises(hs_patcher.Refused) as refused:
            hs_patcher.apply(model, originals=originals, dry_run=dry_run)
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in tree.rglob("*")) == before
    assert not Path(originals).exists()
    assert model.name in str(refused.value)
    assert REMEDY.search(str(refused.value)), refused.value
    return str(refused.value)


# --- what lies at the path -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("absent", "No such file or directory"),
        ("directory", "is a directory"),
        ("pipe", "is a pipe"),
        ("socket", "is a socket"),
        ("dangling link", r"nowhere\.py: No such file or directory \(.*deepseek_v2\.py is a link to it\)"),
        ("link in a circle", "leads nowhere or in a circle"),
        ("link to a directory", r"is a directory \(.*deepseek_v2\.py is a link to it\)"),
        ("below a file", "Not a directory"),
    ],
)
def test_what_is_no_file_is_refused(model: Path, originals: str, monkeypatch: pytest.MonkeyPatch, kind: str, reason: str) -> None:
    model.unlink()
    if kind == "directory":
        model.mkdir()
    elif kind == "pipe":
        os.mkfifo(model)
    elif kind == "socket":
        # The name of a socket is short.
        monkeypatch.chdir(model.parent)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(model.name)
    elif kind == "dangling link":
        model.symlink_to("nowhere.py")
    elif kind == "link in a circle":
        model.symlink_to("other.py")
        model.with_name("other.py").symlink_to(model.name)
    elif kind == "link to a directory":
        model.symlink_to("..")
    elif kind == "below a file":
        model.write_text("")
        model = model / "deepseek_v2.py"
    if kind == "below a file":
        with pytest.raises(hs_patcher.Refused, match=reason):
            hs_patcher.apply(model, originals=originals)
        return
    message = said_by(model, originals) if kind != "link to a directory" else str(refusal(model, originals))
    assert re.search(reason, message), message


def refusal(model: Path, originals: str) -> hs_patcher.Refused:
    with pytest.raises(hs_patcher.Refused) as refused:
        hs_patcher.apply(model, originals=originals)
    return refused.value


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_refused(originals: str, device: str) -> None:
    assert "is a device; give the model file" in str(refusal(Path(device), originals))


def test_a_file_too_large_for_a_model_is_not_read(model: Path, originals: str) -> None:
    os.truncate(model, 1 << 40)
    assert "has 1099511627776 bytes, more than a source file has" in said_by(model, originals)


def test_a_file_outside_a_package_is_shown_but_not_patched(tmp_path: Path, originals: str, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "deepseek_v2.py"
    model.write_bytes(DATA)
    assert "is not in a package sglang/srt" in said_by(model, originals)
    assert hs_patcher.main(["diff", str(model)]) == 0
    assert "+# hidden_state.bridge begin imports" in capsys.readouterr().out


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user may enter, unlike those of pytest."""
    root = Path(tempfile.mkdtemp(prefix="hsb-test-"))
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    ("closed", "reason"),
    [
        ("file", "Permission denied; run as its owner"),
        ("owner", "belongs to root .*; run as root or root"),
        ("directory", "models is not writable; run as the owner of the SGLang installation"),
        ("package", "srt is not writable; run as the owner"),
        ("originals", r"state is not writable; .*name a directory for originals .*--originals DIR"),
    ],
)
def test_another_user_is_refused_before_anything_is_touched(public: Path, closed: str, reason: str) -> None:
    model = install(public, SOURCE)
    state = public / "state"
    state.mkdir()
    for path in [public, *public.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    shut = {"file": model, "owner": model, "directory": model.parent, "package": model.parents[1], "originals": state}[closed]
    os.chown(shut, 0, 0)
    shut.chmod(0o600 if closed == "file" else 0o755)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in public.rglob("*"))
    for dry_run in (True, False):
        status, said = forked(lambda dry_run=dry_run: hs_patcher.apply(model, originals=str(state / "o"), dry_run=dry_run), NOBODY)
        assert status == 1
        assert re.match(f"Refused: .*{reason}", said), said
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in public.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_owner_needs_no_root(public: Path) -> None:
    model = install(public, SOURCE)
    for path in [public, *public.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for action in (hs_patcher.apply, hs_patcher.revert):
        status, said = forked(lambda action=action: action(model, originals=str(public / "o")).changed, NOBODY)
        assert (status, said) == (0, "True")
    assert model.read_bytes() == DATA


# --- what the file holds ---------------------------------------------------------------------


def branch(loop: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in loop.splitlines(keepends=True))


HOSTILE = {
    "empty": (b"", "is empty, so a write of it was cut off"),
    "one line end": (b"\n", "is unknown to this patcher"),
    "carriage returns": (DATA.replace(b"\n", b"\r\n"), "CR line ends"),
    "one carriage return": (DATA.replace(b"import logging\n", b"import logging\r\n"), "CR line ends"),
    "byte order mark": (b"\xef\xbb\xbf" + DATA, "byte order mark"),
    "UTF-16": (SOURCE.encode("utf-16"), "is not Python"),
    "Latin-1": (LATIN_1, "is not Python"),
    "declared Latin-1": (b"# -*- coding: latin-1 -*-\n" + LATIN_1, "is not Python"),
    "a NUL": (DATA.replace(b"import logging\n", b"import logging\n\0"), "is not Python"),
    "tabs": (DATA.replace(b"        self.config", b"\tself.config"), "is not Python"),
    "syntax error": (DATA.replace(b"import logging\n", b"import import\n"), "is not Python"),
    "merge conflict": (DATA.replace(b"logger =", b"<<<<<<< HEAD\nlogger ="), "is not Python"),
    "deep brackets": (b"x = " + b"(" * 5000 + b")" * 5000 + b"\n" + DATA, "is not Python"),
    "no last line end": (DATA[:-1], "does not end with a line end"),
    "a mark in a string": (
        DATA.replace(b"logger =", b'm = "# hidden_state.bridge begin loop"\nlogger ='),
        "line 16: the text '# hidden_state",
    ),
    "a mark in a docstring": (
        DATA.replace(b'"""Inf', b'"""\n# hidden_state.bridge begin loop\nInf'),
        "'loop' begins at line 3 and does not end",
    ),
    "a name of the patch": (DATA.replace(b"aux_hidden_states = []", b"aux_hidden_states = _hs = []"), "already uses the names _hs"),
    "two loops": (SOURCE.replace(LOOP, LOOP + LOOP), "more than one decoder loop"),
    "loop in another method": (SOURCE.replace("def forward(self, input_ids", "def run(self, input_ids"), "no class has a forward"),
    "endless loop": (SOURCE.replace("for i in range(self.start_layer, self.end_layer)", "while True"), "no class has a forward"),
    "a way out of the loop": (
        SOURCE.replace("layer = self.layers[i]", "layer = self.layers[i]\n                if i: break"),
        "can be left",
    ),
    "another norm called": (SOURCE.replace("= self.norm(", "= self.scale("), "final norm"),
    "another norm made": (SOURCE.replace("= RMSNorm(", "= Scale("), "final norm"),
    "model class doubled": (SOURCE + "\n\n" + MODEL, "more than one decoder loop|is there twice"),
    "forward doubled": (SOURCE.replace(FORWARD, FORWARD + "\n" + FORWARD), "more than one decoder loop|is there twice"),
    "layers called by a helper": (SOURCE.replace("topk_indices = layer(", "topk_indices = run(layer, "), "no class has a forward"),
    "layers called by a method": (SOURCE.replace("topk_indices = layer(", "topk_indices = layer.run("), "no class has a forward"),
    "an early end of __init__": (SOURCE.replace("self.layers_to_capture = []", "return"), "returns early"),
    "no model": (SOURCE[: SOURCE.index("class DeepseekV2Model")], "no class has a forward"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_no_known_shape_is_refused(model: Path, originals: str, name: str) -> None:
    content, reason = HOSTILE[name]
    data = content.encode() if isinstance(content, str) else content
    assert data != DATA
    model.write_bytes(data)
    if name == "a name of the patch":
        assert re.search(reason, str(refusal(model, originals)))
    else:
        assert re.search(reason, said_by(model, originals))
    assert model.read_bytes() == data


CUTS = [
    '"""Inference-only',
    "from typing import (\n",
    "from sglang.nowhere import kernel\n\n",
    "class DeepseekV2DecoderLayer:\n",
    "class DeepseekV2Model:\n    def __init__(self, config",
    "self.layers_to_capture = []\n",
    "hidden_states, residual, topk_indices = layer(\n",
    "in self.layers_to_capture else None\n                    ),\n                )\n",
    "if not self.pp_group.is_last_rank:\n",
    "hidden_states, _ = self.norm(hidden_states, resid",
]


@pytest.mark.parametrize("place", CUTS)
def test_a_file_that_was_cut_is_refused(model: Path, originals: str, place: str) -> None:
    data = SOURCE[: SOURCE.index(place) + len(place)].encode()
    model.write_bytes(data)
    said_by(model, originals)
    assert model.read_bytes() == data


HANDLED = {
    "model class renamed": SOURCE.replace("DeepseekV2Model", "OtherModel"),
    "norm renamed where it is made too": SOURCE.replace("self.norm", "self.last_norm"),
    "layer under another name": SOURCE.replace("layer = self.layers[i]", "one = self.layers[i]").replace(
        "indices = layer(", "indices = one("
    ),
    "two loops in two branches": SOURCE.replace(LOOP, "        if self.flag:\n" + branch(LOOP) + "        else:\n" + branch(LOOP)),
    "a form feed": SOURCE.replace("\n\nclass DeepseekV2Model", "\n\f\nclass DeepseekV2Model"),
    "statements on one line": SOURCE.replace("self.layers_to_capture = []", "self.layers_to_capture = []; self.extra = 1"),
    "a comment at the end": SOURCE + "# ends here\n",
}


@pytest.mark.parametrize("name", HANDLED)
def test_what_does_not_touch_the_shape_is_patched_and_reverted(model: Path, originals: str, name: str) -> None:
    data = HANDLED[name].encode()
    assert data != DATA
    model.write_bytes(data)
    result = hs_patcher.apply(model, originals=originals)
    assert [change.name for change in result.changes] == list(hs_patcher.CHANGES)
    compile(model.read_bytes(), str(model), "exec")
    hs_patcher.revert(model, originals=originals)
    assert model.read_bytes() == data
