package org.apache.spark.stagecrew
package executor

import scala.collection.immutable.VectorMap
import scala.collection.mutable
import ui._

/**
 * The counts of one listener of a topology on one executor.
 *
 * @param opens attempted ones, as `closes`
 * @param failures of open, close or decorate
 * @param lost how often it was opened in a process that ended without closing it
 * @param lastErrorLine the line that says what happened, as Python finds it
 */
final case class ListenerCounts(
    index: Int, name: String, scope: String, opens: Long = 0, closes: Long = 0, failures: Long = 0, lost: Long = 0,
    openMicros: Long = 0, closeMicros: Long = 0, lastError: String = "", lastErrorLine: String = "") {

  def stillOpen: Long = opens - closes - lost

  /** Adds the duration of an open or a close, whether it failed or not. */
  private[stagecrew] def took(hook: String, micros: Long): ListenerCounts = hook match {
    case "open" => copy(openMicros = openMicros + micros)
    case "close" => copy(closeMicros = closeMicros + micros)
    case _ => this
  }

  def +(other: ListenerCounts): ListenerCounts = copy(
    opens = opens + other.opens, closes = closes + other.closes, failures = failures + other.failures,
    lost = lost + other.lost, openMicros = openMicros + other.openMicros, closeMicros = closeMicros + other.closeMicros,
    lastError = if (other.lastError.nonEmpty) other.lastError else lastError,
    lastErrorLine = if (other.lastError.nonEmpty) other.lastErrorLine else lastErrorLine)

  private[stagecrew] def failed(error: String, line: String): ListenerCounts =
    copy(failures = failures + 1, lastError = error, lastErrorLine = line)
}

object ListenerCounts {
  /** The maximum length of an error's text, as in Python (ERROR_LENGTH of python/stagecrew/worker/hooks.py). */
  val ErrorLength = 8000
}

/** Sums over listeners and released partitions. They never decrease: a topology that is forgotten stays in them. */
final case class Totals(
    opens: Long = 0, closes: Long = 0, failures: Long = 0, lost: Long = 0,
    openMicros: Long = 0, closeMicros: Long = 0, released: Long = 0, releasedBytes: Long = 0) {
  def +(other: Totals): Totals = combined(other)(_ + _)

  /** The larger of each sum: none of them decreases. */
  private[stagecrew] def max(other: Totals): Totals = combined(other)(math.max)

  private def combined(other: Totals)(f: (Long, Long) => Long): Totals = Totals(
    f(opens, other.opens), f(closes, other.closes), f(failures, other.failures), f(lost, other.lost),
    f(openMicros, other.openMicros), f(closeMicros, other.closeMicros), f(released, other.released),
    f(releasedBytes, other.releasedBytes))
}

/** The partitions of a topology on an executor: those that are stored now, those that are known to be deleted
  * (`released`), and those that could not be deleted (`releaseFailures`). */
final case class PartitionCounts(
    inProgress: Long = 0, outputs: Long = 0, outputBytes: Long = 0, blocks: Long = 0, blockBytes: Long = 0,
    released: Long = 0, releasedBytes: Long = 0, releaseFailures: Long = 0) {

  def +(other: PartitionCounts): PartitionCounts = PartitionCounts(
    inProgress + other.inProgress, outputs + other.outputs, outputBytes + other.outputBytes, blocks + other.blocks,
    blockBytes + other.blockBytes, released + other.released, releasedBytes + other.releasedBytes,
    releaseFailures + other.releaseFailures)

  /** These releases, with what `now` stores. */
  def storing(now: PartitionCounts): PartitionCounts =
    now.copy(released = released, releasedBytes = releasedBytes, releaseFailures = releaseFailures)
}

/**
 * The counts of one topology on one executor.
 *
 * @param processes Python processes that opened a listener
 * @param lostProcesses those of them that ended before they closed it
 * @param deferred the ids of processes that close after their current task
 */
final case class ExecutorCounts(
    listeners: Vector[ListenerCounts] = Vector.empty, processes: Long = 0, lostProcesses: Long = 0,
    deferred: Set[String] = Set.empty, partitions: PartitionCounts = PartitionCounts()) {

  def totals: Totals =
    listeners.iterator.map(c => Totals(c.opens, c.closes, c.failures, c.lost, c.openMicros, c.closeMicros))
      .foldLeft(Totals(released = partitions.released, releasedBytes = partitions.releasedBytes))(_ + _)

  def changed(listener: ListenerCounts)(f: ListenerCounts => ListenerCounts): ExecutorCounts =
    copy(listeners = listeners.indexWhere(_.index == listener.index) match {
      case -1 => (listeners :+ f(listener)).sortBy(_.index)
      case at => listeners.updated(at, f(listeners(at)))
    })

  /** The counts of two executors together. */
  def +(other: ExecutorCounts): ExecutorCounts = ExecutorCounts(
    other.listeners.foldLeft(this)((sums, one) => sums.changed(ListenerCounts(one.index, one.name, one.scope))(_ + one))
      .listeners,
    processes + other.processes, lostProcesses + other.lostProcesses, deferred ++ other.deferred,
    partitions + other.partitions)
}

/** The spans of one topology on one executor: those that the driver may not have, by their slots, and how many there
  * were. */
final case class SpanReport(total: Long, slots: Vector[SpanSlot])
final case class SpanSlot(slot: Int, span: Span)

/**
 * A report of an executor to the driver. The counts are complete, not changes, and each report has a sequence number:
 * the driver replaces the older ones. So a report that is lost or repeated changes nothing. The last three fields are
 * for the end of a topology.
 *
 * @param unclosed the listeners that have not closed
 * @param shuffles shuffles with deleted outputs
 * @param caches cached datasets that the driver must unpersist
 */
final case class ExecutorReport(
    totals: Totals, topologies: VectorMap[String, ExecutorCounts], spans: VectorMap[String, SpanReport],
    processes: Vector[ProcessView] = Vector.empty, unclosed: Vector[String] = Vector.empty,
    shuffles: Vector[Int] = Vector.empty, caches: Vector[Int] = Vector.empty)

/** The counts of one executor. `timelines` says whether spans are kept, because the UI or the event log shows them. */
final class Ledger(wall: () => Long = () => System.currentTimeMillis(), timelines: Boolean = true) {
  /** The samples of the executor's Python processes, if sampling is on. */
  @volatile var samples = Option.empty[SampleLog]
  /** Receives each duration in microseconds, for the executor's own metrics. */
  @volatile var timed: (String, Long) => Unit = (_, _) => ()
  private val topologies = mutable.LinkedHashMap.empty[String, ExecutorCounts]
  private val spans = mutable.HashMap.empty[String, SpanLog]
  /** Topologies of which the driver may not know the last change: the report that carries it, 0 if none does yet. */
  private val unreported = mutable.LinkedHashMap.empty[String, Long]
  private var arrivals = Map.empty[Long, Seq[() => Unit]] // what to do when a report has arrived
  private var sequence = 0L
  private var forgotten = Totals()

  def change(topology: String)(f: ExecutorCounts => ExecutorCounts): Unit = synchronized {
    topologies(topology) = f(topologies.getOrElse(topology, ExecutorCounts()))
    unreported(topology) = 0
  }

  def listener(
    topology: String, index: Int, name: => String, scope: => String)(f: ListenerCounts => ListenerCounts): Unit =
    change(topology)(_.changed(ListenerCounts(index, name, scope))(f))

  /** Records something of the topology that took this long, until now. */
  def span(topology: String, kind: String, name: => String, micros: Long, failed: Boolean): Unit = {
    val started = wall() - micros / 1000
    timed(kind, micros)
    if (timelines) synchronized {
      spans.getOrElseUpdate(topology, new SpanLog).add(kind, name, started, micros, failed)
      unreported(topology) = 0
    }
  }

  def of(topology: String): ExecutorCounts = synchronized(topologies.getOrElse(topology, ExecutorCounts()))

  /** The number and the content of a report of all changes since the last one; None if nothing changed. */
  def report(): Option[(Long, ExecutorReport)] = synchronized {
    val changed = unreported.collect { case (topology, 0) => topology }.toSeq
    val sampled = samples.flatMap(_.untold)
    Option.when(changed.nonEmpty || sampled.nonEmpty) {
      val (number, report, arrived) = body(changed)
      changed.foreach(unreported(_) = number)
      arrivals += number -> (arrived ++ sampled.map(_._2))
      number -> report.copy(processes = sampled.fold(Vector.empty[ProcessView])(_._1))
    }
  }

  /** The driver has the report with this number. */
  def delivered(number: Long): Unit = synchronized {
    arrivals.get(number).foreach(_.foreach(_()))
    arrivals -= number
    unreported.filterInPlace((_, carrier) => carrier != number)
  }

  /** The report with this number may be lost: the next report repeats its content. */
  def notDelivered(number: Long): Unit = synchronized {
    arrivals -= number
    unreported.mapValuesInPlace((_, carrier) => if (carrier == number) 0 else carrier)
  }

  /** A report of one topology, whether it changed or not. */
  def full(topology: String): (Long, ExecutorReport) = synchronized {
    unreported -= topology
    val (number, report, _) = body(Seq(topology))
    number -> report
  }

  // Each report carries the totals, so that the driver never returns to older ones.
  private def body(which: Seq[String]): (Long, ExecutorReport, Seq[() => Unit]) = {
    sequence += 1
    val told = which.flatMap(topology => spans.get(topology).map(topology -> _.untold))
    val counts = which.flatMap(topology => topologies.get(topology).map(topology -> _)).to(VectorMap)
    (sequence,
      ExecutorReport(totals, counts, told.map { case (topology, (spans, _)) => topology -> spans }.to(VectorMap)),
      told.map(_._2._2))
  }

  /** Forgets a closed topology. Returns false if the driver does not have its last counts yet. */
  def forget(topology: String): Boolean = synchronized {
    val reported = !unreported.contains(topology)
    if (reported) {
      spans -= topology
      topologies.remove(topology).foreach(counts => forgotten += counts.totals)
    }
    reported
  }

  /** What all topologies store now. */
  def stored: PartitionCounts =
    synchronized(topologies.valuesIterator.map(_.partitions).foldLeft(PartitionCounts())(_ + _))

  /** Sums over all topologies that ever ran here, for metrics. */
  def totals: Totals = synchronized(topologies.valuesIterator.map(_.totals).foldLeft(forgotten)(_ + _))
}
