package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.PythonPath

class PythonPathSuite extends AnyFunSuite {
  private def seen: Seq[Option[String]] =
    Seq(Option(System.getenv("PYTHONPATH")), sys.env.get("PYTHONPATH"),
      Option(new ProcessBuilder().environment.get("PYTHONPATH")))

  private def entries: Seq[String] = seen.head.toSeq.flatMap(_.split(":"))

  test("the jar is first in the path, once, in this JVM and in new processes; removing it restores the path") {
    val before = seen.head
    assert(PythonPath.add("/a/first.jar"))
    assert(!PythonPath.add("/a/first.jar"))
    assert(PythonPath.add("/a/second.jar"))
    assert(entries == Seq("/a/second.jar", "/a/first.jar") ++ before.toSeq.flatMap(_.split(":")) &&
      seen.distinct.size == 1)
    PythonPath.remove("/a/first.jar")
    assert(entries.head == "/a/second.jar" && !entries.contains("/a/first.jar"))
    PythonPath.remove("/a/second.jar")
    assert(seen.forall(_ == before))
  }
}
