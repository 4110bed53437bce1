package org.apache.spark.stagecrew
package executor

import scala.collection.immutable.VectorMap
import scala.collection.mutable
import ui._

/**
 * The counts of one listener of a topology on one executor.
 *
 * @param opens calls of `open`, including failed ones
 * @param closes calls of `close`, including failed ones
 * @param failures failed calls of `open`, `close` or `decorate`
 * @param lost opens in processes that ended without a close
 * @param lastErrorLine the line of `lastError` that describes the error, chosen by Python
 */
final case class ListenerCounts(
    index: Int, name: String, scope: String, opens: Long = 0, closes: Long = 0, failures: Long = 0, lost: Long = 0,
    openMicros: Long = 0, closeMicros: Long = 0, lastError: String = "", lastErrorLine: String = "") {

  /** Adds the duration of an open or a close, failed or not. */
  private[stagecrew] def withDuration(hook: String, micros: Long): ListenerCounts = hook match {
    case "open" => copy(openMicros = openMicros + micros)
    case "close" => copy(closeMicros = closeMicros + micros)
    case _ => this
  }

  def +(other: ListenerCounts): ListenerCounts = copy(
    opens = opens + other.opens, closes = closes + other.closes, failures = failures + other.failures,
    lost = lost + other.lost, openMicros = openMicros + other.openMicros, closeMicros = closeMicros + other.closeMicros,
    lastError = if (other.lastError.nonEmpty) other.lastError else lastError,
    lastErrorLine = if (other.lastError.nonEmpty) other.lastErrorLine else lastErrorLine)

  private[stagecrew] def withFailure(error: String, line: String): ListenerCounts =
    copy(failures = failures + 1, lastError = error, lastErrorLine = line)
}

object ListenerCounts {
  /** The maximum length of an error's text. Python uses the same: ERROR_LENGTH in python/stagecrew/worker/hooks.py. */
  val ErrorLength = 8000
}

/** Sums over listeners and released partitions. They never decrease, because they include forgotten topologies. */
final case class Totals(
    opens: Long = 0, closes: Long = 0, failures: Long = 0, lost: Long = 0,
    openMicros: Long = 0, closeMicros: Long = 0, released: Long = 0, releasedBytes: Long = 0) {
  def +(other: Totals): Totals = combined(other)(_ + _)

  /** The maximum of each sum, which is its latest value, because sums never decrease. */
  private[stagecrew] def max(other: Totals): Totals = combined(other)(math.max)

  private def combined(other: Totals)(f: (Long, Long) => Long): Totals = Totals(
    f(opens, other.opens), f(closes, other.closes), f(failures, other.failures), f(lost, other.lost),
    f(openMicros, other.openMicros), f(closeMicros, other.closeMicros), f(released, other.released),
    f(releasedBytes, other.releasedBytes))
}

/** The partitions of a topology on an executor: stored now, known to be deleted (`released`), and not deleted because
  * of a failure (`releaseFailures`). */
final case class PartitionCounts(
    inProgress: Long = 0, outputs: Long = 0, outputBytes: Long = 0, blocks: Long = 0, blockBytes: Long = 0,
    released: Long = 0, releasedBytes: Long = 0, releaseFailures: Long = 0) {

  def +(other: PartitionCounts): PartitionCounts = PartitionCounts(
    inProgress + other.inProgress, outputs + other.outputs, outputBytes + other.outputBytes, blocks + other.blocks,
    blockBytes + other.blockBytes, released + other.released, releasedBytes + other.releasedBytes,
    releaseFailures + other.releaseFailures)

  /** Replaces the stored partitions with those of `now`, and keeps the counts of releases. */
  def storing(now: PartitionCounts): PartitionCounts =
    now.copy(released = released, releasedBytes = releasedBytes, releaseFailures = releaseFailures)
}

/**
 * The counts of one topology on one executor.
 *
 * @param processes the number of Python processes that opened a listener
 * @param lostProcesses the number of these processes that ended with an open listener
 * @param deferred the ids of processes that will close after their current task
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

  /** The sum of the counts of two executors. */
  def +(other: ExecutorCounts): ExecutorCounts = ExecutorCounts(
    other.listeners.foldLeft(this)((sums, counts) =>
      sums.changed(ListenerCounts(counts.index, counts.name, counts.scope))(_ + counts)).listeners,
    processes + other.processes, lostProcesses + other.lostProcesses, deferred ++ other.deferred,
    partitions + other.partitions)
}

/** The spans of one topology on one executor that the driver may not have, by slot. `total` is the number of all spans
  * that were recorded. */
final case class SpanReport(total: Long, slots: Vector[SpanSlot])
final case class SpanSlot(slot: Int, span: Span)

/** An `open` or a `close` that is running. */
final case class RunningHook(topology: String, span: Span)

/**
 * A report from an executor to the driver. The counts are totals, not differences, and the driver only applies a report
 * with a higher sequence number than the last one. So lost and repeated reports do no harm. `unclosed`, `shuffles` and
 * `caches` are only set at the end of a topology.
 *
 * @param hooks the running hooks. None if they are the same as in the last report
 * @param unclosed the listeners that have not closed
 * @param shuffles the shuffles whose outputs were deleted
 * @param caches the cached datasets that the driver must unpersist
 */
final case class ExecutorReport(
    totals: Totals, topologies: VectorMap[String, ExecutorCounts], spans: VectorMap[String, SpanReport],
    processes: Vector[ProcessView] = Vector.empty, unclosed: Vector[String] = Vector.empty,
    shuffles: Vector[Int] = Vector.empty, caches: Vector[Int] = Vector.empty,
    hooks: Option[Vector[RunningHook]] = None)

/** The counts of one executor. Spans are only kept if `timelines` is set: the UI or the event log then shows them. */
final class Ledger(clock: () => Long = () => System.currentTimeMillis(), timelines: Boolean = true) {
  /** The samples of the executor's Python processes, if sampling is on. */
  @volatile var samples = Option.empty[SampleLog]
  /** Returns the running hooks, for reports. */
  @volatile var runningHooks: () => Vector[RunningHook] = () => Vector.empty
  private var reportedHooks = Vector.empty[RunningHook] // those of the last report; the driver may not have it
  /** Called with the kind and the duration of each span, in microseconds, for the metrics of the executor. */
  @volatile var onDuration: (String, Long) => Unit = (_, _) => ()
  private val topologies = mutable.LinkedHashMap.empty[String, ExecutorCounts]
  private val spans = mutable.HashMap.empty[String, SpanLog]
  /** Topologies whose last change may not have reached the driver, with the number of the report that contains the
    * change. 0 if no report contains it yet. */
  private val unreported = mutable.LinkedHashMap.empty[String, Long]
  private var onDelivery = Map.empty[Long, Seq[() => Unit]] // by report number: called when the driver has the report
  private var sequence = 0L
  private var forgotten = Totals()

  def change(topology: String)(f: ExecutorCounts => ExecutorCounts): Unit = synchronized {
    topologies(topology) = f(topologies.getOrElse(topology, ExecutorCounts()))
    unreported(topology) = 0
  }

  def listener(topology: String, index: Int, name: String, scope: String)(f: ListenerCounts => ListenerCounts): Unit =
    change(topology)(_.changed(ListenerCounts(index, name, scope))(f))

  /** Records a span of the topology that ends now and had this duration. */
  def span(
      topology: String, kind: String, name: => String, micros: Long, failed: Boolean, lost: Boolean = false): Unit = {
    val started = clock() - micros / 1000
    onDuration(kind, micros)
    if (timelines) synchronized {
      spans.getOrElseUpdate(topology, new SpanLog).add(kind, name, started, micros, failed, lost)
      unreported(topology) = 0
    }
  }

  def of(topology: String): ExecutorCounts = synchronized(topologies.getOrElse(topology, ExecutorCounts()))

  /** A report of all changes since the last report, with its number. None if nothing changed. */
  def report(): Option[(Long, ExecutorReport)] = {
    val running = if (timelines) runningHooks() else Vector.empty // not while holding the lock
    synchronized {
      val changed = unreported.collect { case (topology, 0) => topology }.toSeq
      val samplesReport = samples.flatMap(_.unreported)
      val hooks = Option.when(running != reportedHooks)(running)
      Option.when(changed.nonEmpty || samplesReport.nonEmpty || hooks.nonEmpty) {
        val (number, report, callbacks) = buildReport(changed)
        changed.foreach(unreported(_) = number)
        reportedHooks = running
        onDelivery += number -> (callbacks ++ samplesReport.map(_._2))
        number -> report.copy(processes = samplesReport.fold(Vector.empty[ProcessView])(_._1), hooks = hooks)
      }
    }
  }

  /** The driver has the report with this number. */
  def delivered(number: Long): Unit = synchronized {
    onDelivery.get(number).foreach(_.foreach(_()))
    onDelivery -= number
    unreported.filterInPlace((_, reportNumber) => reportNumber != number)
  }

  /** The report with this number may be lost, so the next report repeats its content. */
  def notDelivered(number: Long): Unit = synchronized {
    onDelivery -= number
    reportedHooks = null // differs from all running hooks
    unreported.mapValuesInPlace((_, reportNumber) => if (reportNumber == number) 0 else reportNumber)
  }

  /** A report of one topology, changed or not, with its number. The driver may drop it if it arrives too late, so the
    * next `report` also has its changes. */
  def full(topology: String): (Long, ExecutorReport) = synchronized {
    val (number, report, _) = buildReport(Seq(topology))
    number -> report
  }

  // Each report contains the totals. A higher report number then always means newer totals.
  private def buildReport(ids: Seq[String]): (Long, ExecutorReport, Seq[() => Unit]) = {
    sequence += 1
    val spanReports = ids.flatMap(topology => spans.get(topology).map(topology -> _.report))
    val counts = ids.flatMap(topology => topologies.get(topology).map(topology -> _)).to(VectorMap)
    (sequence,
      ExecutorReport(totals, counts, spanReports.map { case (id, (spans, _)) => id -> spans }.to(VectorMap)),
      spanReports.map(_._2._2))
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

  /** The stored partitions of all topologies. */
  def stored: PartitionCounts =
    synchronized(topologies.valuesIterator.map(_.partitions).foldLeft(PartitionCounts())(_ + _))

  /** The sums over all topologies that ever ran on this executor, for metrics. */
  def totals: Totals = synchronized(topologies.valuesIterator.map(_.totals).foldLeft(forgotten)(_ + _))
}
