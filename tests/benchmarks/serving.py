"""What every process of the benchmark does: it obeys JSON lines on its standard input, and answers each with one."""

import json
import os
import sys


def serve(make):
    """Makes what obeys, says that it is ready, and calls its methods by their names until it was told to stop."""
    # Whatever else writes to the standard output must not get between our lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    obeys = make()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        print(json.dumps(getattr(obeys, do)(**request)), file=answers, flush=True)
        if do == "stop":
            return
