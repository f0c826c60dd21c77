#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-3.0-or-later
"""What it costs the controller to ask 100 hosts how far they are, beside a task that does nothing.

    gather.py [--hosts N] [--records N] [--rounds N]

The hosts are this machine, so the seconds hold the hosts' own share too, which a fleet pays side by side: a round runs
extraction_info, each host with a manifest of its share, and ansible.builtin.ping, each in a playbook of its own. `seconds` is the
difference of the medians, `peak_mb` the controller's largest process. The last line is one JSON object; exit status 1 where a claim
does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import plan

TASKS = {
    "ping": {"ansible.builtin.ping": {}},
    "gather": {"hidden_state.bridge.extraction_info": {"output_dir": "{{ output }}"}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--records", type=int, default=37_312)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(ANSIBLE_NOCOLOR="1", ANSIBLE_DISPLAY_OK_HOSTS="false", ANSIBLE_PIPELINING="true")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in TASKS}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hosts = {}
        for number in range(options.hosts):
            output = plan.make_output(directory / str(number), range(number, options.records, options.hosts))
            hosts[f"gpu-{number:03}"] = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "output": str(output)}
        (directory / "inventory.json").write_text(json.dumps({"all": {"hosts": hosts}}))
        for task, module in TASKS.items():
            play = {"name": task, "hosts": "all", "gather_facts": False, "tasks": [{"name": task, **module}]}
            (directory / f"{task}.json").write_text(json.dumps([play]))
        for _round in range(options.rounds):
            for task, measured in found.items():
                command = ["ansible-playbook", "-i", directory / "inventory.json", directory / f"{task}.json"]
                measured.append(plan.run(command, str(plan.ROOT / "plugins" / "module_utils"), os.devnull))
    seconds = {task: statistics.median(one for one, _peak in measured) for task, measured in found.items()}
    figures = {
        "hosts": options.hosts,
        "records": options.records,
        **{f"{task}_seconds": value for task, value in seconds.items()},
        "seconds": round(seconds["gather"] - seconds["ping"], 2),
        "peak_mb": max(peak for _one, peak in found["gather"]),
    }
    return plan.judge(figures)


if __name__ == "__main__":
    sys.exit(main())
