# SPDX-License-Identifier: GPL-3.0-or-later
"""The runtime beside each installed release, in its own environment: it imports, and without torch until a capture is opened."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

import models
from capture import patched
from cases import RELEASES, WITH_RIDS, parameters
from hs_capture.settings import DUMP_DIR
from hs_patcher import RUNTIME_FILES

MODEL = models.STRUCTURES["deepseek_v3"].model_file
CASES = [(release, 1) for release in RELEASES]

# SGLang's own __init__ may import torch: so the runtime's modules are loaded from where they lie, without it.
ALONE = """
import importlib, importlib.util, json, sys
place, names = sys.argv[1], sys.argv[2:]
spec = importlib.util.spec_from_file_location("hs_capture", f"{place}/__init__.py", submodule_search_locations=[place])
sys.modules["hs_capture"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["hs_capture"])
for name in names:
    importlib.import_module(f"hs_capture.{name}")
print(json.dumps(sorted(name for name in ("numpy", "safetensors", "sglang", "torch") if name in sys.modules)))
"""
# The patch's own lines, as the model file runs them when it is imported and a model is made.
GATE = """
import ast, json, sys
tree = ast.parse(open(sys.argv[1], encoding="utf-8").read())
space = {}
exec(compile(ast.Module([node for node in tree.body if getattr(node, "name", "") == "_hs_open"], []), "patch", "exec"), space)
try:
    opened = space["_hs_open"](object(), "layers", "norm")
except AttributeError as error:
    opened = str(error)
print(json.dumps([opened, sorted(name for name in ("sglang", "sglang.srt.hs_capture", "torch") if name in sys.modules)]))
"""
FACTS = """
import json
from sglang.srt.hs_capture import engine
print(json.dumps([engine.sglang_version(), engine.batches_name_requests()]))
"""


def run(python, script: str, *arguments: object, **environment: str):
    """What a script prints, in a process of its own."""
    environment = {**{name: value for name, value in os.environ.items() if name != DUMP_DIR}, **environment}
    done = subprocess.run([python, "-c", script, *map(str, arguments)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("release, tp_size", parameters(CASES, CASES[-1]))
def test_the_runtime_beside_a_release(engine_of, tmp_path, release, tp_size):
    engine = engine_of(release)
    with patched(engine, MODEL, tmp_path):
        place = engine.package / "srt" / "hs_capture"
        modules = [name.removesuffix(".py") for name in RUNTIME_FILES if name != "__init__.py"]
        assert run(engine.python, ALONE, place, *modules) == []
        assert run(engine.python, GATE, engine.model_file(MODEL)) == [None, []]
        opened, imported = run(engine.python, GATE, engine.model_file(MODEL), **{DUMP_DIR: str(tmp_path / "dumps")})
        # It went as far as to ask the model for its layers.
        assert "layers" in opened and "sglang.srt.hs_capture" in imported
        assert run(engine.python, FACTS) == [release, release in WITH_RIDS]
