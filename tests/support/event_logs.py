"""Handwritten event logs: an example application with everything that the pages show, and parts for other logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["application", "example_events", "state", "topology", "write_log"]

BEGAN = 1_767_250_800_000  # 2026-01-01 07:00 UTC
CLASS = "org.apache.spark.stagecrew.StagecrewState"


def write_log(logs: Path, app: str, events: list[dict[str, Any]], name: str = "", ended: bool = True) -> str:
    """Writes an event log in Spark's format that contains these stagecrew events. Returns the application's id."""
    start = {"App Name": name or app, "App ID": app, "Timestamp": BEGAN, "User": "me"}
    parts = ("JVM Information", "Spark Properties", "Hadoop Properties", "System Properties", "Metrics Properties")
    lines: list[dict[str, Any]] = [
        {"Event": "SparkListenerLogStart", "Spark Version": "4.3.0"},
        {"Event": "SparkListenerApplicationStart", **start},
        {"Event": "SparkListenerEnvironmentUpdate", **{part: {} for part in (*parts, "Classpath Entries")}},
        *events,
    ]
    if ended:
        lines.append({"Event": "SparkListenerApplicationEnd", "Timestamp": BEGAN + 600_000})
    path = logs / (app if ended else f"{app}.inprogress")
    # The History Server recognizes lines only without spaces, exactly as Spark writes them.
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
    return app


def state(kind: str, body: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a stagecrew event."""
    return {
        "Event": CLASS, "version": 1, "kind": kind, "id": body.get("id", ""), "time": BEGAN + 300_000, "number": 1,
        "capped": False, "trimmed": False, "body": json.dumps(body), **fields,
    }  # fmt: skip


def application(**parts: Any) -> dict[str, Any]:
    """Returns the event with the state of the application itself, without its topologies."""
    return state("application", {"version": 1, "totals": {}, **parts})


def listener(index: int, name: str, opens: int, **more: Any) -> dict[str, Any]:
    return {
        "index": index, "name": name, "scope": "worker", "opens": opens, "closes": opens, "failures": 0, "lost": 0,
        "openMicros": 84_000 * opens, "closeMicros": 2_100 * opens, "lastError": "", **more,
    }  # fmt: skip


def operator(name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "kind": "coordinator", "state": "active", "live": 4, "finished": 28, "failed": 0, "abandoned": 0,
        "resets": 0, "eventsIn": 0, "eventsOut": 0, "requests": 0, "queued": 0, "waitsFor": "", "lastError": "",
        "progress": {}, "replies": {"count": 0}, "acknowledgements": {"count": 0}, **more,
    }  # fmt: skip


def spans(seconds: float, failed: int = 44) -> list[dict[str, Any]]:
    """Returns the spans of two workers on each of two executors: an open, a sequence of tasks, and a close."""
    made = []
    for executor in ("1", "2"):
        for worker in range(2):
            at = BEGAN + 800 + 350 * worker + (900 if executor == "2" else 0)
            opened = at + 420 + 60 * worker
            made.append({"executor": executor, "kind": "open", "name": "orders", "started": at, "ended": opened})
            at, task = opened, 0
            while at < BEGAN + seconds * 1000 - 2500:
                micros = 900 + 137 * ((7 * task + 3 * worker + int(executor)) % 11)
                number = len(made)
                name = f"stage {1 + number % 2}, partition {number}"
                made.append({"executor": executor, "kind": "task", "name": name, "started": at, "ended": at + micros})
                if number == failed:
                    made[-1]["failed"] = True
                at, task = at + micros + 40, task + 1
            made.append({"executor": executor, "kind": "close", "name": "orders", "started": at, "ended": at + 180})
    return made


def topology(id_: str, name: str, **more: Any) -> dict[str, Any]:
    """Returns a named topology that ran for half a minute and has closed."""
    return {
        "id": id_, "name": name, "kind": "named", "state": "closed", "started": BEGAN, "ended": BEGAN + 30_000,
        "jobs": 3, "askedBy": ["1", "2"], "unclosed": [], "lostExecutors": [], "operators": [], "spans": [],
        "spansDropped": 0, "executors": {}, **more,
    }  # fmt: skip


def example_events() -> list[dict[str, Any]]:
    """Returns the events of a nightly job with closed and active topologies."""
    error = 'Traceback (most recent call last):\n  File "pools.py", line 12, in open\nConnectionRefusedError: [Errno 111] Connection refused'

    def partitions(progress: int, outputs: int, blocks: int, released: int) -> dict[str, int]:
        return {
            "inProgress": progress, "outputs": outputs, "outputBytes": outputs * 18_400_000, "blocks": blocks,
            "blockBytes": blocks * 61_000_000, "released": released, "releasedBytes": released * 18_400_000, "releaseFailures": 0,
        }  # fmt: skip

    def executor(number: int, running: bool) -> dict[str, Any]:
        listeners = [listener(0, "orders", 2), listener(1, "audit", 2)]
        if number == 2 and running:
            listeners[1] |= {"failures": 1, "lastError": error}
        stored = partitions(2, 9 + number, 4, 0) if running else partitions(0, 0, 0, 16)
        return {"listeners": listeners, "processes": 2, "lostProcesses": 0, "deferred": [], "partitions": stored}

    def both(running: bool) -> dict[str, Any]:
        return {str(number): executor(number, running) for number in (1, 2)}

    closed = {"state": "closed", "live": 0, "finished": 32}
    rounds = {"count": 412, "p50": 640, "p95": 1_900, "p99": 4_700, "max": 21_300}
    reads = operator(
        "flights", kind="splits", progress={"splits done": 64, "splits left": 0}, eventsOut=56, requests=412,
        replies=rounds, acknowledgements={**rounds, "count": 56}, **closed,
    )  # fmt: skip
    spent = operator(
        "budget", eventsIn=1_316, requests=96, replies={**rounds, "count": 96}, progress={"spent": 80}, **closed
    )
    budget = operator(
        "budget", queued=1, eventsIn=1_204, requests=88, replies={**rounds, "count": 88}, progress={"spent": 71},
        waitsFor="executor 2, task 61: its acknowledgement, for 4 s",
    )  # fmt: skip
    mebibyte = 1 << 20
    processes = [
        {
            "executor": str(number), "host": f"worker-{number}", "pid": 4000 + 100 * number + i, "role": role,
            "started": BEGAN + 900, "ended": BEGAN + 61_000 if role == "worker" and i == 3 else 0,
            "samples": [
                {
                    "time": BEGAN + 1000 + 10_000 * t, "rss": (70 + i * 30 + (t * (9 if i == 2 else 2)) % 160) * mebibyte,
                    "cpu": 6 if role == "agent" else 400 + 130 * ((t + i) % 5), "threads": 3 + (t + i) % 2, "files": 14 + (t % 4),
                }
                for t in range(30)
            ],
        }
        for number in (1, 2)
        for i, role in enumerate(("agent", "worker", "worker", "worker"))
    ]  # fmt: skip
    steps = [
        {"name": "load flights", "state": "found", "started": BEGAN, "ended": BEGAN + 400},
        {"name": "enrich", "state": "finished", "started": BEGAN + 500, "ended": BEGAN + 31_000},
        {"name": "report", "state": "running", "started": BEGAN + 31_200, "ended": 0},
    ]
    facts = {
        "job": "nightly",
        "driver": "driver-7f3a",
        "term": "3",
        "state": "leading",
        "leads since": "2026-01-01 06:59:58 UTC",
    }
    running = topology(
        "report-5d1f0c77ab12", "report", state="active", ended=0, started=BEGAN + 31_200, operators=[budget], executors=both(True),
    )  # fmt: skip
    return [
        state("topology", topology("application", "application", kind="application", state="active", ended=0, jobs=7)),
        state("topology", topology("enrich-2b8c41d09e63", "enrich", operators=[reads, spent], executors=both(False), spans=spans(30))),
        state("topology", running),
        state("topology", topology("checks-90aa17b3e5c4", "checks", state="active", ended=0, parent=running["id"], started=BEGAN + 33_000)),
        application(
            totals={"opens": 16, "closes": 16, "failures": 1, "lost": 0}, processes=processes,
            recovery={"facts": facts, "steps": steps},
        ),
    ]  # fmt: skip
