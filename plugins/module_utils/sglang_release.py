# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which SGLang release an interpreter has, and what a model directory says about the model.

PRIVATE to the collection. Nothing here imports SGLang or torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess

# -- releases ----------------------------------------------------------------------------------------

_RELEASE = re.compile(r"^v?(\d+)\.(\d+)\.(\d+)(?:[.-]?(rc|a|b|post|dev)(\d*))?")
_STAGES = {"dev": -4, "a": -3, "b": -2, "rc": -1, None: 0, "post": 1}


class ReleaseError(Exception):
    """The release, the installation or the model directory cannot be read; the message says what to do."""


def release_key(release):
    """A sortable key of a release such as ``0.5.10.post1`` or ``0.5.10rc0``; ReleaseError for anything else."""
    match = _RELEASE.match(release or "")
    if not match:
        raise ReleaseError("%r is no SGLang release number" % (release,))
    major, minor, patch, stage, number = match.groups()
    return (int(major), int(minor), int(patch), _STAGES[stage], int(number or 0))


# Run by the server's own interpreter. find_spec of a top-level package does not import it.
FIND = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
where = list(spec.submodule_search_locations or []) if spec else []
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps({"package": where[0] if where else None, "version": version}))
"""


def installation(python, environment=None, directory="/"):
    """Where an interpreter's SGLang lies and what release it is: ``package``, ``release``, ``models`` (directory).

    ``environment`` and ``directory`` are those that the server runs with: ``python -m`` looks for modules in its directory first.

    Raises ReleaseError where there is no interpreter or no SGLang.
    """
    try:
        # -c puts the working directory first in the path: / holds no package, and -I would hide source trees.
        done = subprocess.run([python, "-c", FIND], capture_output=True, timeout=60, check=False, cwd=directory, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError("%s cannot be run (%s). Set sglang_server_python to the Python that runs SGLang" % (python, error)) from error
    if done.returncode != 0:
        raise ReleaseError("%s: %s" % (python, done.stderr.decode("utf-8", "replace").strip()[-500:]))
    found = json.loads(done.stdout.decode("utf-8").splitlines()[-1])
    if not found["package"]:
        raise ReleaseError("%s has no SGLang. Install it there, or set sglang_server_python to the Python that runs SGLang" % python)
    release = found["version"] or release_in(found["package"])
    if not release:
        raise ReleaseError("%s: neither package metadata nor version.py gives a release" % found["package"])
    return {
        "package": found["package"],
        "release": release,
        "models": os.path.join(found["package"], "srt", "models"),
    }


def release_in(package):
    """The release that a source tree's own version file gives, or None."""
    for name in ("_version.py", "version.py"):
        try:
            with open(os.path.join(package, name), encoding="utf-8") as stream:
                match = re.search(r"""^__version__\s*(?::\s*str\s*)?=\s*(?:version\s*=\s*)?["']([^"']+)""", stream.read(), re.M)
        except OSError:
            continue
        if match:
            return match.group(1)
    return None


# -- the model directory --------------------------------------------------------------------------------


def model_facts(model):
    """What a model directory says: ``architecture``, ``hidden_size``, ``num_hidden_layers``, ``vocab_size``, ``dtype``,
    ``fingerprint``.

    The text model's part of a multimodal config (Kimi-K2.5) is read. ``fingerprint`` is the sha256 of config.json,
    of the weights' index and of names and sizes of the weight files: it tells weights apart without reading terabytes.
    Raises ReleaseError naming the file.
    """
    path = os.path.join(model, "config.json")
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
        config = json.loads(raw.decode("utf-8"))
        text = config.get("text_config") or config
        facts = {
            "architecture": (config.get("architectures") or [None])[0],
            "hidden_size": int(text["hidden_size"]),
            "num_hidden_layers": int(text["num_hidden_layers"]),
            "vocab_size": int(text["vocab_size"]),
            "dtype": str(_first(text, config, ("torch_dtype", "dtype")) or "bfloat16").replace("torch.", ""),
        }
    except OSError as error:
        raise ReleaseError("%s: %s. Set sglang_server_model to the model's directory" % (path, error.strerror)) from error
    except (ValueError, AttributeError) as error:
        raise ReleaseError("%s: not a model's configuration: %s" % (path, error)) from error
    except KeyError as error:
        raise ReleaseError("%s: has no %s" % (path, error.args[0])) from error
    facts["fingerprint"] = _fingerprint(model, raw)
    return facts


def _first(text, config, keys):
    for source in (text, config):
        for key in keys:
            if source.get(key):
                return source[key]
    return None


def _fingerprint(model, config):
    digest = hashlib.sha256(b"config.json\0" + config)
    for name in sorted(os.listdir(model)):
        path = os.path.join(model, name)
        if name.endswith(".index.json"):
            with open(path, "rb") as stream:
                digest.update(b"\0" + name.encode() + b"\0" + stream.read())
        elif name.endswith((".safetensors", ".bin", ".gguf")):
            digest.update(b"\0%s\0%d" % (name.encode(), os.stat(path).st_size))
    return digest.hexdigest()
