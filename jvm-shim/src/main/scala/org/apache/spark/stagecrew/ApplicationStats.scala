package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.JsonNode
import scala.collection.mutable
import scala.jdk.CollectionConverters._

/** The coordinators of one topology, as Python said last of each: so many are listed, those before whose tasks are over leave first.
  * The others are in the sum only, which is that of all as long as so many are remembered. Of the driver's loop. */
private[stagecrew] final class OperatorBook(limit: Int = OperatorBook.Limit, remembered: Int = OperatorBook.Remembered) {
  private val book = mutable.LinkedHashMap.empty[String, (Long, OperatorView)]
  private val unlisted = mutable.LinkedHashMap.empty[String, (Long, OperatorView)] // numbers alone, for what is still told of them
  private var folded = Option.empty[OperatorView]
  private var past = 0

  /** What is in a frame with this number; an older one changes nothing. */
  def took(sequence: Long, node: JsonNode): Unit = node.properties.asScala.foreach { entry =>
    val (key, said) = (entry.getKey, OperatorView.of(entry.getValue))
    if (unlisted.get(key).exists(_._1 < sequence)) unlisted(key) = sequence -> OperatorView.sum(Seq(said))
    else if (!unlisted.contains(key) && book.get(key).forall(_._1 < sequence)) book(key) = sequence -> said
    while (book.size > limit) leave()
  }

  private def leave(): Unit = {
    def first(f: OperatorView => Boolean) = book.find(entry => entry._2._2.live == 0 && f(entry._2._2))
    val (key, (sequence, view)) = first(_.state != "active").orElse(first(_ => true)).getOrElse(book.head)
    book -= key
    unlisted(key) = sequence -> OperatorView.sum(Seq(view))
    if (unlisted.size > remembered) {
      val (oldest, (_, numbers)) = unlisted.head
      unlisted -= oldest
      folded = Some(OperatorView.sum(folded.toSeq :+ numbers))
      past += 1
    }
  }

  /** How many are in the sum only. */
  def forgotten: Int = past + unlisted.size

  /** Those that are listed, and the sum of the others. */
  def views: Vector[OperatorView] = book.valuesIterator.map(_._2).toVector ++
    Option.when(forgotten > 0)(OperatorView.sum(folded ++ unlisted.valuesIterator.map(_._2)))
}

private[stagecrew] object OperatorBook {
  /** How many uses of its operators are listed of a topology, and how many more are known by name. */
  val Limit = 500
  val Remembered = 10000
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
private[stagecrew] final class ApplicationStats {
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
