"""Launches the processes of runs through spark-submit, with the files of their jobs."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stagecrew.errors import JobError
from stagecrew.files import quoted
from stagecrew.jar import found_spark_submit
from stagecrew.recovery.driver.process import RunProcess
from stagecrew.recovery.jobs.run_files import FILES, SCRIPT

if TYPE_CHECKING:
    from stagecrew.recovery.jobs.record import Run
    from stagecrew.recovery.jobs.spec import JobSpec

__all__ = ["Launcher"]

_log = logging.getLogger("stagecrew")

_PROPERTIES: Final = "spark.properties"
#: The program that spark-submit runs.
_PROGRAM: Final = str(Path(__file__).parents[1] / "run" / "main.py")


class Launcher:
    """Starts the processes of runs through spark-submit. Each run has a folder with the files of its job.

    So that no secret appears on a command line, a process gets the addresses of the store and the storage in its
    environment, and the job's Spark configuration in a file that only this user can read.
    """

    def __init__(self, store: str, state: str, work: Path) -> None:
        self._environment = {"STAGECREW_STORE": store, "STAGECREW_STATE": state}
        self._work = work
        # Drivers of another store can use the same folder and have a job with the same id.
        self._prefix = f"run-{hashlib.sha256(store.encode()).hexdigest()[:8]}-"
        self._spark_submit = found_spark_submit()

    def prepare(self, spec: JobSpec, job: str) -> Path:
        """Writes the files of a job into a new folder for `start`. Raises `JobError` if they cannot be written."""
        try:
            logs = self._work / quoted(job)
            logs.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=self._prefix, dir=logs))
        except OSError as error:
            raise self._cannot_write(job, error) from error
        try:
            (folder / FILES).mkdir()
            for name, data in spec.files.items():
                (folder / FILES / name).write_bytes(data)
            if spec.script is not None:
                (folder / SCRIPT).mkdir()
                (folder / SCRIPT / spec.target).write_bytes(spec.script)
            descriptor = os.open(folder / _PROPERTIES, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(f"{_escaped(key)}={_escaped(value)}\n" for key, value in _properties(spec).items())
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise self._cannot_write(job, error) from error
            raise
        return folder

    def _cannot_write(self, job: str, error: OSError) -> JobError:
        return JobError(
            f"the files of job {job!r} cannot be written into {self._work} ({error}): check the free space and the "
            "permissions there"
        )

    def start(self, folder: Path, run: Run, term: int, finish: bool) -> RunProcess:
        """Starts a run with the files in `folder`; if `finish`, a process that only finishes the decided commits.

        Raises `JobError` if the process cannot be started.

        Deletes the folders that earlier runs have left. So the store must have recorded this run: then no other run of
        the job is alive, even if this leader was replaced while it prepared the folder.
        """
        for stale in folder.parent.glob(f"{self._prefix}*/"):
            if stale != folder:
                shutil.rmtree(stale, ignore_errors=True)
        arguments = [
            f"--job={run.job}", f"--folder={folder}", f"--run={run.number}", f"--claim={run.claim}", f"--term={term}",
        ]  # fmt: skip
        python = os.environ.get("PYSPARK_PYTHON", sys.executable)
        if finish:
            command = [python, _PROGRAM, *arguments, "--finish"]
        else:
            command = [
                self._spark_submit, "--deploy-mode", "client", "--load-spark-defaults", "--properties-file",
                str(folder / _PROPERTIES),
            ]  # fmt: skip
            if files := sorted((folder / FILES).iterdir()):
                command += ["--py-files", ",".join(map(str, files))]
            command += [_PROGRAM, *arguments]
        log = folder.parent / f"run-{run.number}{'-finish' if finish else ''}.log"
        try:
            with log.open("ab") as output:
                popen = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                    env=os.environ | self._environment | {"PYSPARK_PYTHON": python},
                )  # fmt: skip
        except OSError as error:
            raise JobError(
                f"no process can be started for run {run.number} of job {run.job!r} ({error}): check the limits of "
                f"processes, memory and open files, and that {command[0]} and {log} can be used"
            ) from error
        _log.info(
            "job %r: run %d is starting; its %s is process %d, and its output is in %s",
            run.job, run.number, "Python" if finish else "spark-submit", popen.pid, log,
        )  # fmt: skip
        return RunProcess(run, popen, folder, finish)


def _properties(spec: JobSpec) -> dict[str, str]:
    from stagecrew.jar import spark_conf

    given = {"spark.app.name": spec.name, **spec.conf}
    return given | spark_conf(plugins=given.get("spark.plugins", ""), jars=given.get("spark.jars", ""))


_SPECIAL: Final = {
    "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "=": "\\=", ":": "\\:", "#": "\\#", "!": "\\!", " ": "\\ ",
}  # fmt: skip


def _escaped(text: str) -> str:
    """Escapes a text for a Java properties file."""
    return "".join(
        _SPECIAL.get(char) or (char if " " < char < "\x7f" else "".join(f"\\u{unit:04x}" for unit in _utf16(char)))
        for char in text
    )


def _utf16(char: str) -> Sequence[int]:
    data = char.encode("utf-16-be")
    return [int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2)]
