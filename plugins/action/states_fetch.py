# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pull files of states from a host, each checked against the hash that its manifest has, and none of them twice."""

from __future__ import annotations

import hashlib
import os
import time

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest, hs_progress

display = Display()

BLOCK_BYTES = 1 << 22
SHOW_SECONDS = 10
LISTED_PROBLEMS = 100


class ActionModule(ActionBase):
    """See the documentation of the module of the same name."""

    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        _result, args = self.validate_argument_spec(
            argument_spec={
                "src": {"type": "path", "required": True},
                "dest": {"type": "path", "required": True},
                "min_free_bytes": {"type": "int", "default": 1 << 30},
            }
        )
        if self._task.check_mode:
            return {"changed": False, "skipped": True, "msg": "nothing is pulled in check mode"}
        self._host = (task_vars or {}).get("inventory_hostname", "")
        self._become = bool(self._play_context.become)
        try:
            lock = hs_manifest.Lock(args["dest"])
            try:
                return self._pull(args)
            finally:
                lock.close()
        except (OSError, hs_manifest.ManifestError) as error:
            raise AnsibleActionFail("%s: %s" % (args["dest"], error)) from error

    def _pull(self, args):
        there = hs_manifest.Manifest(args["dest"])
        there.repair()
        wanted = list(hs_manifest.read_lines(os.path.join(args["dest"], "wanted.jsonl")))
        left = [entry for entry in wanted if not self._has(there.entries.get(entry["id"]), entry)]
        result = {"changed": bool(left), "records": 0, "bytes": 0, "problems": []}
        writer = hs_manifest.ManifestWriter(args["dest"])
        began = shown = time.monotonic()
        try:
            for number, entry in enumerate(left, 1):
                self._need_room(args)
                files = [dict(file, file=file.get("from", file["file"])) for file in hs_manifest.files_of(entry)]
                reasons = [reason for reason in (self._bring(args, file) for file in files) if reason]
                if reasons:
                    result["problems"].append({"id": entry["id"], "reason": reasons[0]})
                    continue
                writer.append([dict(_about(entry), **hs_manifest.named(files))])
                result["records"] += 1
                result["bytes"] += entry["bytes"]
                if time.monotonic() - shown >= SHOW_SECONDS:
                    shown = time.monotonic()
                    rate = hs_progress.size(result["bytes"] / (shown - began))
                    display.display("%s: %d of %d records pulled, %s/s" % (self._host, number, len(left), rate))
        finally:
            writer.close()
        del result["problems"][LISTED_PROBLEMS:]
        return result

    @staticmethod
    def _has(known, entry):
        hashes = [file["sha256"] for file in hs_manifest.files_of(entry)]
        return known is not None and [file["sha256"] for file in hs_manifest.files_of(known)] == hashes

    def _need_room(self, args):
        found = os.statvfs(args["dest"])
        free = found.f_bavail * found.f_frsize
        if free < args["min_free_bytes"]:
            raise AnsibleActionFail(
                "the file system of %s has %s free, and %s stay free (extraction_min_free_bytes); make room and call again: it goes on where it was"
                % (args["dest"], hs_progress.size(free), hs_progress.size(args["min_free_bytes"]))
            )

    def _bring(self, args, file):
        """Pull one file; returns what is wrong with it, or nothing."""
        source, target = os.path.join(args["src"], file["file"]), os.path.join(args["dest"], file["file"])
        directory = os.path.dirname(target)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        temporary = os.path.join(directory, ".%s.tmp-%d" % (os.path.basename(target), os.getpid()))
        try:
            try:
                self._connection.fetch_file(source, temporary)
            except AnsibleError as error:
                raise AnsibleActionFail("%s cannot be read: %s%s" % (source, error, self._remedy(args["src"]))) from error
            if _hash_durably(temporary) != file["sha256"]:
                return "%s has another SHA-256 than its manifest says" % source
            os.rename(temporary, target)
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
        hs_manifest.fsync_directory(directory)
        return ""

    def _remedy(self, source):
        if not self._become:
            return ""
        return (
            "; files are pulled as the user that connects, before it becomes another: give a group of that user what is there"
            " (chgrp -R GROUP %s && chmod -R g+rX %s) and what will be (extraction_output_group), or connect as extraction_user"
            % (source, source)
        )


def _about(entry):
    return {key: value for key, value in entry.items() if key not in ("file", "files", "bytes", "sha256", "from")}


def _hash_durably(path):
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(BLOCK_BYTES), b""):
            digest.update(block)
        os.fsync(stream.fileno())
    return digest.hexdigest()
