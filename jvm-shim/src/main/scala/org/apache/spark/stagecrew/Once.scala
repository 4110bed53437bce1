package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutionException, Executor}
import scala.jdk.CollectionConverters._

/**
 * Computes values by key, each only once: the first caller starts the computation, and all others wait for the same
 * outcome. A failure is not stored, so the next caller tries again.
 *
 * Values are computed in `pool`, not in the caller's thread. If the caller is a task that is killed, the others still
 * get the value.
 */
private[stagecrew] final class Once[T](pool: Executor) {
  private val values = new ConcurrentHashMap[String, CompletableFuture[T]]()

  /** The value of a key. Throws the exception of the computation, or of the pool if the computation could not start. */
  def of(key: String)(compute: => T): T = {
    val created = new CompletableFuture[T]()
    val shared = Option(values.putIfAbsent(key, created)).getOrElse {
      try pool.execute(() => complete(key, created)(compute))
        catch { case error: Throwable => complete(key, created)(throw error) }
      created
    }
    try shared.get() catch { case failed: ExecutionException => throw failed.getCause }
  }

  private def complete(key: String, value: CompletableFuture[T])(f: => T): Unit = try value.complete(f) catch {
    case error: Throwable =>
      values.remove(key, value)
      value.completeExceptionally(error)
  }

  /** The value, if it has been computed. */
  def computed(key: String): Option[T] =
    Option(values.get(key)).filter(value => value.isDone && !value.isCompletedExceptionally).map(_.get())

  /** The value, if it is being computed. */
  def pending(key: String): Option[CompletableFuture[T]] = Option(values.get(key)).filterNot(_.isDone)

  def keys: Seq[String] = values.keySet.asScala.toSeq

  def forget(key: String): Unit = values.remove(key)

  /** Forgets the computed values that satisfy a condition. */
  def forgetAll(condition: T => Boolean): Unit = keys.filter(computed(_).exists(condition)).foreach(forget)
}
