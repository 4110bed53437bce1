package org.apache.spark.stagecrew
package driver

import java.util.concurrent.CompletableFuture
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import executor._, spark._, ui._, wire._

/**
 * The driver's state of one topology. Used by its loop only; other threads read `view`. Of the lost executors the
 * last `retainedLost` are listed, and the others are in a sum.
 */
private[stagecrew] final class Topology(
    var description: Description, val kind: String, retainedLost: Int = Int.MaxValue) {
  var state = "active"
  val started: Long = System.currentTimeMillis()
  var ended = 0L
  var cancelled = Option.empty[String] // the reason
  /** The executors that asked for its description, that may store partitions of it without having asked, that have not
    * closed it yet, and that had blocks of `caches`. */
  val executors, holders, pending, cachedOn = mutable.LinkedHashSet.empty[String]
  val caches = mutable.LinkedHashSet.empty[Int] // cached datasets that the driver must unpersist
  val left = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks] // files of lost executors, to be deleted
  var releasing = false
  val unclosed = mutable.ArrayBuffer.empty[String]
  var waiters = List.empty[CompletableFuture[Unit]]
  val counts = mutable.LinkedHashMap.empty[String, (Long, ExecutorCounts)]
  var jobs = 0
  val operators = new OperatorBook
  val spans = new SpanBook
  val executions = mutable.LinkedHashSet.empty[Long]
  val queries = mutable.LinkedHashSet.empty[String]

  private var folded = ExecutorCounts()
  private val lostExecutors = new Bounded[String, Unit](retainedLost)((executor, _) => {
    Seq(executors, holders).foreach(_ -= executor)
    spans.forget(executor)
    counts.remove(executor).foreach { case (_, of) =>
      folded += of.copy(deferred = Set.empty, partitions = of.partitions.storing(PartitionCounts()))
    }
  })
  private var shown = Option.empty[TopologyView]

  def changed(): Unit = shown = None

  def lost(executor: String): Unit = lostExecutors(executor) = ()

  def view: TopologyView = shown.getOrElse {
    val forgotten = lostExecutors.forgotten
    val byExecutor = counts.iterator.map { case (executor, (_, one)) => executor -> one } ++
      Option.when(forgotten > 0)(Topology.Forgotten -> folded)
    val view = TopologyView(
      description.id, description.name, kind, description.parent, state, started, ended, jobs, executors.toVector,
      byExecutor.to(VectorMap), lostExecutors.keys.toVector, unclosed.toVector, operators.views,
      spans.spans, spans.dropped, forgotten, operators.forgotten)
    shown = Some(view)
    view
  }
}

private[stagecrew] object Topology {
  /** The name of the sum of lost executors that are no longer listed, and of the sum of such operators. */
  val Forgotten = "forgotten"
}
