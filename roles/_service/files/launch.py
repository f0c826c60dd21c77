# SPDX-License-Identifier: Apache-2.0
"""Start a process exactly as another one was started: arguments, environment, directory, user, umask, limits, CPUs.

python3 launch.py FILE

FILE is JSON, readable by its owner only, with `argv`, `executable`, `environment`, `directory`, `user`, `umask`, `limits`,
`nice` and `affinity`, as process_record.py writes it. The process takes the place of this one.
Exit status 2 where it cannot be started, with the reason.
"""

import json
import os
import resource
import sys


def bytes_of(text):
    return text.encode("utf-8", "surrogateescape")


def become(launch):
    """Take on limits, CPUs, user, umask and directory; root is needed for another user than one's own."""
    for name, wanted in launch["limits"].items():
        kind = getattr(resource, name)
        if resource.getrlimit(kind) != tuple(wanted):
            try:
                resource.setrlimit(kind, wanted)
            except (OSError, ValueError) as error:
                # A manager may grant less than a login did; SGLang says itself what it lacks.
                print("hidden_state_bridge: %s stays %s: %s" % (name, resource.getrlimit(kind), error), file=sys.stderr)
    if launch["nice"] != os.getpriority(os.PRIO_PROCESS, 0):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, launch["nice"])
        except OSError as error:
            print("hidden_state_bridge: nice stays %d: %s" % (os.getpriority(os.PRIO_PROCESS, 0), error), file=sys.stderr)
    if launch.get("affinity") and set(launch["affinity"]) != os.sched_getaffinity(0):
        try:
            os.sched_setaffinity(0, launch["affinity"])
        except OSError as error:
            print("hidden_state_bridge: CPUs stay %s: %s" % (sorted(os.sched_getaffinity(0)), error), file=sys.stderr)
    user = launch["user"]
    if os.geteuid() == 0:
        os.setgroups(user["groups"])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
    elif os.geteuid() != user["uid"]:
        raise PermissionError(1, "user %d cannot start a process of user %d" % (os.geteuid(), user["uid"]))
    os.umask(launch["umask"])
    os.chdir(bytes_of(launch["directory"]))


def main(path):
    with open(path, encoding="utf-8") as stream:
        launch = json.load(stream)
    print("hidden_state_bridge: start as pid %d" % os.getpid(), flush=True)
    become(launch)
    environment = {bytes_of(key): bytes_of(value) for key, value in launch["environment"].items()}
    os.execve(bytes_of(launch["executable"]), [bytes_of(word) for word in launch["argv"]], environment)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print("hidden_state_bridge: %s cannot be started: %s" % (" ".join(sys.argv[1:2]) or "nothing", error), file=sys.stderr)
        sys.exit(2)
