# SPDX-License-Identifier: Apache-2.0
"""Tell what an interpreter is and which modules it lacks: ``PYTHON interpreter.py MODULE...`` prints one JSON object.

version, glibc (empty where the C library is another), machine, missing (those of the modules that it cannot find). Nothing is imported.
"""

import importlib.util
import json
import platform
import sys

libc, release = platform.libc_ver()
print(
    json.dumps(
        {
            "version": "%d.%d" % sys.version_info[:2],
            "glibc": release if libc == "glibc" and sys.implementation.name == "cpython" else "",
            "machine": platform.machine(),
            "missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None],
        }
    )
)
