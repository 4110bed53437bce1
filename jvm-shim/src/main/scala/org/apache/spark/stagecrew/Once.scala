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
  private val known = new ConcurrentHashMap[String, CompletableFuture[T]]()

  /** The value of a key. Throws what making it threw. */
  def of(key: String)(make: => T): T = {
    val mine = new CompletableFuture[T]()
    val shared = Option(known.putIfAbsent(key, mine)).getOrElse {
      try pool.execute(() => complete(key, mine)(make))
        catch { case error: Throwable => known.remove(key, mine); throw error }
      mine
    }
    try shared.get() catch { case failed: ExecutionException => throw failed.getCause }
  }

  private def complete(key: String, mine: CompletableFuture[T])(make: => T): Unit = try mine.complete(make) catch {
    case error: Throwable =>
      known.remove(key, mine)
      mine.completeExceptionally(error)
  }

  /** The value, if it has been made. */
  def now(key: String): Option[T] =
    Option(known.get(key)).filter(value => value.isDone && !value.isCompletedExceptionally).map(_.get())

  /** The value that is being made. */
  def pending(key: String): Option[CompletableFuture[T]] = Option(known.get(key)).filterNot(_.isDone)

  def keys: Seq[String] = known.keySet.asScala.toSeq

  def forget(key: String): Unit = known.remove(key)

  /** Forgets the values that have been made and satisfy a condition. */
  def forgetAll(which: T => Boolean): Unit = keys.filter(now(_).exists(which)).foreach(forget)
}
