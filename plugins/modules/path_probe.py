#!/usr/bin/python
# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: path_probe
short_description: Say whether directories can take what is going to be written there
description:
  - For each directory, made already or not, tells what stands in the way of writing to it, and the remedy.
  - Where the directory does not exist, its nearest existing parent is probed.
  - The probe writes, fsyncs and locks an unnamed or at once removed file. Nothing stays behind.
author:
  - hidden_state.bridge contributors (@hidden-state-bridge)
attributes:
  check_mode:
    description: The module changes nothing and does the same in check mode.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
options:
  paths:
    description: The directories, each with what it is for.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path of the directory.
        type: path
        required: true
      variable:
        description: The variable that sets the path, named in the remedy.
        type: str
        required: true
      bytes:
        description: Bytes that are going to be written there. Paths on one file system are added up.
        type: int
        default: 0
      removable:
        description: What the names of files begin with that lie in the directory and are removed before anything is written. They count as free.
        type: str
        default: ''
"""

EXAMPLES = r"""
- name: See whether the states have room
  hidden_state.bridge.path_probe:
    paths:
      - path: /data/states
        variable: extraction_output_dir
        bytes: 5030000000000
"""

RETURN = r"""
problems:
  description: What is wrong, each with C(what) and C(remedy). Empty when all is well.
  returned: always
  type: list
  elements: dict
paths:
  description:
    - Each path with C(existing), the directory probed, C(free), the bytes free there, C(removable), what its
      removable files take of the rest, and C(network), type and source of its
      file system where that is one that other hosts may see too, else empty.
  returned: always
  type: list
  elements: dict
"""

import contextlib
import errno
import fcntl
import os
import pwd
import re
import stat
import tempfile

from ansible.module_utils.basic import AnsibleModule


def nearest_existing(path: str) -> str:
    """Return path, or its nearest parent that exists (links count as existing)."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def write_probe(directory: str) -> OSError | None:
    """Write, fsync and lock a file in directory; return what failed."""
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".hsb-probe-") as file:
            file.write(b"probe")
            file.flush()
            os.fsync(file.fileno())
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error
    return None


# A source with the name of a host in it says so too: HOST:/export, //HOST/share.
NETWORK_TYPES = {
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "gfs2",
    "gpfs",
    "lustre",
    "nfs",
    "nfs4",
    "ocfs2",
    "panfs",
    "smb3",
    "virtiofs",
    "wekafs",
    "9p",
}
NETWORK_SOURCE = re.compile(r"[^/]+:/|//")


def network_of(device: int, mounts: str) -> str:
    """Type and source of the file system of that device where other hosts may see it too; mounts is a mountinfo file's text."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        fields, _dash, rest = line.partition(" - ")
        kind, source = [*rest.split(" "), "", ""][:2]
        if fields.split(" ")[2:3] == [wanted] and (kind in NETWORK_TYPES or NETWORK_SOURCE.match(source)):
            return f"{kind} {source}"
    return ""


def mountinfo() -> str:
    """The mounts of this host; empty where the kernel does not tell."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def user_name() -> str:
    """The name of this process's user, or its number where it has none, as in many containers."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"


def free_bytes(directory: str) -> int:
    """What this user may still write there."""
    vfs = os.statvfs(directory)
    return vfs.f_bavail * vfs.f_frsize


def removable_bytes(directory: str, prefix: str) -> int:
    """What the regular files there take whose names begin so; 0 without a prefix, or where they cannot be listed."""
    total = 0
    try:
        with os.scandir(directory) as listed:
            for one in listed if prefix else ():
                if one.name.startswith(prefix) and one.is_file(follow_symlinks=False):
                    # Another process may have removed it.
                    with contextlib.suppress(FileNotFoundError):
                        total += one.stat(follow_symlinks=False).st_blocks * 512
    except OSError:
        return 0
    return total


def probe(entry: dict) -> tuple[dict, list[dict]]:
    """Probe one path; return (findings, problems)."""
    path, variable = entry["path"], entry["variable"]
    found = {"path": path, "existing": nearest_existing(path), "free": None, "removable": 0, "device": None, "network": ""}

    def problem(what: str, remedy: str) -> tuple[dict, list[dict]]:
        return found, [{"what": f"{variable}: {what}", "remedy": remedy}]

    if not os.path.isabs(path):
        return problem(f"{path} is not an absolute path", f"set {variable} to an absolute path")
    mode = os.lstat(found["existing"]).st_mode
    if found["existing"] == path and stat.S_ISLNK(mode):
        return problem(f"{path} is a symbolic link", f"set {variable} to the directory itself, or remove the link")
    if not os.path.isdir(found["existing"]):
        return problem(f"{found['existing']} is not a directory", f"move it away, or set {variable} to another directory")
    if found["existing"] == path:
        found["removable"] = removable_bytes(path, entry.get("removable", ""))
    failed = write_probe(found["existing"])
    full = failed is not None and failed.errno in (errno.ENOSPC, errno.EDQUOT)
    if failed is not None and not (full and found["removable"]):
        return problem(
            f"cannot write to {found['existing']}: {failed.strerror or failed}",
            f"free space there, or set {variable} to a directory on another file system"
            if full
            else f"make it writable for {user_name()}, or set {variable} to a directory that is",
        )
    device = os.stat(found["existing"]).st_dev
    found.update(free=free_bytes(found["existing"]), device=device, network=network_of(device, mountinfo()))
    return found, []


def shortages(entries: list[dict], found: list[dict]) -> list[dict]:
    """Compare what is needed on each file system with what is free there."""
    problems = []
    for device in sorted({item["device"] for item in found if item["device"] is not None}):
        here = [(entry, item) for entry, item in zip(entries, found) if item["device"] == device]
        need = sum(entry["bytes"] for entry, _item in here)
        free = here[0][1]["free"] + sum(item["removable"] for _entry, item in here)
        if need > free:
            names = ", ".join(f"{entry['path']} ({entry['variable']})" for entry, _item in here if entry["bytes"])
            problems.append(
                {
                    "what": f"{names}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free",
                    "remedy": f"free {(need - free) / 1e9:.1f} GB there, choose another file system, or add hosts",
                }
            )
    return problems


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "variable": {"type": "str", "required": True},
                    "bytes": {"type": "int", "default": 0},
                    "removable": {"type": "str", "default": ""},
                },
            },
        },
        supports_check_mode=True,
    )
    entries = module.params["paths"]
    probed = [probe(entry) for entry in entries]
    found = [item for item, _problems in probed]
    problems = [problem for _item, listed in probed for problem in listed]
    module.exit_json(changed=False, paths=found, problems=problems + shortages(entries, found))


if __name__ == "__main__":
    main()
