package org.apache.spark.stagecrew
package executor

import java.io.File
import java.util.{Map => JMap}

/**
 * Sets environment variables of this JVM for its Python processes: the PYTHONPATH with our jar first, and the setting
 * for samples.
 *
 * Spark builds the PYTHONPATH of a Python daemon from its own files, the environment of the job and the environment of
 * this JVM (core/api/python/PythonWorkerFactory.scala). `spark.executorEnv.PYTHONPATH` would replace the PYTHONPATH of
 * a Worker, a node or an image. So the executor changes its own environment before it starts its first Python daemon.
 */
private[stagecrew] object PythonPath {
  private val Key = "PYTHONPATH"

  /** Puts the jar first, unless the path contains it. Returns whether it was added. Throws if the JVM forbids it. */
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
