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
