# SPDX-License-Identifier: GPL-3.0-or-later
"""How the flags of a release are read from its source."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "releases"))

import flags

CALLS = """
class Other:
    other: A[int, "no argument of the server"] = 1

class ServerArgs:
    radix: bool = False
    chunk: int = 5

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--radix", action="store_true", default=ServerArgs.radix, help="x")
        group = parser.add_argument_group("g")
        group.add_argument("--chunk", "--chunk-size", type=int, default=ServerArgs.chunk)
        parser.add_argument("--old", action=DeprecatedAction, nargs=0)

    def later(self):
        parser.add_argument("--not-of-the-server")
"""
FIELDS = """
class Memory(msgspec.Struct):
    disable_radix_cache: A[bool, "help"] = False
    chunked: A[Optional[int], Arg(help="h", cli_name="--chunked-prefill-size", aliases=["--cps"])] = None
    hidden: A[bool, Arg(no_cli=True)] = False
    plain: int = 3
    maybe: A[bool | None, "help"] = None
"""


@pytest.fixture
def srt(tmp_path):
    (tmp_path / "server_args.py").write_text(CALLS)
    (tmp_path / "arg_groups" / "fields").mkdir(parents=True)
    (tmp_path / "arg_groups" / "fields" / "memory.py").write_text(FIELDS)
    return tmp_path


def test_calls_and_fields(srt):
    found = {name: flag.takes_value for name, flag in flags.flags(srt).items()}
    assert found == {
        "--radix": False,
        "--chunk": True,
        "--chunk-size": True,
        "--old": False,
        "--disable-radix-cache": False,
        "--chunked-prefill-size": True,
        "--cps": True,
        "--maybe": False,
    }
