package org.apache.spark.stagecrew
package executor

import java.io.File
import java.util.{Map => JMap}

/**
 * The environment that this JVM gives to its Python processes: our jar at the head of the PYTHONPATH, and how they
 * sample themselves.
 *
 * Spark computes the path of a Python daemon from its own files, the environment of the job and this JVM's environment
 * (core/api/python/PythonWorkerFactory.scala). `spark.executorEnv.PYTHONPATH` would replace the value of a Worker, a
 * node or an image, so the executor changes its own environment instead, before its first Python daemon.
 */
private[stagecrew] object PythonPath {
  private val Key = "PYTHONPATH"

  /** Puts the jar first. Returns whether it was not there before. Throws if this JVM does not allow it. */
  def add(jar: String): Boolean = {
    val before = entries
    val absent = !before.contains(jar)
    if (absent) assign(Key, (jar +: before).mkString(File.pathSeparator))
    absent
  }

  def remove(jar: String): Unit = assign(Key, entries.filterNot(_ == jar).mkString(File.pathSeparator))

  private def entries: Seq[String] =
    Option(System.getenv(Key)).toSeq.flatMap(_.split(File.pathSeparator)).filter(_.nonEmpty)

  /** Sets a variable, or removes it if the value is empty. `System.getenv` is an unmodifiable view of a map, which
    * also serves `sys.env` and new processes. Spark starts its JVMs with `java.base/java.util` opened
    * (launcher/JavaModuleOptions.java). */
  def assign(name: String, value: String): Unit = {
    val view = System.getenv()
    val field = view.getClass.getDeclaredField("m")
    field.setAccessible(true)
    val environment = field.get(view).asInstanceOf[JMap[String, String]]
    if (value.isEmpty) environment.remove(name) else environment.put(name, value)
  }
}
