"""Lets a process of the benchmark execute commands: JSON lines on its standard input, one response line each."""

import json
import os
import sys


def serve(make):
    """Creates an object, reports that it is ready, and calls its methods by name until the command `stop`."""
    # Other output must not mix with the responses, so it is written to the standard error.
    responses = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    target = make()
    print(json.dumps({"ready": True}), file=responses, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        print(json.dumps(getattr(target, do)(**request)), file=responses, flush=True)
        if do == "stop":
            return
