# SPDX-License-Identifier: Apache-2.0
"""Put beside SGLang by a test: writes what the interpreter does in each forward of DeepseekV2Model.

A forward leaves a line of JSON in $HS_TRACE_DIR/<pid>: mode, tokens; steps, a list of [line of the model file, name of the instruction,
how often] of the forward's own frame; calls, how often each Python function ran within it, by module and name; ours,
the modules of the capture that are imported.
"""

import dis
import json
import os
import sys
import threading
from collections import Counter

_MODULE = "sglang.srt.models.deepseek_v2"
_CLASS = "DeepseekV2Model"
_thread = threading.local()


def _called(frame, event, _argument):
    """Trace a forward, and count what it calls."""
    code = frame.f_code
    calls = getattr(_thread, "calls", None)
    if calls is not None:
        # Not by line: a patch moves them.
        calls[f"{frame.f_globals.get('__name__')}:{getattr(code, 'co_qualname', code.co_name)}"] += 1
    elif code.co_name == "forward" and frame.f_globals.get("__name__") == _MODULE and type(frame.f_locals.get("self")).__name__ == _CLASS:
        _thread.calls, _thread.steps, _thread.bytes = Counter(), Counter(), code.co_code
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return _stepped
    return None


def _stepped(frame, event, _argument):
    """Count an instruction of the forward's own frame, and write all at its end."""
    if event == "opcode":
        code = _thread.bytes[frame.f_lasti]
        # The prefix of a far jump is a part of it.
        if code != dis.EXTENDED_ARG:
            _thread.steps[frame.f_lineno, dis.opname[code]] += 1
    elif event == "return":
        calls, _thread.calls = _thread.calls, None
        batch = frame.f_locals["forward_batch"]
        written = {
            "mode": batch.forward_mode.name,
            "tokens": len(batch.input_ids),
            "steps": [[*place, count] for place, count in _thread.steps.items()],
            "calls": calls,
            "ours": [name for name in sys.modules if "hs_capture" in name],
        }
        with open(os.path.join(os.environ["HS_TRACE_DIR"], str(os.getpid())), "a") as stream:
            stream.write(json.dumps(written) + "\n")
    return _stepped


if os.environ.get("HS_TRACE_DIR"):
    threading.settrace(_called)
    sys.settrace(_called)
