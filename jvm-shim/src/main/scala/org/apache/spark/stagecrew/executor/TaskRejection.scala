package org.apache.spark.stagecrew
package executor

import org.apache.spark.TaskContext
import driver._, spark._, wire._

/** Ends attempts that the executor cannot run: without their body, and with the cause on the driver. */
private[stagecrew] object TaskRejection {
  private val BackOffMs = 100L
  private val MaxBackOffMs = 5000L

  /** Called in the task's thread. Spark does not count such attempts and would start 100 per second. So each one
    * waits, longer after each failure in a row, and the driver counts them (`BusListener.openFailed`). */
  def refuse(task: TaskContext, executor: String, topology: String, listener: String, text: String, inARow: Int)(
      tell: Array[Byte] => Unit): Unit = {
    SparkInternals.markInterrupted(task, text)
    Log.log.warn(s"attempt ${task.taskAttemptId()} of stage ${task.stageId()} does not run: $text")
    Log.contained("reporting it to the driver")(tell(Frames.encode("OPEN_FAILED", executor, topology, listener,
      task.stageId().toLong, task.partitionId().toLong, task.taskAttemptId(), text)))
    try Thread.sleep(math.min(BackOffMs << (inARow - 1).max(0).min(5), MaxBackOffMs)) catch {
      case _: InterruptedException => Thread.currentThread().interrupt()
    }
  }

  /** The stack trace, or the class of an exception whose own methods fail. */
  def trace(error: Throwable): String = said(error) {
    val out = new java.io.StringWriter
    error.printStackTrace(new java.io.PrintWriter(out))
    out.toString
  }

  /** The class and the message. */
  def text(error: Throwable): String = said(error)(error.toString)

  // Users' exceptions may override the methods that this calls.
  private def said(error: Throwable)(f: => String): String = try f catch {
    case other: Throwable => s"${error.getClass.getName} (its text cannot be shown: ${other.getClass.getName})"
  }
}

/** The plugin could not start on an executor: no task runs there without its listeners. */
private[stagecrew] final class NotRunning(executor: String, version: String, cause: Throwable) {
  private lazy val driver = Rpc.driver(DriverCrew.EndpointName)
  private val refused = new java.util.concurrent.atomic.AtomicInteger
  private val text =
    s"stagecrew $version could not start on executor $executor, so no task runs there: fix the cause, " +
    s"or remove stagecrew.StagecrewPlugin from spark.plugins\n${TaskRejection.trace(cause)}"

  Log.log.error(text)

  def taskStarted(task: TaskContext): Unit =
    TaskRejection.refuse(task, executor, Description.Application, "", text, refused.incrementAndGet())(driver.send(_))
}
