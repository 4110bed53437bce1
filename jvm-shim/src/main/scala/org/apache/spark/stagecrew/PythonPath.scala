package org.apache.spark.stagecrew

import java.io.File
import java.util.{Map => JMap}

/**
 * The PYTHONPATH that this JVM gives to its Python processes: our jar, then the inherited entries.
 *
 * Spark computes the path of a Python daemon from its own files, the environment of the job and this JVM's environment
 * (core/api/python/PythonWorkerFactory.scala). `spark.executorEnv.PYTHONPATH` would replace the value
 * of a Worker, a node or an image, so the executor changes its own environment instead, before its first Python daemon.
 */
private[stagecrew] object PythonPath {
  private val Key = "PYTHONPATH"

  /** Puts the jar first. Returns whether it was not there before. Throws where this JVM does not allow it. */
  def add(jar: String): Boolean = {
    val before = entries
    val absent = !before.contains(jar)
    if (absent) set(jar +: before)
    absent
  }

  def remove(jar: String): Unit = set(entries.filterNot(_ == jar))

  private def entries: Seq[String] = Option(System.getenv(Key)).toSeq.flatMap(_.split(File.pathSeparator)).filter(_.nonEmpty)

  /** `System.getenv` shows an unmodifiable view of a map. Its backing map also serves `sys.env` and new processes. Spark starts
    * its JVMs with `java.base/java.util` opened (launcher/JavaModuleOptions.java). */
  private def set(path: Seq[String]): Unit = {
    val view = System.getenv()
    val field = view.getClass.getDeclaredField("m")
    field.setAccessible(true)
    val environment = field.get(view).asInstanceOf[JMap[String, String]]
    if (path.isEmpty) environment.remove(Key) else environment.put(Key, path.mkString(File.pathSeparator))
    ()
  }
}
