package org.apache.spark.stagecrew
package executor

import org.apache.spark.TaskContext
import driver._, spark._, wire._

/** Ends attempts that the executor cannot run, without running their body, and reports the cause to the driver. */
private[stagecrew] object TaskRejection {
  private val BackOffMs = 100L
  private val MaxBackOffMs = 5000L

  /** Called in the task's thread. Spark does not count such attempts and would start 100 of them per second. So each
    * attempt waits, longer after each failure in a row, and the driver counts them (`BusListener.openFailed`). */
  def reject(
      task: TaskContext, executor: String, topology: String, listener: String, text: String, failuresInARow: Int)(
      report: Array[Byte] => Unit): Unit = {
    SparkInternals.markInterrupted(task, text)
    Log.log.warn(s"attempt ${task.taskAttemptId()} of stage ${task.stageId()} does not run: $text")
    Log.contained("reporting a rejected attempt to the driver")(report(Frames.encode("OPEN_FAILED", executor, topology,
      listener, task.stageId().toLong, task.partitionId().toLong, task.taskAttemptId(), text)))
    try Thread.sleep(math.min(BackOffMs << (failuresInARow - 1).max(0).min(5), MaxBackOffMs)) catch {
      case _: InterruptedException => Thread.currentThread().interrupt()
    }
  }

  /** The stack trace. If the exception's own methods throw, only its class. */
  def trace(error: Throwable): String = safeText(error) {
    val out = new java.io.StringWriter
    error.printStackTrace(new java.io.PrintWriter(out))
    out.toString
  }

  /** The class and the message. */
  def text(error: Throwable): String = safeText(error)(error.toString)

  // A user's exception class may override the methods that `f` calls, and the overrides may throw.
  private def safeText(error: Throwable)(f: => String): String = try f catch {
    case other: Throwable => s"${error.getClass.getName} (its text cannot be shown: ${other.getClass.getName})"
  }
}

/** Rejects all tasks of an executor on which the plugin could not start: no task runs without its listeners. */
private[stagecrew] final class NotRunning(executor: String, version: String, cause: Throwable) {
  private lazy val driver = Rpc.driver(DriverCrew.EndpointName)
  private val rejections = new java.util.concurrent.atomic.AtomicInteger
  private val text =
    s"stagecrew $version could not start on executor $executor, so no task runs there: fix the cause, " +
    s"or remove stagecrew.StagecrewPlugin from spark.plugins\n${TaskRejection.trace(cause)}"

  Log.log.error(text)

  def taskStarted(task: TaskContext): Unit =
    TaskRejection.reject(
      task, executor, Description.Application, "", text, rejections.incrementAndGet())(driver.send(_))
}
