"""With all of Spark's own security switched on, every capability works as without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.driver_scripts import driver_script
from support.journal import Journal
from support.waiting import eventually

SECURED = {
    "spark.authenticate": "true",
    "spark.authenticate.secret": "a secret of this test",
    "spark.network.crypto.enabled": "true",
    "spark.io.encryption.enabled": "true",
    "spark.acls.enable": "true",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
}

SCRIPT = """
import pyarrow as pa, urllib.request
from urllib.parse import urlsplit
import pyarrow.parquet as pq
from stagecrew import Coordinator
from stagecrew.operators import FileCommitLog
from stagecrew.operators.enumerators import ParquetRowGroups
from stagecrew.operators.sinks import ParquetSink
class Echo(Coordinator):
    def handle_request(self, evaluation, request):
        return request
def work(gateway, batches):
    yield pa.record_batch({"n": [sum(gateway.request(batch.num_rows) for batch in batches)]})
def mean(steps, batches):
    values = [value for batch in batches for value in batch.column("id").to_pylist()]
    yield pa.record_batch({"mean": [steps.reduce(sum(values)) / steps.reduce(len(values))]})
def whole(rows):
    yield os.path.basename(json.load(open(address_file())).get("path", "tcp"))
def address_file():
    from pyspark import TaskContext
    return TaskContext.get().getLocalProperty("spark.stagecrew.addressFile")
builder = session_builder("local-cluster[2,2,1024]")
for key, value in SETTINGS.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
pq.write_table(pa.table({"id": range(1000)}), "ids.parquet", row_group_size=100)
groups = ParquetRowGroups(os.path.abspath("ids.parquet"))
with stagecrew.crew(spark).topology("all", listeners=[Recorder(journal, "inner")]) as topology:
    kinds = spark.sparkContext.parallelize(range(4), 4).mapPartitions(whole).collect()
    requests = topology.coordinate("echo", Echo).map(spark.range(0, 400, 1, 4), work, "n long").groupBy().sum().first()[0]
    splits = topology.splits(groups, groups.read, groups.schema, parallelism=2).count()
    steps = topology.supersteps(spark.range(100).repartition(2), mean, "mean double").first()[0]
    committed = topology.commit(spark.range(1000), ParquetSink(os.path.abspath("out")), "c1", FileCommitLog("log")).rows
    shuffled = spark.range(10000).selectExpr("id % 10 as key").groupBy("key").count().count()
report = topology.report
with urllib.request.urlopen(f"http://127.0.0.1:{urlsplit(spark.sparkContext.uiWebUrl).port}/stagecrew/") as page:
    page_status = page.status
journal.write(event="ran", kinds=sorted(set(kinds)), requests=requests, splits=splits, steps=steps, committed=committed,
    shuffled=shuffled, released=report.released, opens=report.opens, closes=report.closes, failures=report.failures,
    page=page_status)
spark.stop()
journal.write(event="stopped")
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("channel", ["auto", pytest.param("tcp", marks=pytest.mark.long)])
def test_every_capability_works_with_authentication_and_encryption(
    tmp_path: Path, journal: Journal, channel: str
) -> None:
    """With authentication, encryption and ACLs, listeners, coordinators, operators, release and pages work."""
    settings = {**SECURED, "spark.stagecrew.channel": channel}
    with driver_script(tmp_path, journal, "", f"SETTINGS = {settings!r}\n{SCRIPT}") as driver:
        eventually(lambda: driver.poll() is not None, 150, "the driver ends")
        assert driver.returncode == 0
    (ran,) = journal.read(event="ran")
    assert journal.read(event="stopped")
    assert ran["kinds"] == ["channel.sock" if channel == "auto" else "tcp"]
    assert (ran["requests"], ran["splits"], ran["steps"], ran["committed"]) == (400, 1000, 49.5, 1000)
    assert (ran["shuffled"], ran["failures"], ran["page"]) == (10, 0, 200)
    assert ran["released"] > 0
    assert ran["opens"] == ran["closes"] > 0
    opened = sorted((e["pid"], e["listener"]) for e in journal.read(event="open"))
    assert opened == sorted((e["pid"], e["listener"]) for e in journal.read(event="close"))


PORTS = """
import psutil
builder = session_builder("local-cluster[1,1,1024]").config("spark.ui.enabled", "true").config("spark.ui.port", "0")
if WITH_STAGECREW:
    builder = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)])
spark = builder.getOrCreate()
def identity(batches):
    yield from batches
def run(topology):
    data = spark.range(0, 100, 1, 2)
    data = topology.coordinate("echo", stagecrew.Coordinator).map(data, work, "id long") if topology else data
    data.mapInArrow(identity, "id long").count()
def work(gateway, batches):
    yield from batches
with stagecrew.crew(spark).topology("t") if WITH_STAGECREW else contextlib.nullcontext() as topology:
    run(topology)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    journal.write(event="listening", ports=len(listening))
spark.stop()
"""


@pytest.mark.timeout(200)
def test_stagecrew_listens_on_no_port(tmp_path: Path, journal: Journal) -> None:
    """By default, an application with listeners and coordinators listens on as many ports as with plain Spark."""
    for with_stagecrew in (False, True):
        with driver_script(tmp_path, journal, "", f"WITH_STAGECREW = {with_stagecrew}\n{PORTS}") as driver:
            eventually(lambda driver=driver: driver.poll() is not None, 90, "the driver ends")
            assert driver.returncode == 0
    plain, ours = (entry["ports"] for entry in journal.read(event="listening"))
    assert plain == ours > 0
