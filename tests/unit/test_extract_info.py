# SPDX-License-Identifier: GPL-3.0-or-later
"""The module extraction_info, as a module: arguments in, result out."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.testing import patch_module_args

import hs_manifest as hm
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query
from ansible_collections.hidden_state.bridge.plugins.modules import extraction_info

IDENTITY = {"dataset": "d", "weights": "w", "layers": [1, 3, 4], "final": "post_norm", "dtype": "float32"}


@pytest.fixture
def ask(capsys):
    def call(**arguments):
        with patch_module_args(arguments), pytest.raises(SystemExit):
            extraction_info.main()
        return json.loads(capsys.readouterr().out)

    return call


def test_nothing_there(ask, tmp_path):
    found = ask(output_dir=str(tmp_path / "host"), identity=IDENTITY)
    assert (found["state"], found["changed"], found["done"], found["conflict"]) == ("absent", False, "", "")
    assert found["run"] == hm.run_of(IDENTITY) and found["service"] == "unknown"


def test_a_stopped_run_and_another_identity(ask, tmp_path):
    out = str(tmp_path / "host")
    hm.claim_directory(out, hm.run_of(IDENTITY))
    hm.claim_run(out, IDENTITY, {"host": "one"})
    hm.write_json(f"{out}/{hm.STATUS}", {"state": "stopped", "message": "7 records are left"})
    found = ask(output_dir=out)
    assert (found["state"], found["run"], found["message"]) == ("stopped", hm.run_of(IDENTITY), "7 records are left")
    found = ask(output_dir=out, identity={**IDENTITY, "final": "both"})
    assert found["state"] == "failed" and "post_norm" in found["conflict"] and '"final":"both"' in found["conflict"]
    assert found["run"] == hm.run_of({**IDENTITY, "final": "both"})


def test_the_service_is_asked(ask, tmp_path, monkeypatch):
    asked = []

    def query(*arguments):
        asked.append(arguments)
        return {"state": "running"}

    monkeypatch.setattr(service_query, "query", query)
    found = ask(output_dir=str(tmp_path), name="extraction", manager="supervisor", state_dir="/state")
    assert asked == [("supervisor", "extraction", "/state")]
    assert (found["state"], found["service"]) == ("starting", "running")

    def refuse(*_):
        raise service_query.ServiceError("supervisor cannot be asked: start it")

    monkeypatch.setattr(service_query, "query", refuse)
    found = ask(output_dir=str(tmp_path), name="extraction")
    assert found["failed"] is True and found["msg"] == "supervisor cannot be asked: start it"


def test_a_damaged_file_of_ours_is_named(ask, tmp_path):
    (tmp_path / hm.RUN).write_text("{")
    found = ask(output_dir=str(tmp_path))
    assert found["failed"] is True and f"{tmp_path / hm.RUN} cannot be read" in found["msg"]
