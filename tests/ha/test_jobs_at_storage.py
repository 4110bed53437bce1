"""Jobs whose state storage is full or read-only, with real drivers and runs, on a small file system."""

import contextlib
import os
import subprocess

import pytest

from support.cli import run_stagecrew
from support.driver_processes import campaigning_drivers, wait_until
from support.example_jobs import MODULE, job_spec, recorded_lines

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Disk:
    """A file system of 8 MB, half of which SQLite's log can use."""

    def __init__(self, folder):
        self.folder, self._filler = folder, folder / "filler"

    def fill(self):
        """Fills the disk to the last block."""
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

    def make_read_only(self):
        self._remount("ro")

    def make_writable(self):
        self._remount("rw")

    def _remount(self, mode):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], check=True)

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
    """Drivers whose state storage is on the small disk. The store is elsewhere."""
    with campaigning_drivers(f"sqlite://{tmp_path}/jobs.db", tmp_path) as found:
        yield found


BROKEN_STORAGE = pytest.mark.parametrize(
    ("break_storage", "repair_storage", "message"),
    [
        pytest.param(Disk.fill, Disk.make_room, "No space is left: free some", id="full"),
        pytest.param(Disk.make_read_only, Disk.make_writable, "It is read-only: use a storage", id="read-only"),
    ],
)


def check_submit_is_refused(drivers, disk, message):
    """Checks that `submit` fails with one line and exit code 1 and stores nothing, and that read-only commands work."""
    places = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
    (drivers.folder / "ha_jobs.py").write_text(MODULE)
    with drivers.jobs() as jobs:
        stored_before = (jobs.names(), disk.files())
    submitted = run_stagecrew(
        "submit", "--id", "late", "--arg", "folder=/", "ha_jobs:ending", cwd=drivers.folder, **places
    )
    assert (submitted.returncode, submitted.stdout) == (1, "")
    [line] = submitted.stderr.splitlines()
    assert message in line
    with drivers.jobs() as jobs:
        assert (jobs.names(), disk.files()) == stored_before
        assert jobs._store.children("specs") == [name for name in stored_before[0] if not jobs.read(name)[0].clean]
    assert run_stagecrew("jobs", **places).returncode == 0
    assert run_stagecrew("leader", **places).returncode == 0
    assert run_stagecrew("result", "late", **places).returncode == 1


@BROKEN_STORAGE
def test_running_jobs_wait_until_the_storage_is_repaired(drivers, disk, break_storage, repair_storage, message):
    """Jobs that end a step, commit or end while the storage is broken wait until it is repaired.

    Then they continue in their first run.
    """
    (drivers.folder / "out" / "hold-0").touch()
    (drivers.folder / "out" / "hold-stage").touch()
    driver = drivers.start()
    for job, function in {"steps": "steps", "rows": "storing", "ends": "ending"}.items():
        drivers.submit(job_spec(function, drivers, **({"count": 2} if job == "steps" else {})), job)
    for name in ("step-0", "stages", "ending"):
        wait_until(lambda name=name: recorded_lines(drivers, name), f"{name} runs")
    break_storage(disk)
    check_submit_is_refused(drivers, disk, message)
    for name in ("go-0", "go-stage", "go-ending"):
        (drivers.folder / "out" / name).touch()
    for job, log_line in {
        "steps": "is done and waits for its result",
        "rows": "waits for its record",
        "ends": "waits for its result",
    }.items():
        wait_until(
            lambda job=job, log_line=log_line: log_line in drivers.logs(job),
            f"{job} waits for the storage: {drivers.logs(job)}",
        )
    assert (driver.poll(), recorded_lines(drivers, "step-1"), recorded_lines(drivers, "written")) == (None, [], [])
    repair_storage(disk)
    assert [drivers.result(job).value() for job in ("steps", "rows", "ends")] == [10, 100, 7]
    assert [drivers.record(job).run for job in ("steps", "rows", "ends")] == [1, 1, 1]
    assert [recorded_lines(drivers, name) for name in ("step-0", "step-1", "stages")] == [["1"], ["1"], ["1"]]
    drivers.assert_nothing_left("steps", "rows", "ends")


@BROKEN_STORAGE
def test_a_failover_works_while_the_storage_is_broken(drivers, disk, break_storage, repair_storage, message):
    """While the storage is broken, a standby recovers a killed leader's job without repeating finished steps.

    A cancelled job ends when the storage is repaired.
    """
    (drivers.folder / "out" / "hold-1").touch()
    drivers.start()
    leader = drivers.leader()
    drivers.start()
    drivers.submit(job_spec("steps", drivers, count=3), "steps")
    drivers.submit(job_spec("ending", drivers), "ends")
    wait_until(lambda: recorded_lines(drivers, "step-1") and recorded_lines(drivers, "ending"), "the jobs run")
    break_storage(disk)
    drivers.kill(leader)
    wait_until(lambda: len(recorded_lines(drivers, "step-1")) == 2, "the interrupted step runs again")
    with drivers.jobs() as jobs:
        jobs.cancel("ends")
    (drivers.folder / "out" / "go-1").touch()
    for job in ("steps", "ends"):
        wait_until(
            lambda job=job: "waits for its result" in drivers.logs(job),
            f"{job} waits for the storage: {drivers.logs(job)}",
        )
    check_submit_is_refused(drivers, disk, message)
    repair_storage(disk)
    assert drivers.result("steps").value() == 30
    assert drivers.result("ends").state == "cancelled"
    assert [recorded_lines(drivers, f"step-{number}") for number in range(3)] == [["1"], ["1", "2"], ["2"]]
    assert drivers.record("steps").run == 2
    drivers.assert_nothing_left("steps", "ends")


def test_jobs_wait_when_store_and_storage_share_a_full_disk(tmp_path, disk):
    """If the store and the storage share a disk that is full for some seconds, the leader keeps leading.

    `submit` fails with one line, and jobs continue in their first run when there is room again.
    """
    with campaigning_drivers(f"sqlite://{disk.folder}/jobs.db", tmp_path) as drivers:
        (drivers.folder / "out" / "hold-0").touch()
        driver = drivers.start()
        drivers.submit(job_spec("steps", drivers, count=2), "steps")
        drivers.submit(job_spec("ending", drivers), "ends")
        wait_until(lambda: recorded_lines(drivers, "step-0") and recorded_lines(drivers, "ending"), "the jobs run")
        disk.fill()
        (drivers.folder / "ha_jobs.py").write_text(MODULE)
        places = {"STAGECREW_STORE": drivers.store, "STAGECREW_STATE": str(drivers.state)}
        submitted = run_stagecrew("submit", "--arg", "folder=/", "ha_jobs:ending", cwd=drivers.folder, **places)
        assert (submitted.returncode, submitted.stdout) == (1, "")
        [line] = submitted.stderr.splitlines()
        assert "no room" in line
        for name in ("go-0", "go-ending"):
            (drivers.folder / "out" / name).touch()
        for job in ("steps", "ends"):
            wait_until(
                lambda job=job: drivers.logs(job).count("is done and waits ") > 2, f"{job} waits: {drivers.logs(job)}"
            )
        assert driver.poll() is None
        disk.make_room()
        assert [drivers.result(job).value() for job in ("steps", "ends")] == [10, 7]
        assert [drivers.record(job).run for job in ("steps", "ends")] == [1, 1]
        with drivers.jobs() as jobs:
            assert (jobs.leader().term, sorted(jobs.names())) == (1, ["ends", "steps"])
