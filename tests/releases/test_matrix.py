# SPDX-License-Identifier: GPL-3.0-or-later
"""The patcher on the released sources: deepseek_v2.py of every release, every decoder model file of some.

RELEASES=all takes every release that the package index has, RELEASES=0.5.12,0.5.20 takes these; without it a sample is taken, the newest
release of each family and a few more.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import Counter

import decoders
import matrix
import pytest
import wheels
from packaging.version import Version

sys.path.insert(0, str(wheels.ROOT / "docs"))

import make_support

# What a reader of the sources says; the patcher has no table of releases.
FAMILIES = (
    ("A", "0.4.0", "0.4.10.post2"),
    ("B", "0.5.1", "0.5.9"),
    ("C", "0.5.10", "0.5.13.post1"),
    ("D", "0.5.14", "0.5.20"),
    ("E", "0.5.21", "0.5.23"),
)
NEWEST = FAMILIES[-1][2]
SAMPLE = {*(last for _letter, _first, last in FAMILIES), *wheels.RUN, *wheels.ALL_MODELS, "0.4.0", "0.4.4.post2", "0.4.8", "0.5.4.post3"}
# How many decoder model files there are, and how many of them have to be applied at least.
DECODERS = {"0.5.9": (78, 72), "0.5.20": (104, 92), "0.5.23": (111, 100)}
# Doubts of the audit that a reader of the model has settled.
SETTLED = {
    ("0.5.20", "qwen3_5.py"): {
        "self.norm is also used at line 1888 in another way": "the fused finalize takes the norm's place in a branch of its own: "
        "the capture does not come to its end there, and the requests get error markers"
    },
    ("0.5.23", "glm5_next.py"): {
        "SGLang's own collector capture_output changes the states it is given": "with hyper-connections only, whose states are wider than the "
        "norm: the runtime refuses the width"
    },
}
_ENCODER = "an encoder ends with its last layer, and has no final norm: the states of layers are all that can be had"
_OWN_NORM = "layers add their residual themselves, and the norm of the file hands what it is given beside them on untouched"
for _release in ("0.5.9", "0.5.20", "0.5.23"):
    SETTLED[_release, "bert.py"] = {
        "hidden_states is captured, the final norm takes in ['None'] beside hidden_states": _ENCODER,
        "the capture does not end at the final norm": _ENCODER,
        "the final norm takes in None, the layers give hidden_states": _ENCODER,
    }
    SETTLED[_release, "commandr.py"] = {
        "CohereDecoderLayer does not read the residual that the final norm adds": _OWN_NORM,
        "hidden_states is captured, the final norm takes in ['residual'] beside hidden_states": _OWN_NORM,
        "the capture does not end at the final norm": _OWN_NORM,
        "the final norm is a LayerNorm of the file's own, which shows no sum": _OWN_NORM,
    }
for _release in ("0.5.20", "0.5.23"):
    SETTLED[_release, "whisper.py"] = {
        "the loop of WhisperEncoder is not hooked": "the decoder's states are wanted, not the audio encoder's"
    }
# Wrong states, were they applied; why is in the model's source.
TRAPS = {
    "0.5.9": {"gemma3n_causal.py", "granitemoehybrid.py", "grok.py", "iquest_loopcoder.py"},
    "0.5.20": {
        *("deepseek_v4.py", "gemma3n_causal.py", "granitemoehybrid.py", "grok.py", "hrm_text.py", "hunyuan_v4.py"),
        *("inkling.py", "iquest_loopcoder.py", "kimi_k3.py", "nanbeige.py", "qwen4_exp.py", "zaya.py"),
    },
    "0.5.23": {
        *("beam.py", "gemma3n_causal.py", "grok.py", "hrm_text.py", "hunyuan_v4.py", "inkling.py", "iquest_loopcoder.py"),
        *("kimi_k3.py", "nanbeige.py", "qwen4_exp.py", "zaya.py"),
    },
}

# Classes of other files that have the forward of deepseek_v2.py, but not the __init__ that opens the capture: docs/architecture.md names them.
HEIRS = {"Glm4MoeModel", "Glm4MoeLiteModel", "MistralLarge3Model", "MistralLarge3EagleModel"}


def family_of(release: str) -> str | None:
    """The expected family; None for a release that is newer than what was read."""
    for letter, first, last in FAMILIES:
        if Version(first) <= Version(release) <= Version(last):
            return letter
    assert Version(release) > Version(NEWEST), f"{release} is in no family and not newer than {NEWEST}: read it, and enter it in FAMILIES"
    return None


@pytest.fixture(scope="session")
def listed() -> tuple[list[str], str]:
    """The releases to try, oldest first, and where the list is from."""
    asked = os.environ.get("RELEASES", "sample")
    if asked == "all":
        return wheels.releases()
    return wheels.sort(SAMPLE if asked == "sample" else asked.split(",")), f"RELEASES={asked}"


@pytest.fixture(scope="session")
def chosen(listed) -> list[str]:
    """The releases to try, in the cache."""
    wheels.fetch(listed[0])
    return listed[0]


@pytest.fixture(scope="session")
def outcomes(chosen) -> dict[tuple[str, str], matrix.Outcome]:
    return matrix.outcomes(chosen)


def test_deepseek_v2_is_patched_in_every_release(chosen, outcomes):
    wrong = []
    for release in chosen:
        outcome, expected = outcomes[release, matrix.MAIN_MODEL], family_of(release)
        if expected is not None and outcome.family != expected:
            wrong.append(f"{release}: family {outcome.family}, expected {expected} ({outcome.refusal})")
    assert not wrong, "\n".join(wrong)


def test_what_is_applied_is_right(outcomes):
    """Compiles, is the original but for the patch, captures what the norm takes in, is the same the second time, comes out to the byte."""
    wrong = []
    for (release, model), outcome in outcomes.items():
        settled = SETTLED.get((release, model), {})
        wrong += [f"{release} {model}: {problem}" for problem in outcome.problems if problem not in settled]
    assert not wrong, "\n".join(wrong)


def test_classes_that_inherit_the_forward_alone_are_known(chosen):
    """The audit sees that a patched forward asks nothing of them: of each release, and here who they are."""
    found = {}
    for release in chosen:
        for path in decoders.model_files(wheels.source(release)):
            data = path.read_bytes()
            owners = [node for node in ast.parse(data).body if isinstance(node, ast.ClassDef)] if b"(DeepseekV2Model)" in data else []
            for owner in owners:
                inits = [node for node in owner.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
                heir = "DeepseekV2Model" in [ast.unparse(base) for base in owner.bases]
                if heir and any("super().__init__(" not in ast.unparse(init) for init in inits):
                    found.setdefault(owner.name, []).append(release)
    assert set(found) <= HEIRS, found


def test_every_settled_doubt_is_still_there(chosen, outcomes):
    for (release, model), doubts in SETTLED.items():
        if release not in chosen:
            continue
        assert set(doubts) <= set(outcomes[release, model].problems)


def test_traps_are_refused(chosen, outcomes):
    traps = [(release, model) for release, models in TRAPS.items() if release in chosen for model in models]
    wrong = [trap for trap in traps if outcomes[trap].refusal is None]
    assert not wrong


def test_what_is_refused_has_a_reason(outcomes):
    for outcome in outcomes.values():
        assert (outcome.family is None) == bool(outcome.refusal), outcome


def test_nearly_all_decoder_models_are_applied(chosen, outcomes):
    for release, (expected, least) in DECODERS.items():
        if release not in chosen:
            continue
        found = [outcome for (name, _model), outcome in outcomes.items() if name == release]
        assert len(found) == expected
        assert sum(outcome.family is not None for outcome in found) >= least


def test_the_page_of_support_is_what_the_sources_say(chosen, outcomes):
    """Of a sample, its rows. A release newer than the page is left to the next `python docs/make_support.py`."""
    page = make_support.PAGE.read_text(encoding="utf-8")
    covered = make_support.releases_of(page)
    known = {key: outcome for key, outcome in outcomes.items() if key[0] in covered}
    if set(covered) <= set(chosen):
        assert page == make_support.page(known), "run python docs/make_support.py"
    else:
        assert set(make_support.rows(known)) <= set(page.splitlines()), "run python docs/make_support.py"


def test_what_is_said_to_run_is_run():
    """By the tests that install releases, which know one by its requirements."""
    requirements = wheels.ROOT / "tests" / "releases" / "engine" / "requirements"
    if not requirements.is_dir():
        pytest.skip("no release is installed by tests")
    assert {path.stem for path in requirements.glob("*.txt")} == set(wheels.RUN), (
        "mend RUN in wheels.py, and run python docs/make_support.py"
    )


def test_show_the_matrix(listed, outcomes, capsys):
    """Last, so that the table stands at the end."""
    names, origin = listed
    with capsys.disabled():
        print(f"\n\n{len(names)} releases, by {origin}\n\n{table(outcomes)}")


def table(outcomes: dict[tuple[str, str], matrix.Outcome]) -> str:
    """A line for each release, then what became of the other models."""
    lines = ["release        expected family lines at                     checks"]
    for (release, model), outcome in outcomes.items():
        if model == matrix.MAIN_MODEL:
            places = ", ".join(map(str, outcome.places))
            checks = "; ".join(outcome.problems) or outcome.refusal or "ok"
            lines.append(f"{release:14} {family_of(release) or 'newer':8} {outcome.family or '-':6} {outcome.lines:5} {places:22} {checks}")
    for release in wheels.ALL_MODELS:
        found = [outcome for (name, _model), outcome in outcomes.items() if name == release]
        if not found:
            continue
        shapes = Counter(outcome.family or "refused" for outcome in found)
        lines.append(
            f"\n{release}: {len(found)} decoder model files, " + ", ".join(f"{count} {shape}" for shape, count in shapes.most_common())
        )
        lines += [f"  refused  {outcome.model}: {outcome.refusal}" for outcome in found if outcome.refusal]
        for outcome in found:
            settled = SETTLED.get((release, outcome.model), {})
            lines += [f"  {'settled ' if doubt in settled else 'doubtful'} {outcome.model}: {doubt}" for doubt in outcome.problems]
    return "\n".join(lines)
