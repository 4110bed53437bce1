"""Jobs whose state storage is full, or read-only: a small file system of the test's own, with real drivers and runs."""

import contextlib
import os
import subprocess

import pytest

from commands import command
from hajobs import MODULE, job_of, lines
from haprocesses import campaign, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Disk:
    """A file system of 8 MB: SQLite's log alone may have half of that."""

    def __init__(self, folder):
        self.folder, self._filler = folder, folder / "filler"

    def fill(self):
        """To the last block."""
        descriptor = os.open(self._filler, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with contextlib.suppress(OSError):
            while os.write(descriptor, bytes(65536)):
                pass
        with contextlib.suppress(OSError):
            while os.write(descriptor, bytes(512)):
                pass
        os.close(descriptor)

    def make_room(self):
        self._filler.unlink()

    def lock(self):
        self._remount("ro")

    def unlock(self):
        self._remount("rw")

    def _remount(self, how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.folder)], check=True)

    def files(self):
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    yield Disk(folder)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def drivers(tmp_path, disk):
    """Whose storage is that disk; the store is elsewhere."""
    with campaign(f"sqlite://{tmp_path}/jobs.db", tmp_path) as found:
        yield found


WAYS = pytest.mark.parametrize(
    ("close", "open_", "words"),
    [
        pytest.param(Disk.fill, Disk.make_room, "No space is left: free some", id="full"),
        pytest.param(Disk.lock, Disk.unlock, "It is read-only: use a storage", id="read-only"),
    ],
)


def refused(drivers, disk, words):
    """Submitting is an error in a line, with exit code 1, and stores nothing, neither state nor job; what only reads works."""
    places = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
    (drivers.folder / "ha_jobs.py").write_text(MODULE)
    with drivers.jobs() as jobs:
        before = (jobs.names(), disk.files())
    submitted = command("submit", "--id", "late", "--arg", "folder=/", "ha_jobs:ending", cwd=drivers.folder, **places)
    assert (submitted.returncode, submitted.stdout) == (1, "")
    [line] = submitted.stderr.splitlines()
    assert words in line
    with drivers.jobs() as jobs:
        assert (jobs.names(), disk.files()) == before
        assert jobs._store.children("specs") == [name for name in before[0] if not jobs.read(name)[0].clean]
    assert command("jobs", **places).returncode == 0
    assert command("leader", **places).returncode == 0
    assert command("result", "late", **places).returncode == 1


@WAYS
def test_jobs_go_on(drivers, disk, close, open_, words):
    """Jobs that run wait where they need the storage - a step, a commit, the end - and go on in their first run when it is right again."""
    (drivers.folder / "out" / "hold-0").touch()
    (drivers.folder / "out" / "hold-stage").touch()
    driver = drivers.start()
    for job, function in {"steps": "steps", "rows": "storing", "ends": "ending"}.items():
        drivers.submit(job_of(function, drivers, **({"count": 2} if job == "steps" else {})), job)
    for name in ("step-0", "stages", "ending"):
        until(lambda name=name: lines(drivers, name), f"{name} runs")
    close(disk)
    refused(drivers, disk, words)
    for name in ("go-0", "go-stage", "go-ending"):
        (drivers.folder / "out" / name).touch()
    for job, said in {
        "steps": "is done and waits for its result",
        "rows": "waits for its record",
        "ends": "waits for its result",
    }.items():
        until(lambda job=job, said=said: said in drivers.logs(job), f"{job} waits for the storage: {drivers.logs(job)}")
    assert (driver.poll(), lines(drivers, "step-1"), lines(drivers, "written")) == (None, [], [])
    open_(disk)
    assert [drivers.result(job).value() for job in ("steps", "rows", "ends")] == [10, 100, 7]
    assert [drivers.record(job).run for job in ("steps", "rows", "ends")] == [1, 1, 1]
    assert [lines(drivers, name) for name in ("step-0", "step-1", "stages")] == [["1"], ["1"], ["1"]]
    drivers.nothing_left("steps", "rows", "ends")


@WAYS
def test_a_failover(drivers, disk, close, open_, words):
    """A standby takes a job up meanwhile, and finished steps are known to it; a job that is cancelled ends when the storage is right."""
    (drivers.folder / "out" / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_of("steps", drivers, count=3), "steps")
    drivers.submit(job_of("ending", drivers), "ends")
    until(lambda: lines(drivers, "step-1") and lines(drivers, "ending"), "the jobs run")
    close(disk)
    drivers.kill(leader)
    until(lambda: len(lines(drivers, "step-1")) == 2, "the step that was cut short runs again")
    with drivers.jobs() as jobs:
        jobs.cancel("ends")
    (drivers.folder / "out" / "go-1").touch()
    for job in ("steps", "ends"):
        until(
            lambda job=job: "waits for its result" in drivers.logs(job),
            f"{job} waits for the storage: {drivers.logs(job)}",
        )
    refused(drivers, disk, words)
    open_(disk)
    assert drivers.result("steps").value() == 30
    assert drivers.result("ends").state == "cancelled"
    assert [lines(drivers, f"step-{number}") for number in range(3)] == [["1"], ["1", "2"], ["2"]]
    assert drivers.record("steps").run == 2
    drivers.nothing_left("steps", "ends")


def test_a_disk_of_both(tmp_path, disk):
    """Store and storage lie on one disk, which is full for longer than a leader needs to look: the leader leads, its job goes on in its
    first run when there is room, and submitting is an error in a line meanwhile."""
    with campaign(f"sqlite://{disk.folder}/jobs.db", tmp_path) as drivers:
        (drivers.folder / "out" / "hold-0").touch()
        driver = drivers.start()
        drivers.submit(job_of("steps", drivers, count=2), "steps")
        drivers.submit(job_of("ending", drivers), "ends")
        until(lambda: lines(drivers, "step-0") and lines(drivers, "ending"), "the jobs run")
        disk.fill()
        (drivers.folder / "ha_jobs.py").write_text(MODULE)
        places = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
        submitted = command("submit", "--arg", "folder=/", "ha_jobs:ending", cwd=drivers.folder, **places)
        assert (submitted.returncode, submitted.stdout) == (1, "")
        [line] = submitted.stderr.splitlines()
        assert "no room" in line
        for name in ("go-0", "go-ending"):
            (drivers.folder / "out" / name).touch()
        for job in ("steps", "ends"):
            until(lambda job=job: drivers.logs(job).count("waits for its ") > 2, f"{job} waits: {drivers.logs(job)}")
        assert driver.poll() is None
        disk.make_room()
        assert [drivers.result(job).value() for job in ("steps", "ends")] == [10, 7]
        assert [drivers.record(job).run for job in ("steps", "ends")] == [1, 1]
        with drivers.jobs() as jobs:
            assert (jobs.leader().term, sorted(jobs.names())) == (1, ["ends", "steps"])
