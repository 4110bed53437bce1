package org.apache.spark.stagecrew
package driver

import scala.collection.immutable.VectorMap
import scala.collection.mutable
import executor._, ui._

/** A report from the driver's Python about coordinators: the changed views, by topology and operator use, and the sum
  * over all coordinators that ever existed. */
final case class Statistics(
  topologies: VectorMap[String, VectorMap[String, OperatorView]], totals: Option[OperatorView])

/**
 * The coordinators of one topology. At most `limit` coordinators are listed. Those without live evaluations are removed
 * from the list first. Removed coordinators are only in a sum, which is exact as long as at most `remembered` of them
 * still report. Used by the driver's loop only.
 */
private[stagecrew] final class OperatorBook(
  limit: Int = OperatorBook.Limit, remembered: Int = OperatorBook.Remembered) {
  private var evictedSum = Option.empty[OperatorView]
  private val unlisted = new Bounded[String, (Long, OperatorView)](remembered)((_, old) =>
    evictedSum = Some(OperatorView.sum(evictedSum.toSeq :+ old._2)))
  private val listed = new Bounded[String, (Long, OperatorView)](Int.MaxValue)((key, old) =>
    unlisted(key) = old._1 -> OperatorView.sum(Seq(old._2)))

  /** Records the views of a frame with this sequence number. A view is ignored if a newer frame had the same key. */
  def record(sequence: Long, updates: Iterable[(String, OperatorView)]): Unit = updates.foreach { case (key, view) =>
    if (unlisted.get(key).exists(_._1 < sequence)) unlisted(key) = sequence -> OperatorView.sum(Seq(view))
    else if (!unlisted.contains(key) && listed.get(key).forall(_._1 < sequence)) listed(key) = sequence -> view
    while (listed.size > limit) listed.evict(nextToEvict)
  }

  private def nextToEvict: String = {
    val idle = listed.keys.filter(key => listed.get(key).exists(_._2.live == 0))
    idle.find(key => listed.get(key).exists(_._2.state != "active")).orElse(idle.headOption).getOrElse(listed.keys.head)
  }

  /** How many coordinators are only in the sum. */
  def forgotten: Int = listed.forgotten

  /** The listed coordinators, and the sum of the others. */
  def views: Vector[OperatorView] = listed.values.map(_._2).toVector ++
    Option.when(forgotten > 0)(OperatorView.sum(evictedSum ++ unlisted.values.map(_._2)))
}

private[stagecrew] object OperatorBook {
  /** How many coordinators of a topology are listed, and how many of the removed ones are remembered. */
  val Limit = 500
  val Remembered = 10000
}

/** The last totals of each executor. At most `retainedLost` lost executors are kept. Those that were lost earlier are
  * only in a sum, and their late reports are ignored. Used by the driver's loop only. */
private[stagecrew] final class TotalsBook(retainedLost: Int) {
  private val book = mutable.LinkedHashMap.empty[String, (Long, Totals)]
  private var evictedSum = Totals()
  private val forgotten = new Bounded[String, Unit](TotalsBook.RememberedForgotten)()
  private val lost = new Bounded[String, Unit](retainedLost)((executor, _) => {
    forgotten(executor) = ()
    book.remove(executor).foreach { case (_, totals) => evictedSum += totals }
  })

  /** Records the totals of a report with this sequence number, unless a newer report was recorded. Returns false if the
    * executor is forgotten. */
  def record(executor: String, sequence: Long, totals: Totals): Boolean = !forgotten.contains(executor) && {
    if (book.get(executor).forall(_._1 < sequence)) book(executor) = sequence -> totals
    true
  }

  def executorLost(executor: String): Unit = lost(executor) = ()

  def sum: Totals = book.valuesIterator.map(_._2).foldLeft(evictedSum)(_ + _)
  private[stagecrew] def size: Int = book.size
}

private[stagecrew] object TotalsBook {
  /** How many forgotten executors are remembered by id, so that their late reports are ignored. */
  val RememberedForgotten = 10000
}
