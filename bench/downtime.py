# SPDX-License-Identifier: GPL-3.0-or-later
"""How much longer a server is away when the playbook restarts it than by hand.

make bench NAME=downtime

In a container with systemd and the real SGLang on its CPU (scenario `server` of molecule), pairs in turn: `systemctl restart` and a
loop on /health, then the switch to capture mode as extract.yml does it: stop, patch, start. Both are timed alike: from the first moment at which nobody listens
on the port to the first 200 of /health, by the clock of the container; the playbook's also to the end of its own wait. The last line is one
JSON object: `overhead_s` is the median over the pairs of playbook (to the end of its wait) less by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
ENGINE = os.environ.get("HSB_CONTAINER_ENGINE", "podman")
# Prints when the port is left, and when /health is 200 again.
WATCH = """
import socket, time, urllib.request
def listens():
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", 30000)) == 0
while listens():
    time.sleep(0.02)
print("away", time.time(), flush=True)
while True:
    try:
        if urllib.request.urlopen("http://127.0.0.1:30000/health", timeout=30).status == 200:
            break
    except OSError:
        time.sleep(0.1)
print("back", time.time(), flush=True)
"""
# As extract.yml does it, with the patch at its place; and back, which is not timed.
PLAY = """
- name: Switch
  hosts: sglang
  gather_facts: true
  tasks:
    - name: Switch
      ansible.builtin.include_role: {name: hidden_state.bridge.sglang_server}
      vars:
        sglang_server_state: "{{ wanted }}"
        sglang_server_capture_environment: {SGLANG_HS_DUMP_DIR: /dev/shm/sglang_hs}
        sglang_server_tasks_while_down: "{{ 'ROOT/playbooks/tasks/patch.yml' if wanted == 'capture' else '' }}"
"""


def away(container: str, restart) -> tuple[float, float]:
    """Seconds from port left to /health 200, and to the end of ``restart``, which blocks until it holds the server for ready."""
    with subprocess.Popen([ENGINE, "exec", container, "python3", "-c", WATCH], text=True, stdout=subprocess.PIPE) as watch:
        time.sleep(1)
        try:
            restart()
        except BaseException:
            watch.kill()
            raise
        end = time.time()
        times = dict(line.split() for line in watch.communicate(timeout=900)[0].splitlines())
    left, back = float(times["away"]), float(times["back"])
    return back - left, max(end, back) - left


def by_hand(container: str, unit: str) -> None:
    """What an operator types."""
    ask = "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=30)"
    loop = f'systemctl restart {unit}; until python3 -c "{ask}" >/dev/null 2>&1; do sleep 1; done'
    subprocess.run([ENGINE, "exec", container, "sh", "-c", loop], check=True)


def by_playbook(playbook: Path, inventory: str, container: str, wanted: str) -> None:
    environment = {
        **os.environ,
        "ANSIBLE_COLLECTIONS_PATH": str(ROOT / "playbooks/collections"),
        # Where the scenario keeps the key that its containers are reached with.
        "MOLECULE_PROJECT_DIRECTORY": str(ROOT),
        "MOLECULE_EPHEMERAL_DIRECTORY": str(Path(inventory).parent),
    }
    # How finely the wait looks is a variable of the role; the loop by hand looks each second.
    extra = json.dumps({"wanted": wanted, "sglang_server_health_interval": 1, "sglang_server_nodes": []})
    command = [BIN / "ansible-playbook", playbook, "-i", inventory, "--limit", container, "-e", extra]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--inventory",
        help="molecule's directory of that name, of a container that is there already; otherwise molecule makes one and removes it",
    )
    parser.add_argument("--container", default="hsb-server")
    parser.add_argument("--unit", default="operators", help="the systemd unit of the server in it")
    options = parser.parse_args()
    made = options.inventory is None
    if made:
        for step in ("create", "prepare"):
            subprocess.run([BIN / "molecule", step, "--scenario-name", "server"], cwd=ROOT, check=True, stdout=sys.stderr)
        found = sorted(Path.home().glob(".ansible/tmp/molecule.*.server/inventory"), key=lambda path: path.stat().st_mtime)
        options.inventory = str(found[-1])
    playbook = ROOT / ".cache" / "downtime.yml"
    playbook.write_text(PLAY.replace("ROOT", str(ROOT)))
    pairs = []
    try:
        for number in range(options.pairs):
            manual = away(options.container, lambda: by_hand(options.container, options.unit))
            play = away(options.container, lambda: by_playbook(playbook, options.inventory, options.container, "capture"))
            by_playbook(playbook, options.inventory, options.container, "restored")
            pairs.append({"by_hand_s": round(manual[1], 2), "playbook_s": round(play[1], 2), "playbook_health_s": round(play[0], 2)})
            print(f"pair {number + 1}: {json.dumps(pairs[-1])}", flush=True)
    finally:
        playbook.unlink()
        if made:
            subprocess.run([BIN / "molecule", "destroy", "--scenario-name", "server"], cwd=ROOT, check=False, stdout=sys.stderr)
    overhead = statistics.median(pair["playbook_s"] - pair["by_hand_s"] for pair in pairs)
    figures = {
        "overhead_s": round(overhead, 2),
        "by_hand_s": statistics.median(pair["by_hand_s"] for pair in pairs),
        "playbook_s": statistics.median(pair["playbook_s"] for pair in pairs),
        "pairs": pairs,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
