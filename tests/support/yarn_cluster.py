"""A YARN cluster for tests: a real resource manager and a real node manager in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.hdfs import HADOOP
from support.processes import free_port
from support.sessions import QUICK_JVM_OPTIONS
from support.spark_home import spark_home
from support.waiting import eventually

__all__ = ["YarnCluster", "yarn_cluster"]

SOURCE = Path(__file__).with_name("MiniYarn.java")


@dataclasses.dataclass(frozen=True)
class YarnCluster:
    """A running cluster. `folder` is where its containers keep their files."""

    folder: Path
    shuffle_port: int

    @property
    def shuffle_files(self) -> list[Path]:
        """The shuffle files that the containers wrote and that still exist."""
        return [path for path in self.folder.rglob("shuffle_*_*") if path.suffix in (".data", ".index")]

    @property
    def containers(self) -> str:
        """The output of the containers."""
        logs = sorted(self.folder.rglob("container_*/std*"))
        return "\n".join(f"{log}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def submit(
        self, *arguments: str, deploy_mode: str, python: str = sys.executable, code: int = 0, **settings: str
    ) -> str:
        """Runs spark-submit, checks its exit code, and returns its output."""
        home = spark_home()
        settings = {
            "spark.yarn.jars": f"local:{home}/jars/*",
            "spark.executor.instances": "2",
            "spark.executor.cores": "2",
            "spark.executor.memory": "600m",
            "spark.driver.memory": "600m",
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "4",
            "spark.executor.extraJavaOptions": QUICK_JVM_OPTIONS,
            "spark.driver.extraJavaOptions": QUICK_JVM_OPTIONS,
            "spark.yarn.submit.waitAppCompletion": "true",
            "spark.yarn.report.interval": "200ms",
            **settings,
        }
        options = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
        command = [f"{home}/bin/spark-submit", "--master", "yarn", "--deploy-mode", deploy_mode, *options, *arguments]
        removed = ("PYTHONPATH", "YARN_CONF_DIR", "SPARK_LOCAL_IP")
        environment = {key: value for key, value in os.environ.items() if key not in removed}
        environment |= {"HADOOP_CONF_DIR": str(self.folder / "conf"), "SPARK_HOME": home, "PYSPARK_PYTHON": python}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=280,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == code, f"{printed[-6000:]}\n{self.containers[-12000:]}"
        return printed


@contextlib.contextmanager
def yarn_cluster(folder: Path) -> Iterator[YarnCluster]:
    """Runs a cluster, whose node has Spark's shuffle service."""
    assert HADOOP.is_dir(), "Hadoop's mini cluster is missing: run `build/sbt shim/hadoopJars`"
    port = free_port()
    classpath = os.pathsep.join([str(folder / "classes"), f"{HADOOP}/*", f"{spark_home()}/jars/*"])
    subprocess.run(["javac", "-cp", classpath, "-d", str(folder / "classes"), str(SOURCE)], check=True)
    opened = ("--add-opens", "java.base/java.lang=ALL-UNNAMED")  # for Hadoop 3.4
    options = ("-Xmx400m", *QUICK_JVM_OPTIONS.split(), *opened)
    command = ["java", *options, "-cp", classpath, "MiniYarn", str(folder), str(port)]
    log = folder / "yarn.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=output, stderr=output)
    assert process.stdin is not None
    try:

        def is_up() -> bool:
            assert process.poll() is None, log.read_text()[-3000:]
            return (folder / "conf" / "yarn-site.xml").exists()

        eventually(is_up, 90, f"the node manager registers; see {log}")
        yield YarnCluster(folder, port)
    finally:
        process.stdin.close()  # the cluster stops, and ends its containers
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
