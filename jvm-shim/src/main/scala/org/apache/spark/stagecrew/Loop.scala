package org.apache.spark.stagecrew

import java.util.concurrent._
import java.util.concurrent.atomic.AtomicBoolean

/** A single thread that runs calls one after another. Calls that are scheduled after its end are dropped. */
trait Loop {
  def inLoop(f: => Unit): Unit
  def schedule(ms: Long)(f: => Unit): Unit
}

/** A `Loop` on a thread with this name. A failed call is logged, and does not end the loop. */
private[stagecrew] abstract class ThreadLoop(name: String) extends Loop {
  protected val loop = Executors.newSingleThreadScheduledExecutor(executor.ExecutorCrew.daemon(name))

  override def inLoop(f: => Unit): Unit = schedule(0)(f)

  override def schedule(ms: Long)(f: => Unit): Unit =
    try { loop.schedule((() => Log.contained(s"a call in loop $name")(f)): Runnable, ms, TimeUnit.MILLISECONDS); () }
    catch { case _: RejectedExecutionException => () }

  /** Runs a call repeatedly, also after a fatal error such as OutOfMemoryError. */
  protected def every(ms: Long)(action: String)(f: => Unit): Unit =
    loop.scheduleWithFixedDelay(() => try Log.contained(action)(f) catch { case error: Throwable =>
      try Log.log.error(s"$action failed", error) catch { case _: Throwable => () } }, ms, ms, TimeUnit.MILLISECONDS)

  private val ending = new AtomicBoolean(false)
  private val ended = new CountDownLatch(1)

  /** Runs the shutdown of the loop's owner once. A second call waits for the first, within the timeout. */
  protected def endOnce(timeoutMs: Long)(f: => Unit): Unit =
    if (ending.compareAndSet(false, true)) try f finally ended.countDown()
    else ended.await(timeoutMs, TimeUnit.MILLISECONDS)
}
