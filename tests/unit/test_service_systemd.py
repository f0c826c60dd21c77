# SPDX-License-Identifier: GPL-3.0-or-later
"""A unit of systemd is started and stopped without waiting for its jobs, and what becomes of it is noticed."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2
import jinja2.meta
import pytest
from test_managed_service import FakeModule, Outcome

from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found, service_control, service_worker
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq

ROLE = Path(__file__).parents[2] / "roles" / "_service"
OWN = str(os.getpid())
# What systemctl shows of a unit: a change of a loaded one that is down.
DOWN = {"LoadState": "loaded", "ActiveState": "inactive", "SubState": "dead"}
QUEUED = {"Job": "7"}
BEFORE = {"ActiveState": "activating", "SubState": "start-pre", "ControlPID": OWN}
LOADING = {"ActiveState": "activating", "SubState": "start", "MainPID": OWN}
AFTER = {"ActiveState": "activating", "SubState": "start-post", "MainPID": OWN, "ControlPID": OWN}
UP = {"ActiveState": "active", "SubState": "running", "MainPID": OWN}
ENDED = {"ActiveState": "activating", "SubState": "auto-restart", "ExecMainStatus": "203", "Result": "exit-code"}
FAILED = {"ActiveState": "failed", "SubState": "failed", "ExecMainStatus": "2", "Result": "exit-code"}
STOPPING = {"ActiveState": "deactivating", "SubState": "stop", "ControlPID": OWN}


class Systemctl:
    """Shows one state of the unit after the other, the last for ever; ``after`` a verb comes another row of them."""

    def __init__(self, monkeypatch, *states, **after):
        self.told, self.states, self.after, self.clock = [], list(states), after, 0.0
        monkeypatch.setattr(sq, "run", self.run)
        monkeypatch.setattr(service_worker, "TAKEN_SECONDS", 0.5)
        for module in (service_control, service_worker):
            monkeypatch.setattr(module.time, "sleep", self.sleep)
            monkeypatch.setattr(module.time, "monotonic", lambda: self.clock)

    def sleep(self, seconds):
        self.clock += seconds

    def run(self, argv, **_options):
        if argv[:2] == ["systemctl", "show"] and "--" in argv:
            # Nothing stops along with it.
            return 0, "Id=%s\n" % argv[-1], ""
        if argv[:2] == ["systemctl", "show"]:
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return 0, "".join("%s=%s\n" % one for one in {**DOWN, **state}.items()), ""
        if argv[0] == "systemctl":
            self.told.append(argv[1:])
            self.states = list(self.after.get(argv[1], self.states))
        return 0, "", ""


def start(**params):
    with pytest.raises(Outcome) as caught:
        service_worker.Worker(FakeModule(manager="systemd", timeout=60, **params)).run()
    return caught.value


@pytest.mark.parametrize(
    "states", [[UP], [QUEUED, QUEUED, UP], [LOADING], [AFTER], [BEFORE, BEFORE, LOADING], [QUEUED, BEFORE, UP], [BEFORE]]
)
def test_a_unit_that_starts_for_as_long_as_its_server_loads_counts_as_started(monkeypatch, states):
    systemctl = Systemctl(monkeypatch, {}, start=states)
    outcome = start()
    assert not outcome.failed and outcome.values["action"] == "start"
    assert systemctl.told[-1] == ["start", "--no-block", "sglang.service"]
    # A program that cannot be run would have ended by then.
    assert systemctl.clock > 0.5 or states[-1] is UP


@pytest.mark.parametrize(
    "states, why",
    [
        ([LOADING, ENDED], "starting, exit status 203"),
        ([QUEUED, BEFORE, dict(FAILED, ExecMainStatus="0")], "failed, result exit-code"),
        ([LOADING, FAILED], "failed, exit status 2"),
        ([{"ConditionResult": "no", "ConditionTimestampMonotonic": "9"}], "stopped, Condition... of its unit is not met"),
        ([QUEUED, {"AssertResult": "no", "AssertTimestampMonotonic": "9"}], "stopped, Assert... of its unit is not met"),
        ([QUEUED, {}], "stopped, its manager gave the start up"),
        ([QUEUED], "starting"),
    ],
)
def test_a_start_that_fails_is_noticed_and_named(monkeypatch, states, why):
    Systemctl(monkeypatch, {}, start=states)
    monkeypatch.setattr(sq, "log_tail", lambda *_args, **_more: ["its last line"])
    outcome = start()
    assert outcome.failed and outcome.values["msg"] == "sglang: did not start (%s). The last lines of its log:\nits last line" % why


def test_a_unit_that_loads_is_left_alone_by_the_next_run(monkeypatch):
    systemctl = Systemctl(monkeypatch, LOADING)
    outcome = start(tag="")
    assert not outcome.failed and outcome.values["action"] == "none" and systemctl.told == []


def control():
    return service_control.of("systemd", {"name": "sglang", "stop_timeout": 90})


def test_a_unit_that_stops_in_time_is_not_killed(monkeypatch):
    systemctl = Systemctl(monkeypatch, UP, stop=[UP, STOPPING, STOPPING, {}])
    control().stop([])
    assert systemctl.told == [["stop", "--no-block", "sglang.service"]]


def test_a_unit_that_grants_itself_more_time_than_it_is_given_is_killed(monkeypatch):
    systemctl = Systemctl(monkeypatch, UP, stop=[STOPPING], kill=[STOPPING, FAILED])
    control().stop([])
    assert systemctl.told == [["stop", "--no-block", "sglang.service"], ["kill", "--signal=SIGKILL", "sglang.service"]]
    assert 90 < systemctl.clock < 100


def test_a_unit_that_does_not_even_stop_by_sigkill_is_told(monkeypatch):
    systemctl = Systemctl(monkeypatch, UP, stop=[STOPPING])
    with pytest.raises(sq.ServiceError, match="sglang.service does not stop, not even by SIGKILL"):
        control().stop([])
    assert len(systemctl.told) == 4


# -- a name that a unit of the operator's has --------------------------------------------------------------


def named(monkeypatch, path):
    monkeypatch.setattr(sq, "run", lambda argv, **_more: (0, "%s\n" % path if "--property=FragmentPath" in argv else "", ""))


@pytest.mark.parametrize("manager", ["systemd", "process", "auto"])
def test_a_unit_of_the_operators_is_not_hidden_or_overwritten(monkeypatch, tmp_path, manager):
    unit = tmp_path / "sglang.service"
    unit.write_text("[Service]\nExecStart=/opt/serve.sh\n")
    named(monkeypatch, unit)
    monkeypatch.setattr(server_found, "_default", lambda: "systemd")
    monkeypatch.setattr(server_found, "_server_of", lambda *_args: os.getpid())
    monkeypatch.setattr(server_found, "_owner", lambda _pid: {"manager": "process", "service": ""})
    params = {"manager": manager, "name": "sglang", "host": "", "port": 1, "state_dir": str(tmp_path)}
    with pytest.raises(sq.ServiceError, match=f"{unit} is a unit of your own.*sglang_server_name"):
        server_found.locate(params)
    unit.write_text(sq.OUR_MARK + "; a change made here is overwritten.\n")
    assert server_found.locate(params)["manager"] in ("systemd", "process")
    # systemd knows it until it reads its files again.
    unit.unlink()
    server_found.locate(dict(params, manager="process"))


def test_no_unit_is_written_over_one_of_the_operators(monkeypatch, tmp_path):
    unit = tmp_path / "hidden-state-extraction.service"
    unit.write_text("[Service]\n")
    named(monkeypatch, unit)
    with pytest.raises(sq.ServiceError, match="extraction_service_name"):
        service_worker.Worker(FakeModule(manager="systemd", state="unclaimed")).run()
    unit.write_text(sq.OUR_MARK)
    with pytest.raises(Outcome) as caught:
        service_worker.Worker(FakeModule(manager="systemd", state="unclaimed")).run()
    assert not caught.value.failed and not caught.value.values["changed"]


@pytest.mark.parametrize("state", ["started", "restarted", "stopped"])
def test_a_unit_of_the_operators_is_told_nothing_unless_it_is_known_for_one(monkeypatch, tmp_path, state):
    unit = tmp_path / "sglang.service"
    unit.write_text("[Service]\nExecStart=/opt/serve.sh\n")
    systemctl = Systemctl(monkeypatch, dict(UP, FragmentPath=unit), stop=[{}], start=[UP])
    shown = systemctl.run
    monkeypatch.setattr(sq, "run", lambda argv, **_more: (0, "%s\n" % unit, "") if "--value" in argv else shown(argv))
    monkeypatch.setattr(service_worker.hp, "wait_until_gone", lambda *_args: True)
    with pytest.raises(sq.ServiceError, match=f"{unit} is a unit of your own"):
        service_worker.Worker(FakeModule(manager="systemd", state=state, enabled=False)).run()
    assert systemctl.told == []
    assert not start(state=state, foreign=True).failed and systemctl.told
    systemctl.told, systemctl.states = [], [UP]
    unit.write_text(sq.OUR_MARK)
    assert not start(state=state).failed and systemctl.told


def test_the_unit_that_the_role_writes_carries_the_mark():
    template = jinja2.Environment(loader=jinja2.FileSystemLoader(ROLE / "templates"), trim_blocks=True).get_template("unit.service.j2")
    values = dict.fromkeys(
        jinja2.meta.find_undeclared_variables(template.environment.parse((ROLE / "templates/unit.service.j2").read_text())), ""
    )
    assert template.render(values, _service_command=["/bin/true"], _service_restart_prevent_codes=[]).startswith(sq.OUR_MARK)
