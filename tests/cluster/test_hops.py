"""The hops of a request, which `make bench` records."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from stagecrew.wire.hops import HOPS
from support.driver_scripts import driver_script
from support.journal import Journal

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


@pytest.mark.contract
@pytest.mark.timeout(180)
@pytest.mark.parametrize("direct", [True, False])
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
    passed = collections.defaultdict(dict)
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            hop, evaluation, sequence, nanoseconds = line.split()
            passed[int(evaluation), int(sequence)][hop] = int(nanoseconds)
    (ready,) = journal.read(event="ready")
    assert ready["direct"] == direct
    expected = {hop for hop, where in HOPS if not (direct and where == "driver's JVM")}
    for sequence in range(1, 21):
        times = passed[ready["evaluation"], sequence]
        assert set(times) == expected
        assert min(times.values()) == times["task-sends"]
