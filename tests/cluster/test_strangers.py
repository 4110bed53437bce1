"""Another user of the host can read nothing of an application, and can neither slow it down nor make it fail.

The attacker opens 2,000 connections to every port of the application's processes, from the first port on: silent ones,
half frames, garbage, and connections that are closed at once.
"""

from __future__ import annotations

import contextlib
import os
import statistics
from pathlib import Path

import pytest

from support.driver_scripts import driver_script
from support.journal import Journal
from support.sessions import PLAIN_JVM_OPTIONS
from support.strangers import HostileUser
from support.waiting import eventually

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of another user; CI runs as root"),
]

CONNECTIONS = 2000

SCRIPT = """
from stagecrew import Coordinator
import pyarrow as pa
class Sums(Coordinator):
    def handle_request(self, evaluation, request):
        return request
def work(gateway, batches):
    rows = sum(batch.num_rows for batch in batches)
    yield pa.record_batch({"n": [sum(gateway.request(1) for _ in range(rows))]})
builder = session_builder("local-cluster[2,1,1024]").config("spark.task.maxFailures", "1")
for key, value in SETTINGS.items():
    builder = builder.config(key, value)
spark = stagecrew.configure(builder, listeners=[Recorder(journal), executor_wide(journal.path)]).getOrCreate()
def address_file(rows):
    from pyspark import TaskContext
    path = TaskContext.get().getLocalProperty("spark.stagecrew.addressFile")
    journal.write(event="address_file", path=path, where=json.load(open(path)), logs=os.getcwd())
    yield 1
runs = 0
while runs < 2 or not os.path.exists("attacked"):
    runs += 1
    with stagecrew.crew(spark).topology("t", listeners=[Recorder(journal, "inner")]) as topology:
        spark.sparkContext.parallelize(range(2), 2).mapPartitions(address_file).count()
        operator = topology.coordinate("sums", Sums)
        rows = operator.map(spark.range(0, 4000, 1, 4), work, "n long").groupBy().sum().first()[0]
        mapped = spark.sparkContext.parallelize(range(8), 8).map(lambda x: x + 1).sum()
    report = topology.report
    journal.write(event="ran", rows=rows, mapped=mapped, failures=report.failures, opens=report.opens, closes=report.closes)
spark.stop()
"""


@pytest.mark.parametrize(
    ("channel", "reuse"),
    [("auto", "true"), *(pytest.param("tcp", reuse, marks=pytest.mark.long) for reuse in ("true", "false"))],
)
def test_a_job_is_not_disturbed_by_another_user(tmp_path: Path, journal: Journal, channel: str, reuse: str) -> None:
    """With 2,000 hostile connections each task runs once, all listeners close, and few warnings are logged.

    The attacker opens no file and no Unix socket, and gets no reply from a channel. Its attacks begin while the
    executors are starting. The first task that failed would fail the job.
    """
    settings = {
        "spark.stagecrew.channel": channel, "spark.python.worker.reuse": reuse, "spark.log.level": "WARN",
        "spark.executor.extraJavaOptions": PLAIN_JVM_OPTIONS,
    }  # fmt: skip
    script = f"SETTINGS = {settings!r}\n{SCRIPT}"
    attacked: set[str] = set()
    with (
        driver_script(tmp_path, journal, "", script) as driver,
        HostileUser(driver.pid, CONNECTIONS, 150) as hostile_user,
    ):

        def has_ended() -> bool:
            for entry in journal.read(event="address_file"):
                for path in {entry["path"], os.path.dirname(entry["path"])} - attacked:
                    attacked.add(path)
                    hostile_user.attack_file(path)
            if hostile_user.attacked.is_set():
                (tmp_path / "attacked").touch()
            return driver.poll() is not None

        eventually(has_ended, 150, "the driver ends")
        assert driver.returncode == 0
    assert len(attacked) == 4  # address file and folder of two executors
    for run in (runs := journal.read(event="ran")):
        assert (run["rows"], run["mapped"], run["failures"]) == (4000, 36, 0)
        assert run["opens"] == run["closes"] > 0
    assert len(runs) >= 2
    outcome, places = hostile_user.outcome, journal.read(event="address_file")
    assert outcome["opened"] == []
    # A process or a file may be gone when it is attacked. The channel's files are not: tasks are running.
    refused, gone = outcome["counts"]["EACCES"], outcome["counts"].get("ENOENT", 0)
    assert refused + gone >= len(hostile_user.targets_of("file", "socket") | attacked)
    assert refused >= len(attacked)
    for address_file in places:
        if channel == "tcp":
            assert f"port {address_file['where']['port']}" in hostile_user.targets_of("port")
            assert outcome["received"].get(address_file["where"]["port"], 0) == 0
        else:
            assert f"socket {address_file['where']['path']}" in hostile_user.targets_of("socket")
    logs = {Path(address_file["logs"], "stderr") for address_file in places} | {tmp_path / "driver.log"}
    assert len(logs) == 3
    assert sum(log.read_text(errors="replace").count("a connection to the channel of") for log in logs) <= 20
    assert outcome["sent"] == CONNECTIONS


TIMED = """
os.sched_setaffinity(0, {CORE})
class NoOp(stagecrew.Listener):
    pass
builder = session_builder("local-cluster[2,1,1024]")
for key, value in SETTINGS.items():
    builder = builder.config(key, value)
if WITH_STAGECREW:
    stagecrew.configure(builder, listeners=[NoOp()])
began = time.monotonic()
spark = builder.getOrCreate()
for number in range(1, 4):
    assert spark.sparkContext.parallelize(range(TASKS), TASKS).map(lambda n: n * n).sum() == sum(n * n for n in range(TASKS))
    journal.write(event="job", seconds=time.monotonic() - began, number=number)
spark.stop()
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("reuse", "tasks"), [("true", 200), ("false", 30)])
def test_an_attack_delays_jobs_no_more_than_with_plain_spark(
    tmp_path: Path, journal: Journal, reuse: str, tasks: int
) -> None:
    """Under attack, from its start to its third job, an application takes at most 1.1 of plain Spark's time.

    The attacks go to Spark's own ports and to those of the channel. The two applications run at the same time, because
    the speed of a machine changes by 10 % from one half minute to the next. Each has a core of its own, and they swap
    cores after each round.
    """
    settings = {
        "spark.python.worker.reuse": reuse, "spark.stagecrew.channel": "tcp",
        "spark.executor.extraJavaOptions": PLAIN_JVM_OPTIONS,
    }  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))[:2]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(7):
        with contextlib.ExitStack() as stack:
            applications = []
            for with_stagecrew in (False, True):
                folder = tmp_path / f"{number}-{with_stagecrew}"
                folder.mkdir()
                own = Journal(str(folder / "journal"))
                core = cores[(number + with_stagecrew) % len(cores)]
                head = f"SETTINGS, WITH_STAGECREW, TASKS, CORE = {settings!r}, {with_stagecrew}, {tasks}, {core}\n"
                driver = stack.enter_context(driver_script(folder, own, "", head + TIMED))
                hostile_user = stack.enter_context(HostileUser(driver.pid, CONNECTIONS, 200))
                applications.append((with_stagecrew, driver, own, hostile_user))
            eventually(lambda these=applications: all(one[1].poll() is not None for one in these), 200, "both end")
        for with_stagecrew, driver, own, hostile_user in applications:
            assert driver.returncode == 0
            assert hostile_user.outcome["sent"] >= 1000
            if number > 0:  # the first round fills the caches of the disk
                seconds[with_stagecrew].append(own.read(event="job", number=3)[0]["seconds"])
    ratios = [ours / plain for plain, ours in zip(seconds[False], seconds[True], strict=True)]
    print("seconds", seconds, "ratios", ratios)
    assert statistics.median(ratios) <= 1.1
