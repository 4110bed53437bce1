package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import ui._

/** The content of a SAMPLES frame: the Python process that sent it, and its children, each with one sample and without
  * times. */
final case class Samples(processes: Vector[ProcessView])

/**
 * The samples of this executor's Python processes that the driver does not have yet. Each daemon samples its workers,
 * and the agent samples itself (python/stagecrew/worker/sampling.py). `taskOf` returns the topology and the name of the
 * task that a process is running. Thread-safe.
 */
private[stagecrew] final class SampleLog(
    executor: String, host: () => String, clock: () => Long = () => System.currentTimeMillis(),
    taskOf: Long => Option[(String, String)] = _ => None) {
  private val book = new ProcessBook
  private val current = mutable.LinkedHashMap.empty[AnyRef, Vector[ProcessView]] // by source
  private var time, reported = 0L

  /** Records the samples of a source (a link). Processes that the source sampled last time, but not this time, have
    * ended. */
  def record(source: AnyRef, sampled: Vector[ProcessView]): Unit = synchronized {
    time = math.max(clock(), time + 1) // strictly increasing: reports use it to find the samples that the driver has
    val running = sampled.map { process =>
      val (topology, task) = taskOf(process.pid).getOrElse(("", ""))
      process.copy(executor = executor, host = host(), samples = process.samples.map(_.copy(time = time)),
        topology = topology, task = task)
    }
    val ended = current.getOrElse(source, Vector.empty).filterNot(process => running.exists(_.key == process.key))
    current(source) = running
    book.record(running ++ ended.map(_.copy(ended = time)))
  }

  /** A source has disconnected: its processes have ended. */
  def disconnected(source: AnyRef): Unit = synchronized {
    if (current.contains(source)) record(source, Vector.empty)
    current -= source
  }

  /** The running processes, each with its last sample. */
  def now: Seq[ProcessView] = synchronized(current.values.flatten.toSeq)

  /** The processes for the next report, and a callback for its delivery. None if nothing changed. */
  def unreported: Option[(Vector[ProcessView], () => Unit)] = synchronized {
    val (since, until) = (reported, time)
    val updates = book.views.map(process => process.copy(samples = process.samples.filter(_.time > since)))
      .filter(process => process.samples.nonEmpty || process.ended > since)
    Option.when(updates.nonEmpty)(updates -> (() => synchronized { reported = math.max(reported, until) }))
  }
}

/** Running Python processes, and those that ended last, each with its last samples. Not thread-safe. */
private[stagecrew] final class ProcessBook(maxEnded: Int = ProcessBook.MaxEnded) {
  private val running = mutable.LinkedHashMap.empty[(String, Long, Long), ProcessView]
  private val past = new Bounded[(String, Long, Long), ProcessView](maxEnded)()

  /** Records new samples, and which processes have ended. Repeated updates change nothing. */
  def record(updates: Iterable[ProcessView]): Unit = updates.foreach { process =>
    val before = running.get(process.key).orElse(past.get(process.key)).getOrElse(process.copy(samples = Vector.empty))
    val last = before.samples.lastOption.fold(0L)(_.time)
    val samples = (before.samples ++ process.samples.filter(_.time > last)).takeRight(ProcessBook.MaxSamples)
    val now = process.copy(samples = samples, ended = math.max(process.ended, before.ended))
    if (now.ended == 0) running(process.key) = now
    else {
      running -= process.key
      past(process.key) = now
    }
  }

  /** An executor is lost: its processes have ended. */
  def lost(executor: String, now: Long): Unit =
    record(running.values.filter(_.executor == executor).toSeq.map(_.copy(ended = now)))

  def views: Vector[ProcessView] = (past.values ++ running.values).toVector
}

private[stagecrew] object ProcessBook {
  /** How many samples of each process are kept, and how many ended processes. */
  val MaxSamples = 60
  val MaxEnded = 200
}
