package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.ObjectNode
import scala.collection.mutable

/**
 * What took time in one topology on one executor: the first so many opens and closes, the slowest of the rest, and the same of
 * tasks. The first show how it began, the slowest are who is looked for; all others are only counted. Guarded by its ledger.
 *
 * Each has a slot, whose content may be replaced: reports carry the slots that are not known to have arrived.
 */
private[stagecrew] final class SpanLog(first: Int = SpanLog.First, slowest: Int = SpanLog.Slowest) {
  import SpanLog._

  private val slots = mutable.LongMap.empty[Slot]
  private val hooks = new Slots(0)
  private val tasks = new Slots(first + slowest)
  private var replaced = 0L

  def add(kind: String, name: => String, started: Long, micros: Long, failed: Boolean): Unit = {
    val among = if (kind == "task") tasks else hooks
    among.slotFor(micros).fold(replaced += 1) { slot =>
      if (slots.contains(slot.toLong)) replaced += 1
      slots(slot.toLong) = new Slot(Span("", kind, name, started, started + micros / 1000, failed))
    }
  }

  /** What is to be reported, and what to do when it has arrived. */
  def untold: (ObjectNode, () => Unit) = {
    val left = slots.toSeq.filterNot(_._2.told).sortBy(_._1)
    val node = Json.obj().put("total", slots.size + replaced)
    Json.put(node, "slots", left.map { case (number, slot) => slot.span.json.put("slot", number) })
    node -> (() => left.foreach(_._2.told = true))
  }

  private final class Slots(base: Int) {
    private var count = 0
    private val quickest = mutable.PriorityQueue.empty[(Long, Int)](Ordering.by[(Long, Int), Long](_._1).reverse)

    /** Where one of this length goes; None where it is not kept. */
    def slotFor(micros: Long): Option[Int] =
      if (count < first + slowest) {
        val slot = base + count
        count += 1
        if (count > first) quickest.enqueue(micros -> slot)
        Some(slot)
      } else if (quickest.headOption.exists(_._1 < micros)) {
        val slot = quickest.dequeue()._2
        quickest.enqueue(micros -> slot)
        Some(slot)
      } else None
  }
}

private[stagecrew] object SpanLog {
  val First = 100
  val Slowest = 100

  private final class Slot(val span: Span, var told: Boolean = false)
}

/** The spans of one topology, of all executors: what their reports said last of each slot. Of the driver's loop. */
private[stagecrew] final class SpanBook(limit: Int = SpanBook.PerTopology) {
  private val slots = mutable.LinkedHashMap.empty[(String, Long), (Long, Span)]
  private val totals = mutable.LinkedHashMap.empty[String, (Long, Long)] // of each executor, what it keeps among them
  private var past = 0L // of those that are forgotten

  /** What an executor's report with this number said. Whatever comes twice, or late, changes nothing. */
  def took(executor: String, sequence: Long, node: JsonNode): Unit = {
    if (totals.get(executor).forall(_._1 < sequence)) totals(executor) = sequence -> node.path("total").asLong
    Json.items(node.get("slots")).foreach { entry =>
      val key = executor -> entry.path("slot").asLong
      slots.get(key) match {
        case Some((known, _)) if known >= sequence => ()
        case None if slots.size >= limit => ()
        case _ => slots(key) = sequence -> Span.of(entry).copy(executor = executor)
      }
    }
  }

  def size: Int = slots.size

  /** An executor of which nothing new comes. */
  def forget(executor: String): Unit = totals.remove(executor).foreach(past += _._2)

  /** None is kept any more; how many there were is. */
  def clear(): Unit = slots.clear()

  def spans: Vector[Span] = slots.valuesIterator.map(_._2).toVector.sortBy(_.started)

  /** How many there were that are not kept. */
  def dropped: Long = totals.valuesIterator.map(_._2).sum + past - slots.size
}

private[stagecrew] object SpanBook {
  /** How many are kept of one topology, and of all: those that closed first lose theirs first. */
  val PerTopology = 2000
  val InAll = 100000

  def trim(topologies: Iterable[Topology], inAll: Int = InAll): Unit = {
    var left = topologies.iterator.map(_.spans.size).sum
    topologies.filter(one => one.state == "closed" && one.spans.size > 0).toSeq.sortBy(_.ended).iterator.takeWhile(_ => left > inAll).foreach { topology =>
      left -= topology.spans.size
      topology.spans.clear()
      topology.changed()
    }
  }
}
