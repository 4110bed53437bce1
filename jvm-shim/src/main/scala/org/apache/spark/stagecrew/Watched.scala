package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.JsonNode
import scala.collection.mutable
import scala.jdk.CollectionConverters._

/** The coordinators of one topology, as Python said last of each. Of the driver's loop. */
private[stagecrew] final class OperatorBook(limit: Int = OperatorBook.Limit) {
  private val book = mutable.LinkedHashMap.empty[String, (Long, OperatorView)]

  /** What is in a frame with this number; an older one changes nothing. */
  def took(sequence: Long, node: JsonNode): Unit = node.properties.asScala.foreach { entry =>
    if (book.get(entry.getKey).forall(_._1 < sequence)) book(entry.getKey) = sequence -> OperatorView.of(entry.getValue)
    if (book.size > limit) book -= book.head._1
  }

  def views: Vector[OperatorView] = book.valuesIterator.map(_._2).toVector
}

private[stagecrew] object OperatorBook {
  /** How many uses of its operators are remembered of a topology: the last ones. */
  val Limit = 500
}

/** The sums of each executor, as its reports said last. Of executors that are gone the last so many are known by themselves, the
  * others in the sum only: what comes late from these changes nothing. Of the driver's loop. */
private[stagecrew] final class TotalsBook(retainedDead: Int) {
  private val book = mutable.LinkedHashMap.empty[String, (Long, Totals)]
  private val dead = mutable.LinkedHashSet.empty[String]
  private val forgotten = new TopologyTable.BoundedSet(TotalsBook.RememberedForgotten)
  private var folded = Totals()

  /** What a report with this number said; an older one changes nothing. Answers whether its executor is still known. */
  def took(executor: String, sequence: Long, totals: => Totals): Boolean = !forgotten.contains(executor) && {
    if (book.get(executor).forall(_._1 < sequence)) book(executor) = sequence -> totals
    true
  }

  def lost(executor: String): Unit = {
    dead += executor
    while (dead.size > retainedDead) {
      val oldest = dead.head
      dead -= oldest
      forgotten += oldest
      book.remove(oldest).foreach { case (_, totals) => folded += totals }
    }
  }

  def sum: Totals = book.valuesIterator.map(_._2).foldLeft(folded)(_ + _)
  private[stagecrew] def size: Int = book.size
}

private[stagecrew] object TotalsBook {
  /** How many of the forgotten are known by name, for what comes late from them. */
  val RememberedForgotten = 10000
}

/** What is shown beside topologies, of the whole application. Of the driver's loop. */
private[stagecrew] final class Watched {
  val processes = new ProcessBook
  var recovery = Option.empty[RecoveryView]
  private var coordinators = 0L -> Option.empty[OperatorView]

  /** Sums over all coordinators that there were. */
  def sums: Option[OperatorView] = coordinators._2

  /** What Python says of coordinators. Answers the topologies that it is of. */
  def statistics(sequence: Long, body: JsonNode, topologies: String => Option[Topology]): Seq[Topology] = {
    if (sequence > coordinators._1) coordinators = sequence -> Option(body.get("totals")).map(OperatorView.of)
    body.path("topologies").properties.asScala.toSeq.flatMap { entry =>
      topologies(entry.getKey).map { topology =>
        topology.operators.took(sequence, entry.getValue)
        topology
      }
    }
  }

  /** What a report of an executor says beside its counts. Answers the topologies that it is of. */
  def reported(executor: String, sequence: Long, body: JsonNode, topologies: String => Option[Topology]): Seq[Topology] = {
    processes.took(body)
    body.path("spans").properties.asScala.toSeq.flatMap { entry =>
      topologies(entry.getKey).map { topology =>
        topology.spans.took(executor, sequence, entry.getValue)
        topology
      }
    }
  }
}
