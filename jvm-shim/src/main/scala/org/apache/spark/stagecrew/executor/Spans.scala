package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import driver._, ui._

/**
 * The spans of one topology on one executor: the first opens and closes and the slowest of the later ones, and likewise
 * for tasks. The first ones show how the topology began, and the slowest ones are the most useful. All others are only
 * counted. The ledger synchronizes access.
 *
 * Each span is in a slot, where a slower span may replace it. Reports contain the slots that the driver may not have.
 */
private[stagecrew] final class SpanLog(first: Int = SpanLog.First, slowest: Int = SpanLog.Slowest) {
  private val unreported = mutable.LongMap.empty[Span]
  private val (hooks, tasks) = (new Slots(0), new Slots(first + slowest))
  private var total = 0L

  def add(kind: String, name: => String, started: Long, micros: Long, failed: Boolean, lost: Boolean = false): Unit = {
    total += 1
    (if (kind == "task") tasks else hooks).slotFor(micros).foreach { slot =>
      unreported(slot.toLong) = Span("", kind, name, started, started + micros / 1000, failed, lost)
    }
  }

  /** The content of the next report, and a callback for its delivery. */
  def report: (SpanReport, () => Unit) = {
    val slots = unreported.toVector.sortBy(_._1).map { case (slot, span) => SpanSlot(slot.toInt, span) }
    SpanReport(total, slots) -> (() => slots.foreach { case SpanSlot(slot, span) =>
      if (unreported.get(slot.toLong).exists(_ eq span)) unreported -= slot.toLong
    })
  }

  private final class Slots(base: Int) {
    private var count = 0
    private val quickest = mutable.PriorityQueue.empty[(Long, Int)](Ordering.by[(Long, Int), Long](_._1).reverse)

    /** The slot for a span of this duration; None if the span is only counted. */
    def slotFor(micros: Long): Option[Int] = {
      val free = Option.when(count < first + slowest)(base + count)
      if (free.nonEmpty) count += 1
      val slot = free.orElse(Option.when(quickest.headOption.exists(_._1 < micros))(quickest.dequeue()._2))
      if (count > first) slot.foreach(kept => quickest.enqueue(micros -> kept))
      slot
    }
  }
}

private[stagecrew] object SpanLog {
  val First = 100
  val Slowest = 100
}

/** The spans of one topology on all executors: the last reported span of each slot. Used by the driver's loop only. */
private[stagecrew] final class SpanBook(limit: Int = SpanBook.PerTopology) {
  private val slots = mutable.LinkedHashMap.empty[(String, Int), (Long, Span)]
  private val totals = mutable.LinkedHashMap.empty[String, (Long, Long)] // by executor: sequence number, recorded spans
  private var forgotten = 0L // spans recorded by executors that are forgotten, and those that ended with an executor
  private var lostSpans = 0

  /** Records the spans of a report, and returns those that are new. A repeated or late report changes nothing. */
  def record(executor: String, sequence: Long, report: SpanReport): Vector[Span] = {
    if (totals.get(executor).forall(_._1 < sequence)) totals(executor) = sequence -> report.total
    report.slots.flatMap { case SpanSlot(slot, reported) =>
      val key = executor -> slot
      val span = reported.copy(executor = executor)
      val before = slots.get(key)
      val isNewer = before.fold(slots.size < limit)(_._1 < sequence)
      if (isNewer) slots(key) = sequence -> span
      Option.when(isNewer && !before.exists(_._2 == span))(span)
    }
  }

  /** Records a span that ended with its executor, which will not report it. */
  def lost(span: Span): Unit = if (slots.size < limit) {
    lostSpans += 1
    forgotten += 1
    slots((span.executor, -lostSpans)) = Long.MaxValue -> span
  }

  def size: Int = slots.size

  /** Forgets a lost executor. Its spans are kept. */
  def forget(executor: String): Unit = totals.remove(executor).foreach(forgotten += _._2)

  /** Drops all spans, and keeps their count. */
  def clear(): Unit = slots.clear()

  def spans: Vector[Span] = slots.valuesIterator.map(_._2).toVector.sortBy(_.started)

  /** How many spans were recorded, but are not kept. */
  def dropped: Long = totals.valuesIterator.map(_._2).sum + forgotten - slots.size
}

private[stagecrew] object SpanBook {
  /** How many spans are kept for one topology, and for all together. The topologies that closed first lose theirs
    * first. */
  val PerTopology = 2000
  val InAll = 100000

  def trim(topologies: Iterable[Topology], inAll: Int = InAll): Unit = {
    var remaining = topologies.iterator.map(_.spans.size).sum
    val closed = topologies.filter(t => t.state == "closed" && t.spans.size > 0).toSeq.sortBy(_.ended)
    closed.iterator.takeWhile(_ => remaining > inAll).foreach { topology =>
      remaining -= topology.spans.size
      topology.spans.clear()
      topology.changed()
    }
  }
}
