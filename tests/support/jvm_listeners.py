"""Compiles JVM listeners into a jar, as a user would."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pyspark

import stagecrew

#: A JVM listener that appends a line for each call to the file named in `spark.test.journal`. The placeholders are the
#: name of the class and an additional statement for its `open`.
JAVA = """
public class %s implements stagecrew.TopologyListener {
  private void log(String event, stagecrew.TopologyContext context) throws Exception {
    String line = "{\\"event\\": \\"" + event + "\\", \\"topology\\": \\"" + context.topology() + "\\", \\"executor\\": \\""
      + context.executor() + "\\", \\"thread\\": \\"" + Thread.currentThread().getName() + "\\"}\\n";
    java.nio.file.Files.writeString(java.nio.file.Path.of(context.configuration().get("spark.test.journal")), line,
      java.nio.file.StandardOpenOption.CREATE, java.nio.file.StandardOpenOption.APPEND);
  }
  @Override public void open(stagecrew.TopologyContext context) throws Exception { log("open", context); %s }
  @Override public void close(stagecrew.TopologyContext context) throws Exception { log("close", context); }
  @Override public AutoCloseable decorate(stagecrew.TopologyContext context, org.apache.spark.TaskContext task) throws Exception {
    log("enter", context);
    return () -> log("leave", context);
  }
}
"""


def compile_jvm_listeners(folder: Path) -> str:
    """Compiles a jar with two JVM listeners, `Noting` and `Failing`, and returns its path. `Failing.open` throws."""
    sources = []
    for name, statement in (("Noting", ""), ("Failing", 'throw new IllegalStateException("no such pool");')):
        source = folder / f"{name}.java"
        source.write_text(JAVA % (name, statement))
        sources.append(str(source))
    classpath = f"{stagecrew.jar_path()}:{Path(pyspark.__file__).parent}/jars/*"
    subprocess.run(["javac", "-cp", classpath, "-d", str(folder / "classes"), *sources], check=True)
    jar = folder / "listeners.jar"
    subprocess.run(["jar", "cf", str(jar), "-C", str(folder / "classes"), "."], check=True)
    return str(jar)
