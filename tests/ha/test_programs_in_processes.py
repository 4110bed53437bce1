"""Programs of jobs as real processes with real Spark, killed at a write to the store: they give the results that the simulation gives without a kill."""

import collections
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import haprograms
import programs
from drawnprograms import programs as drawn
from haprocesses import QUICK, campaign, point
from histories import history
from stagecrew.recovery.jobs.spec import JobSpec


@pytest.mark.long
@settings(
    max_examples=6,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(program=drawn(), where=st.integers(0, 999), moment=st.sampled_from(["before", "after"]))
def test_programs_in_processes(tmp_path_factory, program, where, moment):
    """A program whose process is killed gives the results and rows of the simulation, in which nobody is."""
    text = str(program)
    assume("'act'" in text and text.count("(") > 30 and "'raise'" not in text and "'nameless'" not in text)
    expected, points = history(program, 1)
    writes = [one for one in points if one.startswith("before ") and " jobs/job" in one]
    folder = tmp_path_factory.mktemp("programs")
    mark = folder / "reached"
    with campaign(f"sqlite://{folder}/jobs.db", folder) as drivers:
        drivers.start(**point(mark, "run", "transact", moment, 1 + where * len(writes) // 1000))
        files = [Path(module.__file__) for module in (programs, haprograms)]
        arguments = {"folder": str(folder / "out"), "program": program}
        drivers.submit(JobSpec.of_function("haprograms:run", arguments, QUICK, files), "job")
        result = drivers.result("job", 300)
        assert (result.state, result.reason, result.shown) == ("succeeded", "", expected.value), drivers.logs("job")
        assert mark.exists()
    tables = {path.name[6:]: json.loads(path.read_text()) for path in (folder / "out").glob("table-*")}
    assert tables == json.loads(json.dumps(expected.table))
    rows = collections.defaultdict(list)
    for id_, some in expected.rows.items():
        rows[f"sink-{id_.rpartition('/')[2]}-{'text' if isinstance(some[0], str) else 'number'}"] += some
    found = {path.name: pq.read_table(path).column(0).to_pylist() for path in (folder / "out").glob("sink-*")}
    assert {name: sorted(some) for name, some in found.items()} == {name: sorted(some) for name, some in rows.items()}
