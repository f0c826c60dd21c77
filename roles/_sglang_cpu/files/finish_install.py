# SPDX-License-Identifier: Apache-2.0
"""Make a fresh environment run SGLang on a CPU, without touching a file of SGLang's.

    PYTHON finish_install.py SHIM_DIR STAMP

run by the environment's own interpreter: copies the kernel stand-in, lets a CUDA build of torchvision import beside a
CPU build of torch, proves that every file of SGLang is as its wheel has it, and writes STAMP. Exit status 1 where a
file differs, with its name.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_paths()["purelib"])

# torchvision's C++ operators cannot load beside a CPU torch, and its Python code registers fakes for two of them.
TORCHVISION_PRELUDE = """# Declares operators whose compiled part cannot load beside a CPU build of torch.
import torch as _torch
_library = _torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    try:
        _library.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError:
        pass  # This build has them.
"""


def install_shim(shim: Path) -> None:
    """Copy the kernel stand-in into the environment."""
    shutil.copytree(shim / "sgl_kernel", SITE / "sgl_kernel", dirs_exist_ok=True)


def declare_operators() -> None:
    """Put the declarations before everything else that torchvision does."""
    path = Path(importlib.util.find_spec("torchvision").origin)
    source = path.read_text(encoding="utf-8")
    if not source.startswith(TORCHVISION_PRELUDE):
        path.write_text(TORCHVISION_PRELUDE + source, encoding="utf-8")


def changed_files(package: str) -> tuple[list[str], int]:
    """Files of an installed package that differ from the hashes in its wheel's RECORD, and how many were looked at."""
    changed, looked_at = [], 0
    for entry in importlib.metadata.distribution(package).files or []:
        if entry.hash is None:
            continue
        looked_at += 1
        try:
            digest = hashlib.new(entry.hash.mode, Path(entry.locate()).read_bytes()).digest()
        except OSError:
            digest = b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
            changed.append(str(entry))
    return changed, looked_at


def main() -> int:
    shim, stamp = Path(sys.argv[1]), Path(sys.argv[2])
    install_shim(shim)
    declare_operators()
    changed, looked_at = changed_files("sglang")
    if changed or not looked_at:
        listed = ", ".join(changed[:10]) or "no hashes in RECORD"
        print(f"SGLang is not as released ({len(changed)} files): {listed}. Install it again", file=sys.stderr)
        return 1
    stamp.touch()
    print(f"SGLang {importlib.metadata.version('sglang')}: {looked_at} files as released")
    return 0


if __name__ == "__main__":
    sys.exit(main())
