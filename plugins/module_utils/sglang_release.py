# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What depends on the SGLang release, and what a model directory says about the model.

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
_FIND = """
import importlib.metadata, importlib.util, json
spec = importlib.util.find_spec("sglang")
where = list(spec.submodule_search_locations or []) if spec else []
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps({"package": where[0] if where else None, "version": version}))
"""


def installation(python):
    """Where an interpreter's SGLang lies and what release it is: ``package``, ``release``, ``models`` (directory).

    Raises ReleaseError where there is no interpreter or no SGLang.
    """
    try:
        # -c puts the working directory first in the path: / holds no package, and -I would hide source trees.
        done = subprocess.run([python, "-c", _FIND], capture_output=True, timeout=60, check=False, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseError("%s cannot be run (%s). Set sglang_server_python to the Python that runs SGLang" % (python, error)) from error
    if done.returncode != 0:
        raise ReleaseError("%s: %s" % (python, done.stderr.decode("utf-8", "replace").strip()[-500:]))
    found = json.loads(done.stdout.decode("utf-8").splitlines()[-1])
    if not found["package"]:
        raise ReleaseError("%s has no SGLang. Install it there, or set sglang_server_python to the Python that runs SGLang" % python)
    release = found["version"] or _release_in(found["package"])
    if not release:
        raise ReleaseError("%s: neither package metadata nor version.py gives a release" % found["package"])
    return {
        "package": found["package"],
        "release": release,
        "models": os.path.join(found["package"], "srt", "models"),
    }


def _release_in(package):
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


# -- what a capture server is started with --------------------------------------------------------------

# (arguments, first release, last release, why); None is an open end. A flag that a release does not know ends
# its start, so each row names exactly the releases whose argument parsers have the flag and need it.
CAPTURE_FLAGS = (
    (("--disable-radix-cache",), None, None, "rows of a cached prefix are never computed"),
    (("--chunked-prefill-size", "-1"), None, None, "one forward a record, so one dump file"),
    (
        ("--disable-piecewise-cuda-graph",),
        "0.5.10",
        "0.5.13",
        "a replayed prefill graph does not run the Python loop",
    ),
    (("--disable-prefill-cuda-graph",), "0.5.14", None, "a replayed prefill graph does not run the Python loop"),
    (
        ("--enforce-disable-flashinfer-allreduce-fusion",),
        "0.5.10",
        "0.5.13",
        "with the fusion the loop holds one rank's partial sum for batches up to 2,048 tokens",
    ),
)

# The same for the environment: (variable, value, first release, last release, why).
CAPTURE_ENVIRONMENT = (("SGLANG_IS_FLASHINFER_AVAILABLE", "false", "0.5.9", "0.5.9", "the only switch of the fusion in this release"),)

# The first release that reads its arguments from a file, so that a key need not stand in the process list.
CONFIG_FILE_SINCE = "0.5.9"


def _within(release, first, last):
    key = release_key(release)
    # A pre-release already has the flags of its release; a post-release still has them.
    return (first is None or key[:3] >= release_key(first)[:3]) and (last is None or key[:3] <= release_key(last)[:3])


def capture_arguments(release):
    """The arguments that make a server of this release fit for capture, in the order in which they are passed."""
    return [word for words, first, last, _why in CAPTURE_FLAGS if _within(release, first, last) for word in words]


def capture_environment(release):
    """The environment that goes with them."""
    return {name: value for name, value, first, last, _why in CAPTURE_ENVIRONMENT if _within(release, first, last)}


def reads_config_file(release):
    """Whether ``--config FILE`` exists."""
    return _within(release, CONFIG_FILE_SINCE, None)


# -- what corrupts states -------------------------------------------------------------------------------

# (field of /server_info, values that are right, operator's flags that set it otherwise, reason, remedy).
# A field that a release does not report is not judged: the flag does not exist there either.
_OFF = (False, None)
_ONE = (1, None)
CAPTURE_RULES = (
    ("disable_radix_cache", (True,), (), "rows of a cached prefix are missing", "--disable-radix-cache"),
    ("pp_size", _ONE, ("--pp-size", "--pipeline-parallel-size"), "each stage sees only its own layers", "--pp-size 1"),
    ("dp_size", _ONE, ("--dp-size", "--data-parallel-size"), "a replica sees only its own requests", "--dp-size 1"),
    ("enable_dp_attention", _OFF, ("--enable-dp-attention",), "a rank sees only its own requests", "leave it out"),
    ("attn_cp_size", _ONE, ("--attention-context-parallel-size", "--attn-cp-size"), "a rank holds a shard", "leave it out"),
    ("enable_prefill_cp", _OFF, ("--enable-prefill-cp",), "a rank holds a shard", "leave it out"),
    (
        "enable_prefill_context_parallel",
        _OFF,
        ("--enable-prefill-context-parallel",),
        "a rank holds a shard",
        "leave it out",
    ),
    (
        "enable_nsa_prefill_context_parallel",
        _OFF,
        ("--enable-nsa-prefill-context-parallel",),
        "a rank holds a shard",
        "leave it out",
    ),
    ("enable_layernorm_sp", _OFF, ("--enable-layernorm-sp",), "a rank holds a shard", "leave it out"),
    (
        "enable_attn_tp_input_scattered",
        _OFF,
        ("--enable-attn-tp-input-scattered",),
        "a rank holds a shard",
        "leave it out",
    ),
    ("moe_a2a_backend", ("none", None), ("--moe-a2a-backend",), "a rank holds a shard", "--moe-a2a-backend none"),
    ("enable_deepep_moe", _OFF, ("--enable-deepep-moe",), "a rank holds a shard", "leave it out"),
    ("moe_dense_tp_size", (None,), ("--moe-dense-tp-size",), "a rank holds a shard", "leave it out"),
    ("enable_two_batch_overlap", _OFF, ("--enable-two-batch-overlap",), "the layer loop is not run", "leave it out"),
    ("enable_mixed_chunk", _OFF, ("--enable-mixed-chunk",), "decode rows are mixed into a prefill", "leave it out"),
    (
        "speculative_algorithm",
        (None,),
        ("--speculative-algorithm", "--speculative-algo"),
        "a verify pass looks like a prefill",
        "leave it out",
    ),
    ("disaggregation_mode", ("null", None), ("--disaggregation-mode",), "prefill runs elsewhere", "leave it out"),
)

SERVER_INFO_FIELDS = tuple(rule[0] for rule in CAPTURE_RULES) + (
    "version",
    "model_path",
    "served_model_name",
    "tp_size",
    "ep_size",
    "nnodes",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "moe_runner_backend",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "context_length",
    "max_total_num_tokens",
    "max_running_requests",
    "disable_overlap_schedule",
    "disable_prefill_cuda_graph",
    "disable_piecewise_cuda_graph",
    "enforce_disable_flashinfer_allreduce_fusion",
)
"""Fields of /server_info that may leave the host. The whole of it holds the API keys."""


def server_facts(info):
    """The fields of a /server_info answer that may be shown, and ``prefill_graph_backend``."""
    facts = {field: info[field] for field in SERVER_INFO_FIELDS if field in info}
    graphs = info.get("cuda_graph_config")
    prefill = graphs.get("prefill") if isinstance(graphs, dict) else None
    if isinstance(prefill, dict):
        facts["prefill_graph_backend"] = prefill.get("backend")
    return facts


def capture_problems(facts, arguments):
    """What of a running server's own settings would corrupt states: messages with the remedy, [] where nothing.

    ``facts`` is what server_facts gives; ``arguments`` are those that the server was meant to take.
    """
    problems = []
    for field, right, _flags, reason, remedy in CAPTURE_RULES:
        if field in facts and facts[field] not in right:
            problems.append("%s is %r: %s (remedy: %s)" % (field, facts[field], reason, remedy))
    wanted = _last_value(arguments, "--chunked-prefill-size")
    if wanted == "-1" and facts.get("chunked_prefill_size", -1) not in (-1, None):
        problems.append(
            "chunked_prefill_size is %r although -1 was asked for (remedy: --chunked-prefill-size -1)" % facts["chunked_prefill_size"]
        )
    # With graphs off by other means the switch itself can read false, so the backend decides where there is one.
    if facts.get("prefill_graph_backend", "disabled") != "disabled":
        problems.append(
            "prefill runs by CUDA graph (%s), which skips the capture (remedy: --disable-prefill-cuda-graph)"
            % facts["prefill_graph_backend"]
        )
    return problems


def _last_value(arguments, flag):
    value = None
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif word.startswith(flag + "="):
            value = word.split("=", 1)[1]
    return value


def contradictions(arguments):
    """Arguments of an operator that capture cannot work with, known before anything is stopped: messages."""
    found = []
    for _field, right, flags, reason, remedy in CAPTURE_RULES:
        for flag in flags:
            if not any(word == flag or word.startswith(flag + "=") for word in arguments):
                continue
            value = _last_value(arguments, flag)
            if value is not None and value in {str(one) for one in right}:
                continue
            found.append("%s: %s (remedy: %s)" % (flag, reason, remedy))
    return found


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
