"""Measures the demo: real flights enriched with and without stagecrew, on SQLite and on a PostgreSQL server."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from measurements import Measurement
from processes import Run

from support.postgres import postgresql


def demo(run: Run):
    """The demo's enrichment with and without stagecrew, as the demo itself counts."""
    found = {"SQLite": [], "PostgreSQL": []}
    with contextlib.ExitStack() as servers, tempfile.TemporaryDirectory() as folder:
        database = servers.enter_context(postgresql()).url
        environments = {"SQLite": {}, "PostgreSQL": {"STAGECREW_DEMO_DATABASE": database}}
        for round_ in run.rounds():
            for name, extra in environments.items():
                found[name].append(_run(f"{folder}/{name}-{round_}", {**os.environ, **extra}))
    for name, rounds in found.items():
        for words, unit, part in (("connections opened", "", "connections"), ("all flights enriched", "s", "seconds")):
            ours, theirs = ([float(one[side][part]) for one in rounds] for side in ("with_stagecrew", "without"))
            yield Measurement(f"demo on {name}: {words}", unit, ours, "without stagecrew", theirs)


def _run(output: str, environment: dict[str, str]):
    command = [
        str(pathlib.Path(sys.executable).parent / "stagecrew"),
        "demo",
        "--json",
        "--part",
        "connections",
        "--output",
        output,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout)["connections"]
