package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import ui._

/** The content of a SAMPLES frame of a Python process: itself and its children, one sample each, without times. */
final case class Samples(processes: Vector[ProcessView])

/**
 * The samples of this executor's Python processes, until the driver has them. Each daemon samples its workers, and the
 * agent samples itself (python/stagecrew/worker/sampling.py). Thread-safe.
 */
private[stagecrew] final class SampleLog(
    executor: String, host: () => String, wall: () => Long = () => System.currentTimeMillis()) {
  private val book = new ProcessBook
  private val current = mutable.LinkedHashMap.empty[AnyRef, Vector[ProcessView]] // by source
  private var time, reported = 0L

  /** Takes over the samples of a source. Processes that it sampled before and does not sample any more have ended. */
  def record(source: AnyRef, sampled: Vector[ProcessView]): Unit = synchronized {
    time = math.max(wall(), time + 1) // strictly increasing: reports use it to find the samples that the driver has
    val here = sampled.map(one => one.copy(executor = executor, host = host(),
      samples = one.samples.map(_.copy(time = time))))
    val ended = current.getOrElse(source, Vector.empty).filterNot(one => here.exists(_.key == one.key))
    current(source) = here
    book.record(here ++ ended.map(_.copy(ended = time)))
  }

  /** A source is gone, and its processes with it. */
  def gone(source: AnyRef): Unit = synchronized {
    if (current.contains(source)) record(source, Vector.empty)
    current -= source
  }

  /** The processes that run, with their last sample. */
  def now: Seq[ProcessView] = synchronized(current.values.flatten.toSeq)

  /** The content of a report, and what to do when the report has arrived; None if there is nothing new. */
  def untold: Option[(Vector[ProcessView], () => Unit)] = synchronized {
    val (since, until) = (reported, time)
    val news = book.views.map(one => one.copy(samples = one.samples.filter(_.time > since)))
      .filter(one => one.samples.nonEmpty || one.ended > since)
    Option.when(news.nonEmpty)(news -> (() => synchronized { reported = math.max(reported, until) }))
  }
}

/** Python processes with their last samples: those that run, and the last ones that ended. Not thread-safe. */
private[stagecrew] final class ProcessBook(ended: Int = ProcessBook.Ended) {
  private val running = mutable.LinkedHashMap.empty[(String, Long, Long), ProcessView]
  private val past = new Bounded[(String, Long, Long), ProcessView](ended)()

  /** Takes over newer samples and ends. Repeated ones change nothing. */
  def record(news: Iterable[ProcessView]): Unit = news.foreach { one =>
    val before = running.get(one.key).orElse(past.get(one.key)).getOrElse(one.copy(samples = Vector.empty))
    val last = before.samples.lastOption.fold(0L)(_.time)
    val samples = (before.samples ++ one.samples.filter(_.time > last)).takeRight(ProcessBook.Samples)
    val now = one.copy(samples = samples, ended = math.max(one.ended, before.ended))
    if (now.ended == 0) running(one.key) = now
    else {
      running -= one.key
      past(one.key) = now
    }
  }

  /** An executor is gone, and its processes with it. */
  def lost(executor: String, now: Long): Unit =
    record(running.values.filter(_.executor == executor).toSeq.map(_.copy(ended = now)))

  def views: Vector[ProcessView] = (past.values ++ running.values).toVector
}

private[stagecrew] object ProcessBook {
  /** How many samples of a process are kept, and how many processes that have ended. */
  val Samples = 60
  val Ended = 200
}
