# SPDX-License-Identifier: GPL-3.0-or-later
"""The action states_fetch: what is pulled is right, whole and pulled once; a connection stands in that copies files of this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
from types import SimpleNamespace

import pytest
from ansible.errors import AnsibleActionFail, AnsibleError

import hs_manifest as hm
from ansible_collections.hidden_state.bridge.plugins.action import states_fetch
from ansible_collections.hidden_state.bridge.plugins.module_utils import hs_manifest as plugin_manifest

RECORDS = 5


class Connection:
    """Copies as fetch_file does; `fault` may do something else with a path."""

    def __init__(self):
        self.pulled = []
        self.fault = lambda source: None

    def fetch_file(self, source, target):
        self.fault(source)
        self.pulled.append(os.path.basename(source))
        shutil.copyfile(source, target)


@pytest.fixture
def host(tmp_path):
    """A host's directory, and what is wanted of it: records in two formats, one of them with another name in the collection."""
    source, dest = tmp_path / "host", tmp_path / "incoming"
    dest.mkdir()
    lines = []
    for record in range(RECORDS):
        files = []
        for name, renamed in (
            (f"specforge/data_{record}.ckpt", ""),
            (f"speculators/hs_{record}.safetensors", f"speculators/hs_{record + 9}.safetensors"),
        ):
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(name.encode() * 9)
            file = {"file": renamed or name, "bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            files.append({**file, "from": name} if renamed else file)
        lines.append({"id": record, "source": "a", "line": 1, "tokens": 3, "host": "one", **hm.named(files)})
    hm.write_lines(str(dest / "wanted.jsonl"), lines)
    return source, dest


@pytest.fixture
def pull(host):
    source, dest = host
    action = states_fetch.ActionModule.__new__(states_fetch.ActionModule)
    action._connection, action._host, action._become = Connection(), "one", False

    def call(**changes):
        return action._pull({"src": str(source), "dest": str(dest), "min_free_bytes": 0, **changes})

    call.action = action
    return call


def test_everything_is_pulled_once_under_its_own_name(host, pull):
    source, dest = host
    result = pull()
    assert (result["changed"], result["records"], result["problems"]) == (True, RECORDS, [])
    assert result["bytes"] == sum(entry["bytes"] for entry in hm.read_lines(str(dest / "wanted.jsonl")))
    for path in source.rglob("*.*"):
        assert (dest / path.relative_to(source)).read_bytes() == path.read_bytes()
    pull.action._connection.pulled.clear()
    assert pull() == {"changed": False, "records": 0, "bytes": 0, "problems": []}
    assert pull.action._connection.pulled == []
    assert not [path for path in dest.rglob("*") if ".tmp-" in path.name]


def test_a_file_that_is_not_as_its_hash_says_is_named_and_the_others_come(host, pull):
    source, dest = host
    (source / "speculators/hs_2.safetensors").write_bytes(b"speculators/hs_3.safetensors" * 9)
    result = pull()
    assert [problem["id"] for problem in result["problems"]] == [2] and result["records"] == RECORDS - 1
    assert "hs_2.safetensors has another SHA-256 than its manifest says" in result["problems"][0]["reason"]
    assert not (dest / "speculators/hs_2.safetensors").exists() and 2 not in hm.Manifest(str(dest)).entries


@pytest.mark.parametrize("stage", [1, 4, 8])
def test_killed_anywhere_it_goes_on(host, pull, stage):
    _source, dest = host

    def die(_source):
        if len(pull.action._connection.pulled) == stage:
            raise KeyboardInterrupt

    pull.action._connection.fault = die
    with pytest.raises(KeyboardInterrupt):
        pull()
    with (dest / hm.MANIFEST).open("a") as stream:
        stream.write('{"id": 4, "sou')
    pull.action._connection.fault = lambda source: None
    assert pull()["records"] == RECORDS - (stage // 2)
    assert set(hm.Manifest(str(dest)).entries) == set(range(RECORDS))


def test_what_stops_a_pull_is_said_with_its_remedy(host, pull):
    source, dest = host
    with pytest.raises(AnsibleActionFail, match=r"and 1152922 TB stay free \(extraction_min_free_bytes\); make room and call again"):
        pull(min_free_bytes=1 << 60)

    def refuse(path):
        raise AnsibleError(f"permission denied: {path}")

    pull.action._connection.fault = refuse
    with pytest.raises(AnsibleActionFail, match=r"data_0\.ckpt cannot be read: permission denied: \S+$"):
        pull()
    pull.action._become = True
    with pytest.raises(
        AnsibleActionFail,
        match=rf"permission denied.*as the user that connects.*chgrp -R GROUP {source} && chmod -R g\+rX {source}\)"
        r".*\(extraction_output_group\), or connect as extraction_user",
    ):
        pull()


def test_two_pulls_into_one_place_are_refused(host, pull, monkeypatch):
    source, dest = host
    lock = hm.Lock(str(dest))
    monkeypatch.setattr(plugin_manifest.Lock.__init__, "__defaults__", (0.1,))
    pull.action._task = SimpleNamespace(check_mode=False)
    pull.action._play_context = SimpleNamespace(become=False)
    monkeypatch.setattr(states_fetch.ActionBase, "run", lambda *_: {})
    monkeypatch.setattr(
        pull.action, "validate_argument_spec", lambda **_: ({}, {"src": str(source), "dest": str(dest), "min_free_bytes": 0})
    )
    with pytest.raises(AnsibleActionFail, match="is locked by another"):
        pull.action.run()
    lock.close()
    assert pull.action.run()["records"] == RECORDS
