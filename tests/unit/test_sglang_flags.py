# SPDX-License-Identifier: GPL-3.0-or-later
"""The table of capture flags, what capture takes away, and what corrupts states."""

from __future__ import annotations

import json

import pytest

import sglang_flags as sf
from hs_capture import guards

BASE = ["--disable-radix-cache", "--chunked-prefill-size", "-1"]
NO_FUSION = ["--enforce-disable-flashinfer-allreduce-fusion"]


@pytest.mark.parametrize(
    "release, more",
    [
        ("0.4.0", []),
        ("0.4.10.post2", []),
        ("0.5.9", []),
        ("0.5.10rc0", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.10.post1", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.13", ["--disable-piecewise-cuda-graph", *NO_FUSION]),
        ("0.5.14", ["--disable-prefill-cuda-graph", *NO_FUSION]),
        ("0.5.20", ["--disable-prefill-cuda-graph", *NO_FUSION]),
        ("0.5.21", ["--disable-prefill-cuda-graph"]),
        ("0.5.23", ["--disable-prefill-cuda-graph"]),
        ("0.5.99", ["--disable-prefill-cuda-graph"]),
    ],
)
def test_capture_arguments(release, more):
    assert sf.capture_arguments(release) == BASE + more


def test_config_file():
    assert not sf.reads_config_file("0.5.2")
    assert sf.reads_config_file("0.5.3")
    assert sf.reads_config_file("0.5.20")


# What a server of 0.5.20 in capture mode reports.
GOOD = {
    "version": "0.5.20",
    "disable_radix_cache": True,
    "chunked_prefill_size": -1,
    "tp_size": 8,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "attn_cp_size": 1,
    "enable_prefill_cp": False,
    "enable_layernorm_sp": False,
    "enable_attn_tp_input_scattered": False,
    "moe_a2a_backend": "none",
    "moe_dense_tp_size": None,
    "enable_two_batch_overlap": False,
    "enable_mixed_chunk": False,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "cuda_graph_config": {"prefill": {"backend": "disabled"}},
}


def problems(arguments=BASE, **changed):
    return sf.capture_problems(sf.server_facts(dict(GOOD, **changed)), arguments)


def test_a_right_server_has_no_problems():
    assert problems() == []


CORRUPTING = {
    "disable_radix_cache": False,
    "chunked_prefill_size": 8192,
    "pp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "attn_cp_size": 2,
    "enable_prefill_cp": True,
    "enable_prefill_context_parallel": True,
    "enable_dsa_prefill_context_parallel": True,
    "attn_dp_size": 2,
    "moe_dp_size": 2,
    "dcp_size": 2,
    "dwdp_size": 2,
    "enable_nsa_prefill_context_parallel": True,
    "enable_layernorm_sp": True,
    "enable_attn_tp_input_scattered": True,
    "moe_a2a_backend": "deepep",
    "enable_deepep_moe": True,
    "moe_dense_tp_size": 1,
    "enable_two_batch_overlap": True,
    "enable_mixed_chunk": True,
    "speculative_algorithm": "EAGLE3",
    "disaggregation_mode": "prefill",
    "enable_pdmux": True,
    "dllm_algorithm": "LowConfidence",
}


@pytest.mark.parametrize("field", CORRUPTING)
def test_each_corrupting_setting_is_named_with_its_remedy(field):
    (problem,) = problems(**{field: CORRUPTING[field]})
    assert problem.startswith("%s is %r" % (field, CORRUPTING[field])) and "remedy: " in problem


def test_every_rule_is_tried():
    assert {rule[0] for rule in sf.CAPTURE_RULES} <= set(CORRUPTING)


def test_prefill_graphs_are_judged_by_their_backend():
    (problem,) = problems(cuda_graph_config={"prefill": {"backend": "breakable"}}, disable_prefill_cuda_graph=True)
    assert "--disable-prefill-cuda-graph" in problem
    assert problems(disable_prefill_cuda_graph=False) == []
    for value, count in ((True, 0), (False, 1)):
        found = problems(version="0.5.12", cuda_graph_config=None, disable_piecewise_cuda_graph=value)
        assert len(found) == count and all("--disable-piecewise-cuda-graph" in problem for problem in found)


def test_a_chunk_size_that_was_asked_for_is_right():
    assert problems(arguments=[*BASE, "--chunked-prefill-size", "4096"], chunked_prefill_size=4096) == []


def test_server_facts_hold_no_key():
    facts = sf.server_facts(dict(GOOD, api_key="tell-nobody", admin_api_key="nor-this", launch_command="--api-key tell-nobody"))
    assert "tell-nobody" not in json.dumps(facts) and "nor-this" not in json.dumps(facts)
    assert facts["tp_size"] == 8 and facts["prefill_graph_backend"] == "disabled"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--enable-dp-attention"],
        ["--pp-size", "2"],
        ["--pipeline-parallel-size=4"],
        ["--moe-a2a-backend=deepep"],
        ["--attn-dp-size", "2"],
        ["--moe-dp-size=2"],
        ["--enable-pdmux"],
        ["--dllm-algorithm", "LowConfidence"],
        # Of two spellings the later one counts.
        ["--data-parallel-size", "1", "--dp-size", "2"],
        ["--config", "/etc/sglang.yaml"],
    ],
)
def test_contradictions(arguments):
    (message,) = sf.contradictions(["--tp", "8", *arguments])
    assert message.startswith([word for word in arguments if word.startswith("--")][-1].split("=")[0]) and "remedy: " in message


# As argparse takes them: `--tp` is none of its own either, but the beginning of --tp-size.
@pytest.mark.parametrize(
    "arguments, flag",
    [
        (["--dp", "8"], "--dp-size"),
        (["--dp=8"], "--dp-size"),
        (["--pp-s=2"], "--pp-size"),
        (["--dp-size", "1", "--data-par", "2"], "--data-parallel-size"),
        (["--enable-dp-att"], "--enable-dp-attention"),
        (["--disagg", "prefill"], "--disaggregation-mode"),
    ],
)
def test_contradictions_in_flags_that_are_not_written_out(arguments, flag):
    (message,) = sf.contradictions(["--tp", "8", *arguments])
    assert ", short for %s: " % flag in message


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pp-size", "1", "--moe-a2a-backend=none", "--trust-remote-code"],
        ["--dp", "1", "--dp-size", "2", "--dp=1"],
        ["--enable-dp-attention-local-control-broadcast", "--", "-d"],
        ["--dllm-algorithm-config=/etc/dllm.yaml"],
    ],
)
def test_no_contradiction(arguments):
    assert sf.contradictions(["--tp", "8", *arguments]) == []


def test_a_flag_of_its_own_is_not_the_beginning_of_another():
    assert not sf.means("--ssl-keyfile=/etc/key.pem", "--ssl-keyfile-password")
    assert sf.means("--ssl-keyfile-p", "--ssl-keyfile-password") and sf.means("--ssl-keyfile", "--ssl-keyfile")


def test_prefill_graphs_in_a_configuration_are_contradicted():
    config = '{"decode": {"backend": "full"}, "prefill": {"backend": "%s"}}'
    (message,) = sf.contradictions(["--tp", "8", "--cuda-graph-config", config % "breakable"])
    assert message.startswith("--cuda-graph-config: its prefill backend is 'breakable'") and "sglang_server_extra_capture_args" in message
    assert len(sf.contradictions(["--cuda-graph-conf=" + config % "full"])) == 1
    # The later one counts, as the remedy needs.
    assert sf.contradictions(["--cuda-graph-config", config % "full", "--cuda-graph-config", config % "disabled"]) == []
    for value in ('{"decode": {"backend": "full"}}', '{"prefill": {"max_bs": 64}}', "{", "[]", '{"prefill": null}'):
        assert sf.contradictions(["--cuda-graph-config", value]) == []


def test_what_the_server_refuses_to_start_with_is_known_before():
    known = {rule[0] for rule in sf.CAPTURE_RULES}
    settings = {row[0] for row in guards._REFUSED}
    left = {name for name in settings - known if not sf.without_taken(["--" + name.replace("_", "-")])[1]}
    assert left == set()
    # And the other way round: a setting that a file or a preset turned on is seen by the server alone. Without its cache it has no rows to miss.
    assert known - settings == {"disable_radix_cache"}


def test_the_value_of_a_flag_that_is_not_written_out():
    assert sf.last_value(["--api", "one", "--api-key=two", "--chunked", "5"], "--api-key") == "two"
    assert sf.last_value(["--api-k", "one"], "--api-key") == "one"
    assert problems(arguments=[*BASE, "--chunked-prefill", "4096"], chunked_prefill_size=4096) == []


# -- what capture takes away ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, stay, gone",
    [
        (["--tp", "8"], ["--tp", "8"], []),
        (["--chunked-prefill-size", "-1", "--tp", "8"], ["--tp", "8"], [["--chunked-prefill-size", "-1"]]),
        (["--speculative-algorithm=EAGLE", "--tp=8"], ["--tp=8"], [["--speculative-algorithm=EAGLE"]]),
        (
            ["--speculative-algo", "EAGLE", "--speculative-num-steps", "3", "--enable-mixed-chunk", "--tp", "8"],
            ["--tp", "8"],
            [["--speculative-algo", "EAGLE"], ["--speculative-num-steps", "3"], ["--enable-mixed-chunk"]],
        ),
        (["--chunked", "4096", "--enable-mixed", "--tp=8"], ["--tp=8"], [["--chunked", "4096"], ["--enable-mixed"]]),
        (["--enable-aiter-allreduce-fusion", "--tp=8"], ["--tp=8"], [["--enable-aiter-allreduce-fusion"]]),
        (
            ["--enable-lmcache", "--enable-unified-cache-external-linker", "--enable-linker-mla-dedup", "--tp", "8"],
            ["--tp", "8"],
            [["--enable-lmcache"], ["--enable-unified-cache-external-linker"], ["--enable-linker-mla-dedup"]],
        ),
        (["--unified-cache-external-linker-backend", "mooncake"], ["--unified-cache-external-linker-backend", "mooncake"], []),
        (["serve", "--enable-two-batch-overlap", "/model"], ["serve", "/model"], [["--enable-two-batch-overlap"]]),
    ],
)
def test_what_is_taken_away(arguments, stay, gone):
    stays, taken = sf.without_taken(arguments)
    assert (stays, [words for words, _why in taken]) == (stay, gone)


def test_differences_are_told_with_their_reasons():
    lines = sf.capture_differences(["--enable-mixed-chunk", "--tp", "8"], "0.5.20", {"SGLANG_HS_DUMP_DIR": "/dumps"})
    assert lines[0] == "- --enable-mixed-chunk (decode rows are mixed into a prefill)"
    assert any(line.startswith("+ --disable-prefill-cuda-graph (") for line in lines)
    assert lines[-1] == "+ SGLANG_HS_DUMP_DIR=/dumps"
    assert not any("--tp" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ([], ""),
        (["--attention-backend", "fa3"], "fa3"),
        (["--attention-backend=fa3", "--attention-backend", "triton"], "triton"),
        (["--prefill-attention-backend", "fa4", "--attention-backend", "fa3", "--decode-attention-backend", "triton"], "fa4"),
    ],
)
def test_the_backend_that_prefill_runs_with(arguments, backend):
    assert sf.attention_backend(arguments) == backend
