# SPDX-License-Identifier: Apache-2.0
"""Build what runs on a host as one archive that Python runs, such as ``hidden_state_bridge.pyz``.

    build_archive.py CACHE_DIR [--main MODULE] [--under PACKAGE] PACKAGE_OR_MODULE...

Its ``main`` is that of MODULE. With --under the sources lie in that package, as those of a collection do.
The same sources give the same bytes (sorted names, fixed time and mode), so that
copying the archive to a host is idempotent.  The path of the archive is the last
line printed; its name carries the hash of its content.
"""

from __future__ import annotations

import argparse
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

from {} import main

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


def build(sources: list[pathlib.Path], main_module: str, under: str = "") -> bytes:
    """Return the archive's bytes; the sources lie in the package `under`."""
    above = under.split(".") if under else []
    content = {"/".join([*above[: depth + 1], "__init__.py"]): b"" for depth in range(len(above))}
    content["__main__.py"] = MAIN.format(main_module).encode()
    for source in sources:
        found = members(source)
        if not found:
            raise SystemExit(f"{source}: no Python source there; is the collection complete?")
        if source.is_dir():
            # A directory of a collection is a package without saying so.
            content["/".join([*above, source.name, "__init__.py"])] = b""
        content.update({"/".join([*above, name]): data for name, data in found})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(content.items()):
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_STORED
            archive.writestr(info, data)
    return buffer.getvalue()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cache", type=pathlib.Path)
    parser.add_argument("--main", default="hidden_state_bridge.__main__")
    parser.add_argument("--under", default="")
    parser.add_argument("sources", nargs="+", type=pathlib.Path)
    options = parser.parse_args(arguments)
    data = build([source.resolve() for source in options.sources], options.main, options.under)
    target = options.cache / f"payload-{hashlib.sha256(data).hexdigest()[:16]}.pyz"
    if not target.exists():
        options.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=options.cache)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, target)
    print(target)


if __name__ == "__main__":
    main(sys.argv[1:])
