"""Job programs that run in real processes with real Spark, and are killed, give the results of the simulation."""

import collections
import json
import zipfile

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import support
from stagecrew.recovery.jobs.spec import JobSpec
from support.driver_processes import QUICK_CONF, campaigning_drivers, kill_point
from support.job_program_histories import history
from support.job_program_strategy import programs as drawn


@pytest.mark.long
@settings(
    max_examples=6,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(program=drawn(), point_number=st.integers(0, 999), moment=st.sampled_from(["before", "after"]))
def test_a_killed_process_gives_the_results_of_the_simulation(tmp_path_factory, program, point_number, moment):
    """A program whose process is killed at a write to the store gives the results and rows of an undisturbed simulation."""
    text = str(program)
    assume("'act'" in text and text.count("(") > 30 and "'raise'" not in text and "'nameless'" not in text)
    expected, points = history(program, 1)
    writes = [one for one in points if one.startswith("before ") and " jobs/job" in one]
    folder = tmp_path_factory.mktemp("programs")
    reached = folder / "reached"
    with campaigning_drivers(f"sqlite://{folder}/jobs.db", folder) as drivers:
        drivers.start(**kill_point(reached, "run", "transact", moment, 1 + point_number * len(writes) // 1000))
        archive = folder / "programs.zip"
        with zipfile.ZipFile(archive, "w") as zipped:
            for name in ("__init__", "job_programs", "job_programs_on_spark"):
                zipped.write(f"{support.__path__[0]}/{name}.py", f"support/{name}.py")
        arguments = {"folder": str(folder / "out"), "program": program}
        drivers.submit(
            JobSpec.of_function("support.job_programs_on_spark:run", arguments, QUICK_CONF, [archive]), "job"
        )
        result = drivers.result("job", 300)
        assert (result.state, result.reason, result.shown) == ("succeeded", "", expected.value), drivers.logs("job")
        assert reached.exists()
    tables = {path.name[6:]: json.loads(path.read_text()) for path in (folder / "out").glob("table-*")}
    assert tables == json.loads(json.dumps(expected.table))
    rows = collections.defaultdict(list)
    for id_, some in expected.rows.items():
        rows[f"sink-{id_.rpartition('/')[2]}-{'text' if isinstance(some[0], str) else 'number'}"] += some
    found = {path.name: pq.read_table(path).column(0).to_pylist() for path in (folder / "out").glob("sink-*")}
    assert {name: sorted(some) for name, some in found.items()} == {name: sorted(some) for name, some in rows.items()}
