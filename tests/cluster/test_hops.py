"""The hops of a request, which `make bench` records."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from stagecrew.wire.hops import HOPS
from support.driver_scripts import driver_script
from support.journal import Journal
from support.waiting import eventually

SCRIPT = """
from stagecrew.coordination.direct import DirectConnection
class Echo(stagecrew.Coordinator):
    def ready(self, evaluation, gateway):
        journal.write(event="ready", evaluation=evaluation.id, direct=isinstance(gateway.route, DirectConnection))
    def handle_request(self, evaluation, request):
        return request
def work(gateway, batches):
    for number in range(20):
        assert gateway.request(number) == number
    yield from ()
builder = session_builder("local-cluster[1,1,1024]").config("spark.stagecrew.channel.direct", DIRECT)
spark = stagecrew.configure(builder).getOrCreate()
rows = spark.range(0, 1, 1, 1)
rows.mapInArrow(lambda batches: batches, "id long").collect()  # so that the worker runs already
with stagecrew.crew(spark).topology("t") as topology:
    topology.coordinate("echo", Echo).map(rows, work, "n long").collect()
spark.stop()
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "direct", [pytest.param(True, marks=pytest.mark.contract), pytest.param(False, marks=pytest.mark.long)]
)
def test_each_hop_of_a_request_is_recorded(
    tmp_path: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """A request through Spark's RPC has all hops. On a direct connection it skips those in the driver's JVM.

    The first evaluation on an executor uses a direct connection, even if its worker runs already.
    """
    folder = tmp_path / "hops"
    folder.mkdir()
    monkeypatch.setenv("STAGECREW_HOPS", str(folder))
    script = f"DIRECT = {str(direct).lower()!r}\n{SCRIPT}"
    with driver_script(tmp_path, journal, "", script) as driver:
        assert driver.wait(120) == 0
    (ready,) = journal.read(event="ready")
    assert ready["direct"] == direct
    expected = {hop for hop, where in HOPS if not (direct and where == "driver's JVM")}
    # The driver's JVM writes its file when it ends, which may be after the end of Python.
    requests = [(ready["evaluation"], sequence) for sequence in range(1, 21)]
    passed: dict[tuple[int, int], dict[str, int]] = {}

    def is_written() -> bool:
        passed.update(recorded(folder))
        return all(set(passed.get(request, ())) == expected for request in requests)

    eventually(is_written, 30, f"all processes have written the hops {sorted(expected)}")
    for request in requests:
        assert min(passed[request].values()) == passed[request]["task-sends"]


def recorded(folder: Path) -> dict[tuple[int, int], dict[str, int]]:
    """Returns the times at which each request passed its hops, by evaluation and sequence number."""
    passed: dict[tuple[int, int], dict[str, int]] = collections.defaultdict(dict)
    for path in folder.iterdir():
        for line in path.read_text().split("\n")[:-1]:  # the last line may not be complete
            hop, evaluation, sequence, nanoseconds = line.split()
            passed[int(evaluation), int(sequence)][hop] = int(nanoseconds)
    return passed
