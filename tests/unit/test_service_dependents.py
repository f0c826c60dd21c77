# SPDX-License-Identifier: GPL-3.0-or-later
"""Units that stop along with a server's unit are known from before the stop, and are started again once the server serves."""

from __future__ import annotations

import os

import pytest
from test_managed_service import FakeModule, Outcome

from ansible_collections.hidden_state.bridge.plugins.module_utils import service_control, service_worker
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_dependents as sd
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

ALONG = {
    "sglang.service": {"ConsistsOf": "gateway.service", "RequiredBy": "metrics.service idle.service", "BoundBy": "gateway.service"},
    "gateway.service": {"BoundBy": "sidecar.socket sglang.service"},
}


class Host:
    """A systemd whose stop of a unit takes down what depends on it; ``broken`` units do not start."""

    def __init__(self, monkeypatch, tmp_path):
        self.up, self.broken, self.absent, self.told, self.clock = set(), {}, set(), [], 0.0
        monkeypatch.setattr(sd.layer, "RUN_DIR", str(tmp_path / "run"))
        monkeypatch.setattr(sq, "run", self.run)
        for module in (service_control, service_worker, sd):
            monkeypatch.setattr(module.time, "sleep", self.sleep)
            monkeypatch.setattr(module.time, "monotonic", lambda: self.clock)

    def sleep(self, seconds):
        self.clock += seconds

    def fall(self, unit):
        if unit in self.up:
            self.up.discard(unit)
            for name in " ".join(ALONG.get(unit, {}).values()).split():
                self.fall(name)

    def facts(self, unit):
        state = "active" if unit in self.up else self.broken.get(unit, "inactive")
        load = "not-found" if unit in self.absent else "loaded"
        pid = os.getpid() if unit == "sglang.service" and unit in self.up else 0
        return {"Id": unit, "LoadState": load, "ActiveState": state, "MainPID": pid, "Job": 0, **ALONG.get(unit, {})}

    def run(self, argv, **_options):
        units = argv[argv.index("--") + 1 :] if "--" in argv else ["sglang.service"]
        if argv[:2] == ["systemctl", "show"]:
            return 0, "\n".join("".join("%s=%s\n" % one for one in self.facts(unit).items()) for unit in units), ""
        if argv[0] == "systemctl" and argv[1] in ("start", "stop"):
            self.told.append(argv[1:])
            for unit in units:
                if argv[1] == "stop":
                    self.fall(unit)
                elif unit not in self.broken:
                    self.up.add(unit)
        return 0, "", ""


@pytest.fixture
def host(monkeypatch, tmp_path):
    host = Host(monkeypatch, tmp_path)
    host.up = {"sglang.service", "gateway.service", "metrics.service", "sidecar.socket", "other.service"}
    return host


def stop():
    service_control.of("systemd", {"name": "sglang", "stop_timeout": 9}).stop([])


def rejoin(**params):
    with pytest.raises(Outcome) as caught:
        service_worker.Worker(FakeModule(manager="systemd", state="rejoined", **params)).run()
    return caught.value.values


def test_what_stopped_along_with_the_server_is_started_once_it_serves(host):
    stop()
    assert host.up == {"other.service"}
    # Of the capture that came in its place.
    host.up.add("sglang.service")
    stop()
    host.up.add("sglang.service")
    assert rejoin(check_mode=True)["changed"] and host.told[-1][0] == "stop"
    assert rejoin()["changed"]
    assert host.told[-1] == ["start", "--no-block", "--", "gateway.service", "metrics.service", "sidecar.socket"]
    assert "idle.service" not in host.up
    assert not rejoin()["changed"] and len(host.told) == 3


def test_one_that_does_not_start_is_named_with_the_command_and_tried_again(host):
    stop()
    host.broken["metrics.service"] = "failed"
    with pytest.raises(sq.ServiceError, match=r"\(metrics.service: failed\)\. See their logs, then: systemctl start metrics.service$"):
        rejoin()
    assert host.clock < 10 and "gateway.service" in host.up
    host.broken.clear()
    assert rejoin()["changed"] and host.told[-1][-1] == "metrics.service"


def test_one_that_loads_for_long_is_left_to_systemd(host):
    stop()
    host.broken["metrics.service"] = "activating"
    assert rejoin()["changed"] and not rejoin()["changed"]


def test_one_that_was_removed_meanwhile_stands_in_nobodys_way(host):
    stop()
    host.absent.update(("gateway.service", "metrics.service", "sidecar.socket"))
    assert not rejoin()["changed"] and not sd.recorded("sglang.service")


def test_a_server_is_not_stopped_where_what_depends_on_it_cannot_be_seen(host, monkeypatch):
    monkeypatch.setattr(sq, "run", lambda argv, **_more: (1, "", "no bus") if "--" in argv else host.run(argv))
    with pytest.raises(sq.ServiceError, match="no bus"):
        stop()
    assert host.told == []


@pytest.mark.parametrize("manager", ["supervisor", "podman"])
def test_other_managers_stop_nothing_along(manager):
    params = {"name": "sglang", "stop_timeout": 1, "state_dir": "/nowhere", "supervisord": [], "container_command": None}
    control = service_control.of(manager, params)
    assert control.stopped_along() == control.rejoin() == []
