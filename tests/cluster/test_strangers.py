"""Another user of the host can read nothing of an application, and can neither slow it down nor make it fail.

The attacker opens 2,000 connections to each port of the application's JVMs, and 200 to each port of its Python processes:
silent ones, half frames, garbage, and connections that are closed at once. It holds up to 300 connections to each port.
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

#: The number of connections to all ports of an application, at least.
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
    ("channel", "unix_workers", "reuse", "connections"),
    [
        ("tcp", "false", "true", 500),
        pytest.param("tcp", "false", "true", 2000, marks=pytest.mark.long),
        pytest.param("tcp", "false", "false", 2000, marks=pytest.mark.long),
        pytest.param("auto", "false", "true", 2000, marks=pytest.mark.long),
        pytest.param("auto", "true", "true", 2000, marks=pytest.mark.long),
    ],
)
def test_a_job_is_not_disturbed_by_another_user(
    tmp_path: Path, journal: Journal, channel: str, unix_workers: str, reuse: str, connections: int
) -> None:
    """With many hostile connections to each port, each task runs once, all listeners close, and few warnings are logged.

    The attacker opens no file and no Unix socket, neither one of stagecrew nor one of Spark's Python workers, and gets
    no reply from a channel. Its attacks begin while the executors are starting. The first task that failed would fail
    the job.
    """
    settings = {
        "spark.stagecrew.channel": channel, "spark.python.worker.reuse": reuse, "spark.log.level": "WARN",
        "spark.executor.extraJavaOptions": PLAIN_JVM_OPTIONS,
    }  # fmt: skip
    if unix_workers == "true":
        settings["spark.python.unix.domain.socket.enabled"] = "true"
    script = f"SETTINGS = {settings!r}\n{SCRIPT}"
    attacked: set[str] = set()
    with (
        driver_script(tmp_path, journal, "", script) as driver,
        HostileUser(driver.pid, connections, 150) as hostile_user,
    ):

        def has_ended() -> bool:
            for entry in journal.read(event="address_file"):
                for path in {entry["path"], os.path.dirname(entry["path"])} - attacked:
                    attacked.add(path)
                    hostile_user.attack_file(path)
            entries = journal.read(event="address_file")
            channels = {int(entry["where"]["port"]) for entry in entries if "port" in entry["where"]}
            if entries and channels | hostile_user.ports() <= hostile_user.attacked:
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
    refused, gone = outcome["counts"]["EACCES"], outcome["counts"].get("ENOENT", 0) + outcome["counts"].get("empty", 0)
    assert refused + gone >= len(hostile_user.targets_of("file", "socket") | attacked)
    assert refused >= len(attacked)
    for address_file in places:
        if channel == "tcp":
            port = int(address_file["where"]["port"])
            assert outcome["hits"][port] > 0.9 * connections
            assert outcome["received"][port] == 0
        else:
            assert f"socket {address_file['where']['path']}" in hostile_user.targets_of("socket")
    if unix_workers == "true":  # a daemon of each executor
        assert len([target for target in hostile_user.targets_of("socket") if target.endswith(".sock")]) >= 2
    logs = {Path(address_file["logs"], "stderr") for address_file in places} | {tmp_path / "driver.log"}
    assert len(logs) == 3
    for log in logs:  # of two executors and the driver, which have a channel each
        lines = [line for line in log.read_text(errors="replace").splitlines() if "to the channel of" in line]
        assert len(lines) <= 20
        assert (channel == "tcp") == (lines != []), log
    for attack in ("silence", "half", "garbage", "gone"):
        assert outcome["counts"][attack] > connections / 5


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
for number in range(4):
    assert spark.sparkContext.parallelize(range(TASKS), TASKS).map(lambda n: n * n).sum() == sum(n * n for n in range(TASKS))
    journal.write(event="job", seconds=time.monotonic() - began, number=number)
spark.stop()
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("reuse", "tasks", "attacks_python"), [("true", 600, False), ("true", 600, True), ("false", 30, False)]
)
def test_an_attack_delays_jobs_no_more_than_with_plain_spark(
    tmp_path: Path, journal: Journal, reuse: str, tasks: int, attacks_python: bool
) -> None:
    """Under attack, an application and its jobs after the first one take at most 1.1 of plain Spark's time.

    Each of Spark's own ports is attacked at the same rate, with and without stagecrew, and also the ports of the
    channel, until the jobs have ended. Spark's Python daemons are attacked in one case only, because plain Spark suffers
    more from this than stagecrew. The two applications run at the same time, because the speed of a machine changes by
    10 % from one half minute to the next. Each has a core of its own, and they swap cores after each round.
    """
    settings = {
        "spark.python.worker.reuse": reuse, "spark.stagecrew.channel": "tcp",
        "spark.executor.extraJavaOptions": PLAIN_JVM_OPTIONS,
    }  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))[:2]
    whole: dict[bool, list[float]] = {False: [], True: []}
    jobs: dict[bool, list[float]] = {False: [], True: []}
    for number in range(5):
        with contextlib.ExitStack() as stack:
            applications = []
            for with_stagecrew in (False, True):
                folder = tmp_path / f"{number}-{with_stagecrew}"
                folder.mkdir()
                own = Journal(str(folder / "journal"))
                core = cores[(number + with_stagecrew) % len(cores)]
                head = f"SETTINGS, WITH_STAGECREW, TASKS, CORE = {settings!r}, {with_stagecrew}, {tasks}, {core}\n"
                driver = stack.enter_context(driver_script(folder, own, "", head + TIMED))
                hostile_user = stack.enter_context(HostileUser(driver.pid, 100_000, 200, attacks_python))
                applications.append((with_stagecrew, driver, own, hostile_user))
            eventually(lambda these=applications: all(one[1].poll() is not None for one in these), 200, "both end")
        for with_stagecrew, driver, own, hostile_user in applications:
            assert driver.returncode == 0
            hits = sorted(hostile_user.outcome["hits"].values())
            print(f"round {number}, {with_stagecrew=}: {hits}")
            assert sum(hits) >= CONNECTIONS
            if number > 0:  # the first round fills the caches of the disk
                first, last = (own.read(event="job", number=job)[0]["seconds"] for job in (0, 3))
                whole[with_stagecrew].append(last)
                jobs[with_stagecrew].append(last - first)
    for seconds in (whole, jobs):
        ratios = [ours / plain for plain, ours in zip(seconds[False], seconds[True], strict=True)]
        print("seconds", seconds, "ratios", ratios)
        assert statistics.median(ratios) <= 1.1
