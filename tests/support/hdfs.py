"""An HDFS for tests: a real namenode and a real datanode in one process."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
import pyspark

from support.processes import terminate
from support.waiting import eventually

__all__ = ["HADOOP", "hdfs"]

(_CLIENT,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
#: The jars of Hadoop's mini clusters, in the version of PySpark's own Hadoop client.
HADOOP = Path(__file__).parents[2] / "build" / "hadoop" / _CLIENT.stem.removeprefix("hadoop-client-api-")


@contextlib.contextmanager
def hdfs(folder: Path) -> Iterator[pyarrow.fs.FileSystem]:
    """Starts HDFS, and yields an Arrow file system that uses WebHDFS, because Arrow lacks the native HDFS library."""
    from fsspec.implementations.webhdfs import WebHDFS

    assert HADOOP.is_dir(), "Hadoop's mini cluster is missing: run `build/sbt shim/hadoopJars`"
    details, settings = folder / "details.json", folder / "settings.xml"
    classpath = f"{HADOOP}/*:{Path(pyspark.__file__).parent}/jars/*"
    options = ["-Xmx300m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
    command = ["java", *options, "-cp", classpath, "org.apache.hadoop.test.MiniDFSClusterManager", "-format",
               "-writeConfig", str(settings), "-writeDetails", str(details), "-D", f"hdfs.minidfs.basedir={folder}/data",
               "-D", "dfs.datanode.fsdatasetcache.max.threads.per.volume=1"]  # fmt: skip
    with open(folder / "hdfs.log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:

        def is_up() -> bool:
            assert process.poll() is None, (folder / "hdfs.log").read_text()[-3000:]
            return details.exists() and bool(json.loads(details.read_text() or "{}"))

        eventually(is_up, 90, f"the namenode is up; see {folder}/hdfs.log")
        address = re.search(r"<name>dfs.namenode.http-address</name><value>([^<]+):(\d+)</value>", settings.read_text())
        assert address is not None
        web = WebHDFS(address[1], int(address[2]), user="root", skip_instance_cache=True)
        try:
            yield pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(web))
        finally:
            gc.collect()  # garbage collection writes files that were not closed; for this, the server must still run
            web.session.close()
    finally:
        terminate(process)
