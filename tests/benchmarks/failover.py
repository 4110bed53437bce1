"""Measures the time from SIGKILL of the leader to the first task of the recovered job, and recovers 1,000 jobs.

A standby is waiting, and the job is running its first step. The time is divided into these parts, on the clock of one
host: until the leader's entry is no longer in the store (detection: its session expires), until another leader has an
entry (election), until the job's Python begins (store, spark-submit, its JVM), and until the job's first task runs
(Spark session).
"""

import contextlib
import pathlib
import tempfile
import time
import uuid

from measurements import Measurement, at_most
from processes import Run

from support.driver_processes import QUICK_CONF, DriverProcesses, wait_until
from support.zookeeper import zookeeper

MODULE = """
import os, time
import stagecrew
from pyspark.sql import SparkSession

def load(folder):
    begun = time.time()
    job = stagecrew.current_job()
    spark = stagecrew.configure(SparkSession.builder).getOrCreate()
    def first():
        rows = spark.range(1).rdd.map(lambda _: time.time()).collect()
        with open(f"{folder}/times-{job.attempt}", "w") as file:
            file.write(f"{begun} {rows[0]}")
        while not os.path.exists(f"{folder}/go"):
            time.sleep(0.05)
        return rows[0]
    job.step("first", first)
    spark.stop()
"""
JOBS = 1000


def _failover(store, folder):
    from stagecrew.recovery.jobs.spec import JobSpec

    (folder / "bench_job.py").write_text(MODULE)
    drivers = DriverProcesses(store, folder)
    try:
        drivers.start()
        leader = drivers.leader()
        standby = drivers.start()
        spec = JobSpec.of_function("bench_job:load", {"folder": str(folder)}, QUICK_CONF, [folder / "bench_job.py"])
        drivers.submit(spec, "job")
        wait_until((folder / "times-1").exists, "the job runs")
        killed = time.time()
        drivers.kill(leader)
        with drivers.jobs() as jobs:
            info = jobs.leader()
            while info is not None and info.pid != standby.pid:
                time.sleep(0.002)
                info = jobs.leader()
            detected = time.time()
            info = wait_until(
                lambda: (found := jobs.leader()) and found.pid == standby.pid and found, "the standby leads"
            )
        wait_until((folder / "times-2").exists, "the job runs again")
        begun, task = map(float, (folder / "times-2").read_text().split())
        (folder / "go").touch()
        assert drivers.result("job").state == "succeeded"
    finally:
        drivers.close()
    elected = info.since.timestamp()
    detected = min(detected, elected)  # the reader polls every 2 ms
    return {
        "detected": detected - killed,
        "elected": elected - detected,
        "leads": elected - killed,
        "begun": begun - elected,
        "task": task - begun,
        "all": task - killed,
    }


class _FakeLauncher:
    """A launcher that starts no process. It also acts as the process of each run, which never exits."""

    def prepare(self, spec, job):
        return pathlib.Path("/nowhere")

    def start(self, folder, run, term, finish):
        return self

    def exit_code(self):
        return None


def _recover_jobs(store_of, folder):
    from stagecrew.recovery.driver.reconciler import JobReconciler
    from stagecrew.recovery.jobs.fenced import FencedJobs
    from stagecrew.recovery.jobs.spec import JobSpec
    from stagecrew.recovery.state.storage import StateStorage

    storage = StateStorage(str(folder))
    with contextlib.closing(store_of()) as store:
        jobs = FencedJobs(store, storage)
        for number in range(JOBS):
            jobs.submit(JobSpec(f"job-{number}.py", (), {}, {}, b"pass"), f"job-{number}")
    with contextlib.closing(store_of()) as store:
        reconciler = JobReconciler(FencedJobs(store, storage), 1, _FakeLauncher(), at_once=JOBS)
        began = time.perf_counter()
        reconciler.reconcile()
        seconds = time.perf_counter() - began
        assert len(reconciler.processes) == JOBS
        return seconds


def failover(run: Run):
    """From SIGKILL of a leader to the first task of the recovered job, and 1,000 jobs recovered."""
    from stagecrew.recovery.stores import open_store

    goals = {"sqlite": at_most(1), "zookeeper": at_most(5)}  # ZooKeeper: the session timeout of 4 s, and one second
    with contextlib.ExitStack() as open_:
        server = open_.enter_context(zookeeper())

        def sqlite(folder):
            return f"sqlite://{folder}/jobs.db"

        def ensemble(folder):
            return f"zookeeper://{server.hosts}/bench-{uuid.uuid4().hex}?timeout=4"

        stores = {"sqlite": sqlite, "zookeeper": ensemble}
        found, recovered = ({kind: [] for kind in stores} for _ in range(2))
        for _ in run.rounds():
            for kind, url in stores.items():
                folder = pathlib.Path(open_.enter_context(tempfile.TemporaryDirectory()))
                found[kind].append(_failover(url(folder), folder))
                folder = pathlib.Path(open_.enter_context(tempfile.TemporaryDirectory()))
                store = url(folder)
                recovered[kind].append(_recover_jobs(lambda store=store: open_store(store), folder))
    for kind in stores:
        for words, part in (
            ("until its session expires", "detected"),
            ("then until another leads", "elected"),
            ("until another leads", "leads"),
            ("then until the job's Python begins", "begun"),
            ("then until its first task runs", "task"),
            ("in all", "all"),
        ):
            goal = goals[kind] if part == "leads" else None
            yield Measurement(f"leader killed, {kind}: {words}", "s", [one[part] for one in found[kind]], goal=goal)
        yield Measurement(f"recover 1,000 jobs, {kind}", "s", recovered[kind])
