# SPDX-License-Identifier: GPL-3.0-or-later
"""The tables of capture flags on the argument parsers of the releases: none that a release does not know, none missing.

RELEASES=sample, the default, takes 24 releases from 0.4.9 to the newest; RELEASES=all takes every one that the package index has.
"""

from __future__ import annotations

import os
import re

import flags
import pytest
import wheels
from packaging.version import Version

from ansible_collections.hidden_state.bridge.plugins.module_utils import host_processes as hp
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_flags as sf

OLDEST = "0.4.9"
# The first and the last release of each stretch in which the flags are the same, and some between.
SAMPLE = (
    *(
        "0.4.9",
        "0.4.9.post6",
        "0.4.10",
        "0.4.10.post2",
        "0.5.1",
        "0.5.2",
        "0.5.3",
        "0.5.3.post3",
        "0.5.4",
        "0.5.5.post3",
        "0.5.6.post2",
        "0.5.8",
    ),
    *("0.5.9", "0.5.10", "0.5.10.post1", "0.5.12", "0.5.13.post1", "0.5.14", "0.5.16", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
)
# Flags that lay out the computation, by their names; each has to be refused, taken away, or known to leave states whole.
LAYOUT = re.compile(
    r"^--(enable-dp-attention|(.*-)?(dp|data-parallel|pp|pipeline-parallel|cp|context-parallel)-size|enable-.*(context-parallel|prefill-cp)"
    r"|.*a2a-backend|enable-deepep-moe|moe-dense-tp-size|enable-layernorm-sp|enable-attn-tp-input-scattered|enable-two-batch-overlap"
    r"|enable-mixed-chunk|dwdp-size|speculative-algo.*|disaggregation-mode|(enable|enforce)-piecewise-cuda-graph|cuda-graph-backend-prefill)$"
)
HARMLESS = {
    # Of a drafter that capture runs without.
    "--speculative-moe-a2a-backend",
}


def wanted() -> list[str]:
    if os.environ.get("RELEASES", "sample") != "all":
        return list(SAMPLE)
    return [release for release in wheels.releases()[0] if Version(release) >= Version(OLDEST)]


@pytest.fixture(scope="module", params=wanted())
def release(request) -> tuple[str, dict[str, flags.Flag]]:
    """A release and its flags."""
    wheels.fetch([request.param])
    return request.param, flags.flags(wheels.source(request.param) / "sglang" / "srt")


def test_the_release_knows_every_flag(release):
    name, known = release
    words = sf.capture_arguments(name)
    for index, word in enumerate(words):
        if word.startswith("--"):
            value_follows = index + 1 < len(words) and not words[index + 1].startswith("--")
            assert word in known and known[word].takes_value == value_follows, (name, word)


def test_no_switch_is_missing(release):
    name, known = release
    words = sf.capture_arguments(name)
    assert {"--disable-radix-cache", "--chunked-prefill-size"} <= set(words)
    graphs = [flag for flag in ("--disable-prefill-cuda-graph", "--disable-piecewise-cuda-graph") if flag in known]
    assert graphs[:1] == [word for word in words if word.endswith("-cuda-graph")], name
    # From 0.5.21 on every loop whose layers fuse gives out complete states; before, those of the shape "tuple" do not.
    fusion = "--enforce-disable-flashinfer-allreduce-fusion"
    assert (fusion in words) == (fusion in known and Version(name) < Version("0.5.21")), name
    assert (fusion in known) == (Version(name) >= Version("0.5.10")), name
    assert sf.reads_config_file(name) == ("--config" in known), name


def test_every_layout_is_judged(release):
    name, known = release
    refused = {flag for rule in sf.CAPTURE_RULES for flag in rule[2]}
    open_ones = {flag for flag in known if LAYOUT.match(flag)} - refused - HARMLESS
    assert {flag for flag in open_ones if not sf.without_taken([flag, "1"])[1]} == set(), name


def test_every_fusion_that_can_be_asked_for_is_taken_away(release):
    name, known = release
    asked = {flag for flag in known if re.fullmatch(r"--enable-.*-allreduce-fusion", flag)}
    assert {flag for flag in asked if not sf.without_taken([flag])[1]} == set(), name


def test_values_of_what_is_taken_away(release):
    """A switch must not take the word after it along."""
    name, known = release
    for flag, has_values, _why in sf.TAKEN_AWAY:
        if flag in known and not has_values:
            # From 0.5.14 on some are actions of their own kind, which take none either.
            assert not known[flag].takes_value or "piecewise" in flag, (name, flag)


def test_no_flag_is_the_beginning_of_a_judged_one(release):
    """A beginning counts as the flag, so a flag of its own must not be one, or has to be named as such."""
    name, known = release
    judged = {flag for rule in sf.CAPTURE_RULES for flag in rule[2]} | {row[0] for row in sf.TAKEN_AWAY}
    judged |= {"--config", *hp._SECRET_OPTIONS}
    assert {
        (short, flag) for short in set(known) - set(sf.WHOLE) for flag in judged if flag != short and flag.startswith(short)
    } == set(), name


def test_no_flag_is_misspelt():
    """Each flag of the tables is one of some release in the sample."""
    wheels.fetch(SAMPLE)
    known = set().union(*(flags.flags(wheels.source(one) / "sglang" / "srt") for one in SAMPLE))
    named = {flag for rule in sf.CAPTURE_RULES for flag in rule[2]} | {row[0] for row in sf.TAKEN_AWAY if not row[0].endswith("*")}
    assert named - known == set()
