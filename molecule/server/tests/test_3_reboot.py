# SPDX-License-Identifier: GPL-3.0-or-later
"""The host loses its power in each phase of extract.yml: once it is back it serves as before, and the next run goes on."""

from __future__ import annotations

import pytest

MANAGED = "TASK [hidden_state.bridge._service : Bring the service to its state]"
LAID = "TASK [hidden_state.bridge.sglang_server : Lay the capture over the server that was found"
# Phase: line of the play after which the power goes, the how manieth of its kind, and what is run once the host is back.
PHASES = {
    "before the stop": ("TASK [hidden_state.bridge.sglang_server : Write the record]", 1, "serve"),
    "stopped": (MANAGED, 1, "serve"),
    "patched": ("Patch the model source", 1, "serve"),
    "starting capture": (MANAGED, 2, "serve"),
    "waiting on health": ("no answer yet", 1, "extract"),
    "extracting": (MANAGED, 3, "serve"),
    "restoring": (LAID, 2, "extract"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_power_goes(server, phase):
    mark, number, following = PHASES[phase]
    server.host.check_output("rm -rf /srv/hidden_states")

    def lose_power(_play) -> None:
        server.lose_power()
        # An extraction is waited for while its host is away; elsewhere the host stays away until the controller has given it up.
        if phase == "extracting":
            server.boot()

    output = server.play("playbooks/extract.yml", fails=True, at=(mark, number, lose_power))
    counts = server.recap(output)
    assert counts["unreachable"] + counts["failed"] == 1

    server.boot()
    # By itself: the layer of the capture lay in /run.
    server.is_as_before()
    pid = server.seen()["pid"]

    output = server.play(f"playbooks/{following}.yml")
    assert server.recap(output)["failed"] == 0
    server.is_as_before()
    if following == "serve":
        assert server.seen()["pid"] == pid
    else:
        assert server.host.run("find /srv/hidden_states -name 'data_*.ckpt' | wc -l").stdout.strip() == "16"
