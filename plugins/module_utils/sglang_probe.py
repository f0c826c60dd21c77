# Copyright (c) hidden_state.bridge contributors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Questions to a running SGLang server over HTTP, and what its log says when it died.

PRIVATE to the collection.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

# A proxy of the host's environment has no business between a probe and a server of the same host.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(Exception):
    """Nobody listens, or nothing came back in time."""


class Refused(Unreachable):
    """The server does not take the API key."""


def _check_key(status, path):
    if status in (401, 403):
        raise Refused("%s answers %d: the API key is wrong or missing (sglang_server_api_key)" % (path, status))


def request(url, path, api_key=None, body=None, timeout=30):
    """(HTTP status, body as bytes) of one request; Unreachable where there is no answer.

    ``body`` is posted as JSON. Statuses of 400 and more are returned, not raised.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = "Bearer " + api_key
    data = json.dumps(body).encode("utf-8") if body is not None else None
    try:
        with _OPENER.open(urllib.request.Request(url + path, data, headers), timeout=timeout) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except (OSError, ValueError) as error:
        # URLError is an OSError; its reason says more than it does itself.
        raise Unreachable(str(getattr(error, "reason", None) or error)) from error


def health(url, api_key=None, timeout=30):
    """``ok`` (200), ``starting`` (another answer) or ``down`` (none), and a short text about it. SGLang asks for no key here."""
    try:
        status, _body = request(url, "/health", api_key, timeout=timeout)
    except Unreachable as error:
        return "down", str(error)
    return ("ok", "200") if status == 200 else ("starting", str(status))


def generate_once(url, api_key=None, timeout=60):
    """One real request of one token; returns "" where it was answered, else what went wrong. Raises Refused.

    /health can be 200 while the scheduler is dead. The request carries no rid, so that a capturing server
    does not take it for a record.
    """
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        status, answer = request(url, "/generate", api_key, body, timeout)
    except Unreachable as error:
        return "no answer to /generate: %s" % error
    _check_key(status, "/generate")
    if status != 200:
        return "/generate answered %d: %s" % (status, answer.decode("utf-8", "replace")[:300])
    return ""


def server_info(url, api_key=None, timeout=30):
    """The server's own settings as it reports them. Holds the API keys: pass on single fields only."""
    for path in ("/server_info", "/get_server_info"):
        status, answer = request(url, path, api_key, timeout=timeout)
        _check_key(status, path)
        if status == 200:
            return json.loads(answer.decode("utf-8"))
    raise Unreachable("/server_info answered %d" % status)


def refuses_key(url, api_key=None, timeout=10):
    """Whether a server answers and does not take the key. Its scheduler, which may be busy for long, is not asked."""
    try:
        _check_key(request(url, "/v1/models", api_key, timeout=timeout)[0], "/v1/models")
    except Refused:
        return True
    except Unreachable:
        return False
    return False


def requests_in_flight(url, api_key=None, timeout=10):
    """How many requests a server runs or holds waiting; None where it does not answer or its release cannot tell."""
    # The older path is still there in releases that have both, and logs a warning.
    for path in ("/v1/loads", "/get_load"):
        try:
            status, answer = request(url, path, api_key, timeout=timeout)
            found = json.loads(answer.decode("utf-8")) if status == 200 else None
        except (Unreachable, ValueError):
            return None
        loads = found.get("loads") if isinstance(found, dict) else found
        if isinstance(loads, list):
            return sum(_requests_of(load) for load in loads if isinstance(load, dict))
    return None


def _requests_of(load):
    if "num_reqs" in load:
        return int(load["num_reqs"])
    return int(load.get("num_running_reqs") or 0) + int(load.get("num_waiting_reqs") or 0)


# (pattern in the log, what to do about it); the first that is found is told.
_HINTS = (
    (r"unrecognized arguments?: (.+)", "this release does not know {0}: take it out of the server's arguments"),
    (r"(?:argument|error: argument) (--\S+): (?:invalid|expected)", "{0} has a value that this release does not take"),
    (r"[Aa]ddress already in use", "the port is taken: stop the process that holds it or set another port"),
    (
        r"(?:CUDA|HIP) out of memory|OutOfMemoryError",
        "not enough GPU memory: is another process on the GPUs? Lower --mem-fraction-static or --max-total-tokens",
    ),
    (r"leave no GPU memory for the KV cache|Not enough memory", "not enough memory for the KV cache: set --mem-fraction-static"),
    (r"Cannot allocate memory|MemoryError|oom-kill|Killed", "not enough memory on the host"),
    (r"trust_remote_code", "the model brings code of its own: add --trust-remote-code"),
    (
        r"(?:Repo id must (?:be|use) |is not a local folder|Can't load the configuration|does not appear to have a file named|"
        r"No such file or directory: '[^']*config\.json|Cannot find any model weights|Cannot find model|Incorrect path_or_model_id|HFValidationError)",
        "the model path is wrong or incomplete: check sglang_server_model",
    ),
    (r"SGLANG_HS_[A-Z_]+", "a capture setting was refused: see the line that names the variable"),
    (r"NCCL (?:error|WARN)|ncclSystemError|ncclUnhandledCudaError", "NCCL failed: check the interconnect and /dev/shm size"),
    (
        r"no kernel image is available|sm_?120|SM120",
        "a kernel does not exist for this GPU: set --attention-backend and --moe-runner-backend",
    ),
    (r"ModuleNotFoundError: (No module named \S+)", "{0} in the server's Python environment"),
    (r"Permission denied: '?([^']+)", "the server's user may not use {0}"),
)


def telling(lines):
    """Log lines without the list of all settings, which names everything and holds the API key; long ones are cut."""
    return [line[:400] for line in lines if "server_args=" not in line]


def hint(lines):
    """What the last lines of a dead server's log suggest doing; "" where they say nothing known."""
    text = "\n".join(lines)
    for pattern, advice in _HINTS:
        match = re.search(pattern, text)
        if match:
            return advice.format(*match.groups())
    return ""
