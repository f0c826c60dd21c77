# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a server of a given release is started with to capture, what of an operator's arguments stands against it, and what a
running server's own settings have to be.

PRIVATE to the collection. tests/releases/test_flags.py holds the tables against the argument parsers of the releases.
"""

from __future__ import annotations

import json

# Python 3.9 loads a module from an archive before it says __package__.
if "." in __name__:
    from .sglang_release import release_key
else:
    from sglang_release import release_key

_GRAPH = "a replayed prefill graph does not run the Python loop"
_FUSION = "with the fusion the loop holds one rank's partial sum for batches up to 2,048 tokens"
_SHARD = "a rank holds a shard"
_RADIX = "SGLang refuses it beside --disable-radix-cache"

# (arguments, first release, last release, why); None is an open end. A flag that a release does not know ends
# its start, so each row names exactly the releases whose argument parsers have the flag and need it.
CAPTURE_FLAGS = (
    (("--disable-radix-cache",), None, None, "rows of a cached prefix are never computed"),
    (("--chunked-prefill-size", "-1"), None, None, "one forward a record, so one dump file"),
    (("--disable-piecewise-cuda-graph",), "0.5.10", "0.5.13", _GRAPH),
    (("--disable-prefill-cuda-graph",), "0.5.14", None, _GRAPH),
    # Before there is the flag, the capture switches the fusion off by itself. From 0.5.21 on every loop that fuses gives complete states;
    # from 0.5.14 on some do, but a prefill of more than 2,048 tokens has no fusion to lose.
    (("--enforce-disable-flashinfer-allreduce-fusion",), "0.5.10", "0.5.20", _FUSION),
)

# The first release that reads its arguments from a file, so that a key need not stand in the process list.
CONFIG_FILE_SINCE = "0.5.3"

# Flags of SGLang's that are the beginning of another one that is judged: written out they are never taken for that.
WHOLE = ("--ssl-keyfile",)

# An operator's arguments that capture does without: (flag, has values, why). A flag that ends with * is a beginning.
TAKEN_AWAY = (
    ("--speculative-*", True, "a verify pass looks like a prefill"),
    ("--enable-mixed-chunk", False, "decode rows are mixed into a prefill"),
    ("--enable-two-batch-overlap", False, "the layer loop is not run"),
    ("--tbo-token-distribution-threshold", True, "belongs to the two-batch overlap"),
    ("--enable-piecewise-cuda-graph", False, _GRAPH),
    ("--enforce-piecewise-cuda-graph", False, _GRAPH),
    ("--cuda-graph-backend-prefill", True, _GRAPH),
    ("--enable-flashinfer-allreduce-fusion", False, _FUSION),
    ("--enable-aiter-allreduce-fusion", False, _FUSION),
    ("--enable-hierarchical-cache", False, _RADIX),
    ("--enable-lmcache", False, _RADIX),
    ("--enable-unified-cache-external-linker", False, _RADIX),
    ("--enable-linker-mla-dedup", False, "SGLang refuses it without --enable-unified-cache-external-linker"),
    ("--chunked-prefill-size", True, "one forward a record, so one dump file"),
)


def within(release, first, last):
    """Whether a release is in a row of a table; pre- and post-releases count as their release."""
    key = release_key(release)
    return (first is None or key[:3] >= release_key(first)[:3]) and (last is None or key[:3] <= release_key(last)[:3])


def capture_arguments(release):
    """The arguments that make a server of this release fit for capture, in the order in which they are passed."""
    return [word for words, first, last, _why in CAPTURE_FLAGS if within(release, first, last) for word in words]


def reads_config_file(release):
    """Whether ``--config FILE`` exists."""
    return within(release, CONFIG_FILE_SINCE, None)


def means(word, flag):
    """Whether a word is that flag, alone or with its value. SGLang's parser takes the beginning of a flag for it: ``--dp`` is ``--dp-size``.

    A beginning that fits several flags is taken for each: SGLang takes it for the only one of them that the release has.
    """
    name = word.split("=", 1)[0]
    return name == flag or (name.startswith("--") and len(name) > 2 and flag.startswith(name) and name not in WHOLE)


def _rule_of(word):
    for flag, values, why in TAKEN_AWAY:
        if word.startswith(flag[:-1]) if flag.endswith("*") else means(word, flag):
            return flag, values, why
    return None


def without_taken(arguments):
    """(arguments that stay, [(words, why)] of those that capture takes away)."""
    stay, gone, index = [], [], 0
    while index < len(arguments):
        rule, end = _rule_of(arguments[index]), index + 1
        if rule is None:
            stay.append(arguments[index])
        else:
            # A value may be -1; only a flag begins with two dashes.
            while rule[1] and "=" not in arguments[index] and end < len(arguments) and not arguments[end].startswith("--"):
                end += 1
            gone.append((arguments[index:end], rule[2]))
        index = end
    return stay, gone


def capture_differences(arguments, release, environment=None):
    """Lines that say how a capture server differs from one with these arguments, each with its reason."""
    lines = ["- %s (%s)" % (" ".join(words), why) for words, why in without_taken(arguments)[1]]
    for words, first, last, why in CAPTURE_FLAGS:
        if within(release, first, last):
            lines.append("+ %s (%s)" % (" ".join(words), why))
    return lines + ["+ %s=%s" % pair for pair in sorted((environment or {}).items())]


# -- what corrupts states -------------------------------------------------------------------------------

# (field of /server_info, values that are right, operator's flags that set it otherwise, reason, remedy).
# A field that a release does not report is not judged: the flag does not exist there either.
# Rules without flags here are those whose flags capture takes away or sets by itself.
_OFF = (False, None)
_ONE = (1, None)
CAPTURE_RULES = (
    ("disable_radix_cache", (True,), (), "rows of a cached prefix are missing", "--disable-radix-cache"),
    ("pp_size", _ONE, ("--pp-size", "--pipeline-parallel-size"), "each stage sees only its own layers", "--pp-size 1"),
    ("dp_size", _ONE, ("--dp-size", "--data-parallel-size"), "a replica sees only its own requests", "--dp-size 1"),
    ("enable_dp_attention", _OFF, ("--enable-dp-attention",), "a rank sees only its own requests", "leave it out"),
    ("attn_dp_size", _ONE, ("--attention-data-parallel-size", "--attn-dp-size"), "a rank sees only its own requests", "leave it out"),
    ("attn_cp_size", _ONE, ("--attention-context-parallel-size", "--attn-cp-size"), _SHARD, "leave it out"),
    ("enable_prefill_cp", _OFF, ("--enable-prefill-cp",), _SHARD, "leave it out"),
    ("enable_prefill_context_parallel", _OFF, ("--enable-prefill-context-parallel",), _SHARD, "leave it out"),
    ("enable_nsa_prefill_context_parallel", _OFF, ("--enable-nsa-prefill-context-parallel",), _SHARD, "leave it out"),
    ("enable_dsa_prefill_context_parallel", _OFF, ("--enable-dsa-prefill-context-parallel",), _SHARD, "leave it out"),
    ("enable_layernorm_sp", _OFF, ("--enable-layernorm-sp",), _SHARD, "leave it out"),
    ("enable_attn_tp_input_scattered", _OFF, ("--enable-attn-tp-input-scattered",), _SHARD, "leave it out"),
    ("moe_a2a_backend", ("none", None), ("--moe-a2a-backend",), _SHARD, "--moe-a2a-backend none"),
    ("enable_deepep_moe", _OFF, ("--enable-deepep-moe",), _SHARD, "leave it out"),
    ("moe_dp_size", _ONE, ("--moe-data-parallel-size", "--moe-dp-size"), _SHARD, "leave it out"),
    ("dcp_size", _ONE, ("--decode-context-parallel-size", "--dcp-size"), "not known to leave states whole", "leave it out"),
    ("dwdp_size", _ONE, ("--dwdp-size",), "not known to leave states whole", "leave it out"),
    ("moe_dense_tp_size", (None,), ("--moe-dense-tp-size",), _SHARD, "leave it out"),
    ("disaggregation_mode", ("null", None), ("--disaggregation-mode",), "prefill runs elsewhere", "leave it out"),
    ("enable_pdmux", _OFF, ("--enable-pdmux",), "prefill is split by layers", "leave it out"),
    ("dllm_algorithm", (None,), ("--dllm-algorithm",), "forwards are denoising steps", "leave it out"),
    ("enable_two_batch_overlap", _OFF, (), "the layer loop is not run", "leave it out"),
    ("enable_mixed_chunk", _OFF, (), "decode rows are mixed into a prefill", "leave it out"),
    ("speculative_algorithm", (None,), (), "a verify pass looks like a prefill", "leave it out"),
)

SERVER_INFO_FIELDS = tuple(rule[0] for rule in CAPTURE_RULES) + (
    "version",
    "model_path",
    "served_model_name",
    "tp_size",
    "ep_size",
    "nnodes",
    "node_rank",
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
    wanted = last_value(arguments, "--chunked-prefill-size")
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
    elif "prefill_graph_backend" not in facts and facts.get("disable_piecewise_cuda_graph") is False:
        problems.append("prefill runs by CUDA graph, which skips the capture (remedy: --disable-piecewise-cuda-graph)")
    return problems


def last_value(arguments, *flags):
    """The value that counts of a flag in any of its spellings; None where it is not given."""
    value = None
    for index, word in enumerate(arguments):
        _name, equals, given = word.partition("=")
        if any(means(word, flag) for flag in flags):
            value = given if equals else arguments[index + 1] if index + 1 < len(arguments) else None
    return value


def attention_backend(arguments):
    """The backend that these arguments choose for prefill; empty where they leave it to SGLang."""
    return last_value(arguments, "--prefill-attention-backend") or last_value(arguments, "--attention-backend") or ""


def _prefill_graph_backend(text):
    """The prefill backend that a ``--cuda-graph-config`` names; None where it names none, or is not the JSON that SGLang takes."""
    try:
        return json.loads(text)["prefill"]["backend"]
    except (ValueError, KeyError, TypeError):
        return None


def contradictions(arguments):
    """Arguments of an operator that capture cannot work with, known before anything is stopped: messages."""
    found = []
    for _field, right, flags, reason, remedy in CAPTURE_RULES:
        given = [(word.split("=", 1)[0], flag) for word in arguments for flag in flags if means(word, flag)]
        if not given or last_value(arguments, *flags) in {str(one) for one in right}:
            continue
        name, flag = given[-1]
        if name in flags:
            found.append("%s: %s (remedy: %s)" % (name, reason, remedy))
        else:
            found.append("%s, short for %s: %s (remedy: %s; if it stands for another flag, write that out)" % (name, flag, reason, remedy))
    backend = _prefill_graph_backend(last_value(arguments, "--cuda-graph-config"))
    if backend not in (None, "disabled"):
        found.append(
            "--cuda-graph-config: its prefill backend is %r, which outweighs --disable-prefill-cuda-graph: %s "
            """(remedy: --cuda-graph-config '{"prefill": {"backend": "disabled"}}' in sglang_server_extra_capture_args)"""
            % (backend, _GRAPH)
        )
    if any(means(word, "--config") for word in arguments):
        found.append("--config: what its file turns on is not seen (remedy: give the file's settings as arguments)")
    return found
