"""Drivers that campaign, as processes of their own, over a store; and what a test asks of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from crewtools import eventually
from stagecrew.recovery.jobs.store import Jobs, open_jobs
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store

#: How long one waits for what a busy machine does slowly, in seconds.
LONG = 120.0
#: A folder for the PYTHONPATH of processes that are to be killed at a point.
FAULT_POINTS = Path(__file__).with_name("faultpoints")
#: What makes Spark start quickly.
QUICK = {
    "spark.master": "local[1]",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def until(condition, what, seconds=LONG):
    """Waits until the condition answers something true, and answers that."""
    return eventually(condition, seconds, what)


class Drivers:
    """Processes of `stagecrew driver` for one store, and their jobs."""

    def __init__(self, store, folder):
        self.store, self.folder = store, Path(folder)
        self.state = self.folder / "state"
        self.state.mkdir(exist_ok=True)
        self.running = []
        self._pids = set()

    def start(self, wait=True, store=None, **environment):
        """One more, which may reach the store by a way of its own; answers its process, which runs when this returns."""
        number = len(list(self.folder.glob("driver-*.log")))
        log = self.folder / f"driver-{number}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable, "-c", "from stagecrew.cli import main; main()", "driver",
                    "--store", store or self.store, "--state", str(self.state), "--work", str(self.folder / f"work-{number}"),
                ],
                stdout=output, stderr=output, start_new_session=True, env=os.environ | environment,
            )  # fmt: skip
        self.running.append(process)
        if wait:
            until(lambda: process.poll() is None and "campaign" in log.read_text(), "a driver campaigns")
        return process

    def leader(self):
        """The process that leads, once there is one."""

        def found():
            with self.jobs() as jobs:
                info = jobs.leader()
            return info and next((one for one in self.running if one.pid == info.pid and one.poll() is None), None)

        return until(found, "somebody leads")

    def jobs(self):
        return open_jobs(self.store, str(self.state))

    def submit(self, spec, job):
        with self.jobs() as jobs:
            return jobs.submit(spec, job)

    def record(self, job):
        with self.jobs() as jobs:
            return jobs.read(job)[0]

    def result(self, job, seconds=LONG):
        """How it has ended, when it is clean."""
        until(lambda: self.record(job).clean, f"job {job} is at its end: {self.logs(job)}", seconds)
        with self.jobs() as jobs:
            return jobs.result(job)

    def process(self, job):
        """The process id of who runs the job, once there is one."""

        def found():
            with self.jobs() as jobs:
                return jobs.process(job)

        return until(found, f"a process runs {job}")["pid"]

    def killed(self, process):
        """A driver has died of a point."""
        assert process.wait(LONG) == -signal.SIGKILL
        self.running.remove(process)

    def kill(self, process):
        """SIGKILL to a driver alone: what it started lives on."""
        self._remember()
        process.send_signal(signal.SIGKILL)
        process.wait(LONG)
        self.running.remove(process)

    def _remember(self):
        for one in self.running:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._pids.update(child.pid for child in psutil.Process(one.pid).children(recursive=True))

    def logs(self, job):
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob(f"work-*/{job}/*.log"))

    def nothing_left(self, *jobs):
        """Asserts that these jobs have ended, and that of each there is its record and its result, and else nothing; behind a sweep."""

        def left():
            store = open_store(self.store)
            try:
                known = Jobs(store, StateStorage(self.state))
                report = known.sweep(0.0)
                return {
                    "unclean": [job for job in known.names() if not known.read(job)[0].clean],
                    "processes": [job for job in known.names() if known.process(job)],
                    "specs": store.children("specs"),
                    "below": [
                        (job, what)
                        for job in known.names()
                        for what in ("steps", "commits")
                        if known.handles(job, what).audit().states
                    ],
                    "results": sorted(set(store.children("results")) ^ set(jobs))
                    + sorted(set(known.names()) ^ set(jobs)),
                    "swept": report.failed,
                    "states": [path.name for path in self.state.rglob("*") if path.is_file()][len(jobs) :],
                }
            finally:
                store.close()

        found = left()
        due = time.monotonic() + 30
        while any(found.values()) and time.monotonic() < due:  # sessions of who was killed end by and by
            time.sleep(0.2)
            found = left()
        assert not any(found.values()), found
        assert [path for path in (self.folder / "out").iterdir() if path.name.startswith("_stagecrew")] == []

    def close(self):
        """Ends all, politely, and asserts that nothing is left of them."""
        self._remember()
        for process in self.running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running:
            assert process.wait(LONG) == 0, [path.read_text()[-3000:] for path in self.folder.glob("driver-*.log")]
        self.running.clear()

        def gone():
            return not [
                pid for pid in self._pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
            ]

        with contextlib.suppress(psutil.NoSuchProcess):
            until(gone, "every process that a driver started has ended", 60)


def point(mark, role, what, moment="after", number=1, whom="self"):
    """The environment in which the first who comes there is killed: who does `what`, a pattern, for the n-th time. See `faultpoints`."""
    given = {"role": role, "what": what, "moment": moment, "number": number, "whom": whom, "mark": str(mark)}
    return {"PYTHONPATH": str(FAULT_POINTS), "STAGECREW_TEST_POINT": json.dumps(given)}


@contextlib.contextmanager
def campaign(store, folder):
    """Drivers over a store, with a folder `out` that jobs write to; closed at the end."""
    (folder / "out").mkdir()
    drivers = Drivers(store, folder)
    try:
        yield drivers
    finally:
        drivers.close()
