package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutionException, Executor}
import scala.jdk.CollectionConverters._

/**
 * Values by key, each made once: the first caller has it made, and all others wait for the same outcome. A failure is
 * forgotten, so that the next caller tries again.
 *
 * Values are made in `pool`, not in the caller's thread: a task that is killed meanwhile must not end the work of the
 * others.
 */
private[stagecrew] final class Once[T](pool: Executor) {
  private val values = new ConcurrentHashMap[String, CompletableFuture[T]]()

  /** The value of a key. Throws what making it threw. */
  def of(key: String)(make: => T): T = {
    val created = new CompletableFuture[T]()
    val shared = Option(values.putIfAbsent(key, created)).getOrElse {
      try pool.execute(() => complete(key, created)(make))
        catch { case error: Throwable => values.remove(key, created); throw error }
      created
    }
    try shared.get() catch { case failed: ExecutionException => throw failed.getCause }
  }

  private def complete(key: String, value: CompletableFuture[T])(make: => T): Unit = try value.complete(make) catch {
    case error: Throwable =>
      values.remove(key, value)
      value.completeExceptionally(error)
  }

  /** The value, if it has been made. */
  def now(key: String): Option[T] =
    Option(values.get(key)).filter(value => value.isDone && !value.isCompletedExceptionally).map(_.get())

  /** The value that is being made. */
  def pending(key: String): Option[CompletableFuture[T]] = Option(values.get(key)).filterNot(_.isDone)

  def keys: Seq[String] = values.keySet.asScala.toSeq

  def forget(key: String): Unit = values.remove(key)

  /** Forgets the values that have been made and satisfy a condition. */
  def forgetAll(condition: T => Boolean): Unit = keys.filter(now(_).exists(condition)).foreach(forget)
}
