"""Starts, kills and inspects processes of `stagecrew driver` that share one store."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from stagecrew.recovery.jobs.store import Jobs, open_jobs
from stagecrew.recovery.state.storage import StateStorage
from stagecrew.recovery.stores import open_store
from support.waiting import eventually

#: Timeout in seconds for work that can take a long time on a busy machine.
LONG_TIMEOUT = 120.0
#: The folder that `kill_point` adds to the PYTHONPATH of processes.
KILL_POINTS = Path(__file__).with_name("kill_points")
#: Settings with which Spark starts quickly.
QUICK_CONF = {
    "spark.master": "local[1]",
    "spark.ui.enabled": "false",
    "spark.driver.memory": "512m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def wait_until(condition, what, seconds=LONG_TIMEOUT):
    """Waits until the condition returns a true value, and returns this value."""
    return eventually(condition, seconds, what)


class DriverProcesses:
    """Processes of `stagecrew driver` for one store, and the jobs in that store."""

    def __init__(self, store, folder):
        self.store, self.folder = store, Path(folder)
        self.state = self.folder / "state"
        self.state.mkdir(exist_ok=True)
        self.running = []
        self._pids = set()

    def start(self, wait=True, store=None, **environment):
        """Starts a driver, and returns its process. If `wait`, returns once the driver is campaigning.

        `store` is another URL of the same store, for this driver only.
        """
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
            wait_until(lambda: process.poll() is None and "campaign" in log.read_text(), "a driver is campaigning")
        return process

    def leader(self):
        """Waits for a leader, and returns its process."""

        def found():
            with self.jobs() as jobs:
                info = jobs.leader()
            return info and next((one for one in self.running if one.pid == info.pid and one.poll() is None), None)

        return wait_until(found, "a driver leads")

    def jobs(self):
        return open_jobs(self.store, str(self.state))

    def submit(self, spec, job):
        with self.jobs() as jobs:
            return jobs.submit(spec, job)

    def record(self, job):
        with self.jobs() as jobs:
            return jobs.read(job)[0]

    def result(self, job, seconds=LONG_TIMEOUT):
        """Waits until the job has ended and was cleaned up, and returns its result."""
        wait_until(lambda: self.record(job).clean, f"job {job} is clean: {self.logs(job)}", seconds)
        with self.jobs() as jobs:
            return jobs.result(job)

    def process(self, job):
        """Waits until a process is running the job, and returns the process id."""

        def found():
            with self.jobs() as jobs:
                return jobs.process(job)

        return wait_until(found, f"a process runs {job}")["pid"]

    def assert_killed(self, process):
        """Waits for the end of this driver, and asserts that it was killed at its kill point."""
        assert process.wait(LONG_TIMEOUT) == -signal.SIGKILL
        self.running.remove(process)

    def kill(self, process):
        """Sends SIGKILL to a driver only. The processes that it started keep running."""
        self._remember_children()
        process.send_signal(signal.SIGKILL)
        process.wait(LONG_TIMEOUT)
        self.running.remove(process)

    def _remember_children(self):
        for one in self.running:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._pids.update(child.pid for child in psutil.Process(one.pid).children(recursive=True))

    def logs(self, job):
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob(f"work-*/{job}/*.log"))

    def assert_nothing_left(self, *jobs):
        """Asserts that exactly these jobs exist and are clean. A sweep must leave only their records and results."""

        def leftovers():
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

        found = leftovers()
        due = time.monotonic() + 30
        while any(found.values()) and time.monotonic() < due:  # the sessions of killed processes expire a little later
            time.sleep(0.2)
            found = leftovers()
        assert not any(found.values()), found
        assert [path for path in (self.folder / "out").iterdir() if path.name.startswith("_stagecrew")] == []

    def close(self):
        """Terminates all drivers, and waits until all processes that they started have ended."""
        self._remember_children()
        for process in self.running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running:
            assert process.wait(LONG_TIMEOUT) == 0, [
                path.read_text()[-3000:] for path in self.folder.glob("driver-*.log")
            ]
        self.running.clear()

        def all_ended():
            return not [
                pid for pid in self._pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"
            ]

        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(all_ended, "every process that a driver started has ended", 60)


def kill_point(marker, role, operation, moment="after", number=1, victim="self"):
    """Returns environment variables that set a kill point for the processes of this role.

    When one of these processes has reached its `number`-th operation that matches the pattern `operation`, this process
    (`victim="self"`) or the driver that started it (`victim="driver"`) is killed, before or after the operation
    (`moment`). Only one process is killed: the file `marker` is created first. See `kill_points/sitecustomize.py`.
    """
    settings = {
        "role": role, "operation": operation, "moment": moment, "number": number, "victim": victim, "marker": str(marker),
    }  # fmt: skip
    path = os.pathsep.join([str(KILL_POINTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "STAGECREW_TEST_POINT": json.dumps(settings)}


@contextlib.contextmanager
def campaigning_drivers(store, folder):
    """Yields a `DriverProcesses` for a store, with a folder `out` for the jobs. Closes it at the end."""
    (folder / "out").mkdir()
    drivers = DriverProcesses(store, folder)
    try:
        yield drivers
    finally:
        drivers.close()
