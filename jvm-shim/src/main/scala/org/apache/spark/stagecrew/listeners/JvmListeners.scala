package org.apache.spark.stagecrew
package listeners

import java.util.{Map => JMap}
import java.util.concurrent.{ExecutionException, ExecutorService, TimeUnit, TimeoutException}
import org.apache.spark.TaskContext
import stagecrew.{TopologyContext, TopologyListener}
import executor._, ui._, wire._

/** The context of listeners in the JVM. */
final case class Where(
    application: String, topology: String, topologyId: String, executor: String, host: String,
    configuration: JMap[String, String]) extends TopologyContext

/** A listener could not be opened, or not in time. The cause is the exception of the listener. */
final class OpenFailedException(val listener: String, message: String, cause: Throwable)
  extends Exception(message, cause)

/** The JVM listeners of one topology on one executor, opened in order. Hooks run in `pool`, with a timeout. */
final class JvmListeners(
    entries: Vector[Entry], where: Where, settings: Settings, ledger: Ledger, pool: ExecutorService) {

  private var opened = Vector.empty[(Entry, TopologyListener)]

  /** Opens all of them. If one fails, closes those that were opened, and throws `OpenFailedException`. */
  def open(): Unit = try {
    entries.foreach { entry =>
      val listener = instance(entry)
      count(entry)(c => c.copy(opens = c.opens + 1))
      opened = opened :+ (entry -> listener)
      called(entry, "open", settings.openTimeoutMs)(listener.open(where))
    }
  } catch {
    case failed: OpenFailedException => // also if one cannot be created: those before it are open
      close()
      throw failed
  }

  /** Enters the decorations of a task. Returns their scopes, the innermost first. */
  def decorate(task: TaskContext): List[(Entry, AutoCloseable)] = {
    var scopes = List.empty[(Entry, AutoCloseable)]
    opened.foreach { case (entry, listener) =>
      try Option(listener.decorate(where, task)).foreach(scope => scopes = (entry -> scope) :: scopes)
      catch {
        case error: Throwable =>
          leave(scopes)
          failed(entry, error)
          throw new OpenFailedException(entry.name,
            s"decorate of ${what(entry)} failed: ${TaskRejection.text(error)}", error)
      }
    }
    scopes
  }

  def leave(scopes: List[(Entry, AutoCloseable)]): Unit = scopes.foreach { case (entry, scope) =>
    try scope.close() catch {
      case error: Throwable =>
        failed(entry, error)
        Log.log.warn(s"the end of decorate of ${what(entry)} failed", error)
    }
  }

  /** Closes the open listeners in reverse order. A failure does not stop the others. */
  def close(): Unit = {
    val closing = opened.reverse
    opened = Vector.empty
    closing.foreach { case (entry, listener) =>
      try called(entry, "close", settings.closeTimeoutMs)(listener.close(where))
      catch { case error: OpenFailedException => Log.log.warn(error.getMessage, error.getCause) }
      finally count(entry)(c => c.copy(closes = c.closes + 1)) // after it: until then the listener is open
    }
  }

  private def instance(entry: Entry): TopologyListener = try {
    val loader = Option(Thread.currentThread.getContextClassLoader).getOrElse(getClass.getClassLoader)
    Class.forName(entry.target, true, loader).getConstructor().newInstance() match {
      case listener: TopologyListener => listener
      case _ => throw new ClassCastException(s"${entry.target} does not implement stagecrew.TopologyListener")
    }
  } catch {
    case error: Throwable =>
      failed(entry, error)
      throw new OpenFailedException(entry.name,
        s"${what(entry)} cannot be created: ${TaskRejection.text(error)}. Is the class in a jar that the executors " +
          "have, with a public constructor without parameters?", error)
  }

  private def called(entry: Entry, hook: String, timeoutMs: Long)(f: => Unit): Unit = {
    val started = System.nanoTime()
    def took(failed: Boolean): Unit = {
      val micros = (System.nanoTime() - started) / 1000
      ledger.span(where.topologyId, hook, entry.name, micros, failed)
      count(entry)(_.took(hook, micros))
    }
    val call = pool.submit((() => f): Runnable)
    try {
      call.get(timeoutMs, TimeUnit.MILLISECONDS)
      took(failed = false)
    } catch {
      case error: Throwable =>
        call.cancel(true)
        took(failed = true)
        val (message, cause) = error match {
          case failed: ExecutionException =>
            s"$hook of ${what(entry)} failed: ${TaskRejection.text(failed.getCause)}" -> failed.getCause
          case late: TimeoutException =>
            s"$hook of ${what(entry)} took longer than $timeoutMs ms and was interrupted" -> late
          case other => s"$hook of ${what(entry)} was interrupted" -> other
        }
        failed(entry, cause)
        throw new OpenFailedException(entry.name, message, cause)
    }
  }

  private def failed(entry: Entry, error: Throwable): Unit =
    count(entry)(_.failed(Show.cut(TaskRejection.text(error), ListenerCounts.ErrorLength), ""))

  private def count(entry: Entry)(f: ListenerCounts => ListenerCounts): Unit =
    ledger.listener(where.topologyId, entry.index, entry.name, "jvm")(f)

  private def what(entry: Entry): String =
    s"listener ${entry.name} (topology ${where.topology}, executor ${where.executor}, host ${where.host})"
}
