# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the SGLang of a server lies, and the operator's arguments, for servers of ours and for found ones.

PRIVATE to the collection.
"""

from __future__ import annotations

import json
import os

from ansible_collections.hidden_state.bridge.plugins.module_utils import container_query as cq
from ansible_collections.hidden_state.bridge.plugins.module_utils import process_record as pr
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_found as found
from ansible_collections.hidden_state.bridge.plugins.module_utils import server_layer as layer
from ansible_collections.hidden_state.bridge.plugins.module_utils import service_query as sq
from ansible_collections.hidden_state.bridge.plugins.module_utils import sglang_release as sr

# What the patcher needs of a release beside the model file, to know which one it is.
_COPIED = ("srt/models/deepseek_v2.py", "version.py", "_version.py")


def own_place(params):
    """``package``, ``release``, ``models``, ``python``, ``model`` and ``arguments`` of a service made from the inventory."""
    if not params["python"]:
        raise sr.ReleaseError(
            "no SGLang server was found on port %d, and sglang_server_python is not set. "
            "Set sglang_server_python and sglang_server_model, or start the server" % params["port"]
        )
    environment = dict(os.environ, PYTHONPATH=params["pythonpath"]) if params["pythonpath"] else None
    place = sr.installation(params["python"], environment)
    return dict(place, python=params["python"], model=params["model"] or "", arguments=list(params["arguments"]))


def found_place(located, service, params):
    """The same of a found server, from its process in serving mode or from its record."""
    record = pr.read(found.record_path(params["state_dir"], params["name"]))
    capturing = layer.captures(service["environment"])
    if capturing and record is None:
        raise sq.ServiceError("the server captures, and nothing is recorded of how it served. Start it as you do, then run again")
    if not capturing and (record is None or layer.is_up(service)):
        record = layer.make_record(located, service)
    model = params["model"] or layer.model_of(record)
    if located["manager"] in cq.ENGINES:
        return _container_place(located, record, model, params)
    python = params["python"] or layer.python_of(record)
    if not python:
        raise sr.ReleaseError("%s is no interpreter: set sglang_server_python to the Python that runs SGLang" % record["executable"])
    if model and not os.path.isabs(model) and record.get("directory"):
        local = os.path.join(record["directory"], model)
        model = local if os.path.isdir(local) else model
    # A checkout is found by PYTHONPATH, or by the directory that `python -m` was called in.
    by_module = "-m" in record["argv"][:4] and os.path.isdir(record.get("directory") or "")
    place = sr.installation(python, record["environment"] or None, record["directory"] if by_module else "/")
    return dict(place, python=python, model=model, arguments=record["argv"][1:])


def _container_place(located, record, model, params):
    """SGLang in an image: asked for inside, and its model source copied to where it can be patched."""
    engine, name = located["manager"], located["service"]
    copy = layer.source_copy(name)
    kept = layer.place_file(name)
    facts = cq.inspect(engine, name)
    if not facts:
        raise sq.ServiceError("%s has no container %s" % (engine, name))
    cq.refuse(engine, facts)
    # After a reboot there is what was recorded: a container that was stopped for its capture cannot be asked.
    place, was = pr.read(kept), record.get("place")
    if not place or place.get("image") != facts["Image"]:
        recorded = was and was.get("image") == facts["Image"]
        place = was if recorded else dict(_ask_inside(engine, name, facts, record), image=facts["Image"])
        for part in _COPIED:
            try:
                cq.copy_out(engine, name, os.path.join(place["package"], part), os.path.join(copy, part))
            except sq.ServiceError:
                if part == _COPIED[0]:
                    raise
        place["release"] = place["release"] or sr.release_in(copy)
        if not place["release"]:
            raise sr.ReleaseError("container %s: neither package metadata nor version.py gives a release of its SGLang" % name)
        pr.write(kept, place)
    outside = cq.outside_path(facts, model) if model else None
    return {
        "package": place["package"],
        "release": place["release"],
        "models": os.path.join(copy, "srt", "models"),
        "python": params["python"] or "",
        "model": outside or "",
        "arguments": record["argv"][1:],
    }


def _ask_inside(engine, name, facts, record):
    if facts["State"].get("Status") != "running":
        raise sq.ServiceError("container %s does not run, so its SGLang cannot be asked for: start it, then run again" % name)
    program = record["argv"][0] if "python" in os.path.basename(record["argv"][0]) else "python3"
    code, out, err = sq.run([engine, "exec", name, program, "-c", sr.FIND])
    if code != 0:
        raise sr.ReleaseError("container %s: %s" % (name, err.strip()[-500:]))
    answer = json.loads(out.splitlines()[-1])
    if not answer["package"]:
        raise sr.ReleaseError("container %s: %s there has no SGLang" % (name, program))
    return {"package": answer["package"], "release": answer["version"]}
