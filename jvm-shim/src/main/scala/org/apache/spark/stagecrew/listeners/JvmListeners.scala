package org.apache.spark.stagecrew
package listeners

import java.util.{Map => JMap}
import java.util.concurrent._
import org.apache.spark.TaskContext
import stagecrew.{TopologyContext, TopologyListener}
import executor._, ui._, wire._

/** The context that JVM listeners receive. */
final case class ListenerContext(
    application: String, topology: String, topologyId: String, executor: String, host: String,
    configuration: JMap[String, String]) extends TopologyContext

/** A hook of a JVM listener failed or timed out, or the listener could not be created. */
final class HookFailedException(val listener: String, message: String, cause: Throwable)
  extends Exception(message, cause)

/** The JVM listeners of one topology on one executor. They open in order. `open` and `close` run in `pool`, with a
  * timeout. */
final class JvmListeners(
    entries: Vector[Entry], context: ListenerContext, settings: Settings, ledger: Ledger, pool: ExecutorService) {

  private var opened = Vector.empty[(Entry, TopologyListener)]

  /** Opens all listeners. If one fails, closes those that were opened, and throws `HookFailedException`. A listener's
    * constructor has the same timeout as its `open`. */
  def open(): Unit = try {
    entries.foreach { entry =>
      val listener = within(entry, "the constructor", settings.openTimeoutMs,
        ". Its class must be in a jar of the executors, with a public constructor without parameters")(instance(entry))
      count(entry)(c => c.copy(opens = c.opens + 1))
      opened = opened :+ (entry -> listener)
      callHook(entry, "open", settings.openTimeoutMs)(listener.open(context))
    }
  } catch {
    case failed: HookFailedException => // or the listener could not be created: the previous ones are open
      close()
      throw failed
  }

  /** Calls `decorate` of all listeners. Returns their scopes, innermost first. */
  def decorate(task: TaskContext): List[(Entry, AutoCloseable)] = {
    var scopes = List.empty[(Entry, AutoCloseable)]
    opened.foreach { case (entry, listener) =>
      try Option(listener.decorate(context, task)).foreach(scope => scopes = (entry -> scope) :: scopes)
      catch {
        case error: Throwable =>
          leave(scopes)
          recordFailure(entry, error)
          throw new HookFailedException(entry.name,
            s"decorate of ${labelOf(entry)} failed: ${TaskRejection.text(error)}", error)
      }
    }
    scopes
  }

  /** Closes the scopes that `decorate` returned. A failure does not stop the others. */
  def leave(scopes: List[(Entry, AutoCloseable)]): Unit = scopes.foreach { case (entry, scope) =>
    try scope.close() catch {
      case error: Throwable =>
        recordFailure(entry, error)
        Log.log.warn(s"closing the decoration of ${labelOf(entry)} failed", error)
    }
  }

  /** Closes the open listeners in reverse order. A failure does not stop the others. */
  def close(): Unit = {
    val closing = opened.reverse
    opened = Vector.empty
    closing.foreach { case (entry, listener) =>
      try callHook(entry, "close", settings.closeTimeoutMs)(listener.close(context))
      catch { case error: HookFailedException => Log.log.warn(error.getMessage, error.getCause) }
      finally count(entry)(c => c.copy(closes = c.closes + 1)) // the listener counts as open until its close returns
    }
  }

  private def instance(entry: Entry): TopologyListener = {
    val loader = Option(Thread.currentThread.getContextClassLoader).getOrElse(getClass.getClassLoader)
    Class.forName(entry.target, true, loader).getConstructor().newInstance() match {
      case listener: TopologyListener => listener
      case _ => throw new ClassCastException(s"${entry.target} does not implement stagecrew.TopologyListener")
    }
  }

  private def callHook(entry: Entry, hook: String, timeoutMs: Long)(f: => Unit): Unit = {
    val started = System.nanoTime()
    var failed = true
    try { within(entry, hook, timeoutMs)(f); failed = false } finally {
      val micros = (System.nanoTime() - started) / 1000
      ledger.span(context.topologyId, hook, entry.name, micros, failed)
      count(entry)(_.withDuration(hook, micros))
    }
  }

  /** Runs a call in the pool. Records its failure, and throws `HookFailedException`. */
  private def within[T](entry: Entry, hook: String, timeoutMs: Long, hint: String = "")(f: => T): T = {
    var running = Option.empty[Future[T]]
    try {
      running = Some(pool.submit((() => f): Callable[T]))
      running.get.get(timeoutMs, TimeUnit.MILLISECONDS)
    } catch {
      case error: Throwable =>
        running.foreach(_.cancel(true))
        val (message, cause) = error match {
          case failed: ExecutionException => s"failed: ${TaskRejection.text(failed.getCause)}$hint" -> failed.getCause
          case _: TimeoutException => s"took longer than $timeoutMs ms and was interrupted" -> error
          case _: InterruptedException => "was interrupted" -> error
          case _ => s"could not start: ${TaskRejection.text(error)}" -> error
        }
        recordFailure(entry, cause)
        throw new HookFailedException(entry.name, s"$hook of ${labelOf(entry)} $message", cause)
    }
  }

  private def recordFailure(entry: Entry, error: Throwable): Unit =
    count(entry)(_.withFailure(Show.first(TaskRejection.text(error), ListenerCounts.ErrorLength), ""))

  private def count(entry: Entry)(f: ListenerCounts => ListenerCounts): Unit =
    ledger.listener(context.topologyId, entry.index, entry.name, "jvm")(f)

  private def labelOf(entry: Entry): String =
    s"listener ${entry.name} (topology ${context.topology}, executor ${context.executor}, host ${context.host})"
}
