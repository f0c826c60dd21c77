# SPDX-License-Identifier: Apache-2.0
"""Build the payload as one archive that Python runs: ``hidden_state_bridge.pyz``.

    build_archive.py CACHE_DIR PACKAGE_OR_MODULE...

The same sources give the same bytes (sorted names, fixed time and mode), so that
copying the archive to a host is idempotent.  The path of the archive is the last
line printed; its name carries the hash of its content.
"""

from __future__ import annotations

import hashlib
import io
import os
import pathlib
import sys
import tempfile
import zipfile

# Packages that the host's interpreter lacks lie beside the archive; whatever it has itself comes first.
MAIN = """import os
import sys

beside = os.path.join(os.path.dirname(os.path.abspath(sys.path[0])), "packages", sys.implementation.cache_tag)
if os.path.isdir(beside):
    sys.path += [os.path.join(beside, name) for name in sorted(os.listdir(beside))]

from hidden_state_bridge.__main__ import main

sys.exit(main())
"""
SUFFIXES = {".py", ".j2"}


def members(source: pathlib.Path) -> list[tuple[str, bytes]]:
    """Return (name in the archive, content) for a package directory or a module."""
    if source.is_file():
        return [(source.name, source.read_bytes())]
    return [
        (path.relative_to(source.parent).as_posix(), path.read_bytes())
        for path in source.rglob("*")
        if path.is_file() and path.suffix in SUFFIXES
    ]


def build(sources: list[pathlib.Path]) -> bytes:
    """Return the archive's bytes."""
    content = [("__main__.py", MAIN.encode())]
    for source in sources:
        found = members(source)
        if not found:
            raise SystemExit(f"{source}: no Python source there; is the collection complete?")
        content += found
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(content):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_STORED
            archive.writestr(info, data)
    return buffer.getvalue()


def main(arguments: list[str]) -> None:
    cache = pathlib.Path(arguments[0])
    data = build([pathlib.Path(argument).resolve() for argument in arguments[1:]])
    target = cache / f"payload-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=cache)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, target)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
