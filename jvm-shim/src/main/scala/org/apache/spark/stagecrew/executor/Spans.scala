package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import driver._, ui._

/**
 * The spans of one topology on one executor: the first opens and closes, the slowest of the rest, and the same of
 * tasks. The first ones show how the topology began, and the slowest ones are the most useful. All others are
 * only counted. Guarded by its ledger.
 *
 * Each span has a slot, whose content may be replaced. Reports carry the slots that the driver may not have.
 */
private[stagecrew] final class SpanLog(first: Int = SpanLog.First, slowest: Int = SpanLog.Slowest) {
  private val unreported = mutable.LongMap.empty[Span]
  private val (hooks, tasks) = (new Slots(0), new Slots(first + slowest))
  private var total = 0L

  def add(kind: String, name: => String, started: Long, micros: Long, failed: Boolean): Unit = {
    total += 1
    (if (kind == "task") tasks else hooks).slotFor(micros).foreach { slot =>
      unreported(slot.toLong) = Span("", kind, name, started, started + micros / 1000, failed)
    }
  }

  /** The content of a report, and what to do when the report has arrived. */
  def untold: (SpanReport, () => Unit) = {
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
      if (count > first) slot.foreach(one => quickest.enqueue(micros -> one))
      slot
    }
  }
}

private[stagecrew] object SpanLog {
  val First = 100
  val Slowest = 100
}

/** The spans of one topology on all executors: the last reported content of each slot. Used by the driver's loop
  * only. */
private[stagecrew] final class SpanBook(limit: Int = SpanBook.PerTopology) {
  private val slots = mutable.LinkedHashMap.empty[(String, Int), (Long, Span)]
  private val totals = mutable.LinkedHashMap.empty[String, (Long, Long)] // by executor: sequence number, spans recorded
  private var past = 0L // spans recorded by executors that are forgotten

  /** Takes over the spans of a report. A report that is repeated or late changes nothing. */
  def record(executor: String, sequence: Long, report: SpanReport): Unit = {
    if (totals.get(executor).forall(_._1 < sequence)) totals(executor) = sequence -> report.total
    report.slots.foreach { case SpanSlot(slot, span) =>
      val key = executor -> slot
      val isNewer = slots.get(key).fold(slots.size < limit)(_._1 < sequence)
      if (isNewer) slots(key) = sequence -> span.copy(executor = executor)
    }
  }

  def size: Int = slots.size

  /** Forgets an executor that is gone. */
  def forget(executor: String): Unit = totals.remove(executor).foreach(past += _._2)

  /** Drops all spans, and keeps their number. */
  def clear(): Unit = slots.clear()

  def spans: Vector[Span] = slots.valuesIterator.map(_._2).toVector.sortBy(_.started)

  /** How many spans were recorded and are not kept. */
  def dropped: Long = totals.valuesIterator.map(_._2).sum + past - slots.size
}

private[stagecrew] object SpanBook {
  /** How many spans are kept of one topology, and of all. Topologies that closed first lose theirs first. */
  val PerTopology = 2000
  val InAll = 100000

  def trim(topologies: Iterable[Topology], inAll: Int = InAll): Unit = {
    var left = topologies.iterator.map(_.spans.size).sum
    val closed = topologies.filter(one => one.state == "closed" && one.spans.size > 0).toSeq.sortBy(_.ended)
    closed.iterator.takeWhile(_ => left > inAll).foreach { topology =>
      left -= topology.spans.size
      topology.spans.clear()
      topology.changed()
    }
  }
}
