# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Copy a packed data set to a host, or from it, a block at a time and only where blocks differ."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile

from ansible import constants
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_blocks
from ansible_collections.hidden_state.bridge.plugins.modules import packed_set_blocks

MODULE = "hidden_state.bridge.packed_set_blocks"
# What one upload holds, and what an interrupted one loses.
PART_BLOCKS = 4


def parts_of(missing, size):
    """Blocks {name of file: numbers} in parts of that many blocks."""
    flat = [(name, number) for name, numbers in sorted(missing.items()) for number in numbers]
    for first in range(0, len(flat), size):
        part = {}
        for name, number in flat[first : first + size]:
            part.setdefault(name, []).append(number)
        yield part


class ActionModule(ActionBase):
    """See the documentation of the module of the same name."""

    TRANSFERS_FILES = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _result, args = self.validate_argument_spec(
            argument_spec={
                "src": {"type": "path", "required": True},
                "dest": {"type": "path", "required": True},
                "fetch": {"type": "bool", "default": False},
                "owner": {"type": "str"},
                "group": {"type": "str"},
            }
        )
        try:
            return (self._fetch if args["fetch"] else self._push)(args, task_vars)
        except (OSError, ValueError) as error:
            raise AnsibleActionFail("%s: %s" % (args["dest"] if args["fetch"] else args["src"], error)) from error
        finally:
            self._remove_tmp_path(self._connection._shell.tmpdir)

    def _ask(self, task_vars, **arguments):
        """The module's result on the host."""
        found = self._execute_module(module_name=MODULE, module_args=arguments, task_vars=task_vars)
        if found.get("failed"):
            raise AnsibleActionFail(found.get("msg") or "the host gave no answer", result=found)
        return found

    @staticmethod
    def _described(text, path):
        try:
            meta = json.loads(text)
            return {"path": path, "files": meta["files"], "block_bytes": meta["block_bytes"]}
        except (ValueError, KeyError, TypeError) as error:
            raise AnsibleActionFail("%s holds no packed data set: pack it again" % path) from error

    def _push(self, args, task_vars):
        text = packed_set_blocks.read_meta(args["src"])
        described = self._described(text, args["src"])
        described["path"] = args["dest"]
        there = self._ask(task_vars, operation="compare", meta=text, **described)
        result = self._summary(there["missing"], described, not there["complete"])
        if not self._task.check_mode:
            for blocks in parts_of(there["missing"], PART_BLOCKS):
                self._place(args["src"], blocks, described, task_vars)
        if not self._task.check_mode or not result["changed"]:
            finished = self._ask(task_vars, operation="finish", meta=text, owner=args["owner"], group=args["group"], **described)
            result["changed"] |= finished["changed"]
        return result

    def _place(self, source, blocks, described, task_vars):
        """Upload some blocks as one part and have them put in their places."""
        with tempfile.NamedTemporaryFile(dir=constants.DEFAULT_LOCAL_TMP) as part:
            for piece in hs_blocks.pieces_of(source, blocks, described["files"], described["block_bytes"]):
                part.write(piece)
            part.flush()
            directory = self._connection._shell.tmpdir
            remote = self._connection._shell.join_path(directory, "part")
            self._transfer_file(part.name, remote)
            self._fixup_perms2((directory, remote))
        self._ask(task_vars, operation="place", blocks=blocks, source=remote, **described)

    def _fetch(self, args, task_vars):
        text = self._ask(task_vars, operation="describe", path=args["src"])["meta"]
        described = self._described(text, args["src"])
        missing = hs_blocks.missing(args["dest"], described["files"], described["block_bytes"])
        complete = packed_set_blocks.read_meta(args["dest"]) == text
        result = self._summary(missing, described, not complete)
        if self._task.check_mode:
            return result
        os.makedirs(args["dest"], mode=0o700, exist_ok=True)
        for blocks in parts_of(missing, 1):
            found = self._ask(task_vars, operation="give", blocks=blocks, **described)
            data = io.BytesIO(base64.b64decode(found["content"]))
            for name, numbers in blocks.items():
                path = os.path.join(args["dest"], name)
                hs_blocks.write_blocks(path, numbers, data, described["files"][name], described["block_bytes"])
        if not complete:
            packed_set_blocks.write_meta(args["dest"], text)
        return result

    @staticmethod
    def _summary(missing, described, incomplete):
        sizes = [
            hs_blocks.block_size(described["files"][name], number, described["block_bytes"])
            for name, numbers in missing.items()
            for number in numbers
        ]
        return {"changed": bool(sizes) or incomplete, "blocks": len(sizes), "bytes": sum(sizes)}
