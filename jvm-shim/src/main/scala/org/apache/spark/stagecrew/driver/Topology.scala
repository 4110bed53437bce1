package org.apache.spark.stagecrew
package driver

import java.util.concurrent.CompletableFuture
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import executor._, spark._, ui._, wire._

/**
 * The state of one topology on the driver. Used by the driver's loop only; other threads use `view`. The last
 * `retainedLost` lost executors are listed, and the older ones are only in a sum.
 */
private[stagecrew] final class Topology(
    var description: Description, val kind: String, retainedLost: Int = Int.MaxValue) {
  var state = "active"
  val started: Long = System.currentTimeMillis()
  var ended = 0L
  var cancelled = Option.empty[String] // the reason
  /** The executors that requested its description (`executors`), that may store partitions of it without having
    * requested it (`holders`), that have not closed it yet (`pending`), and that had blocks of
    * `caches` (`cachedOn`). */
  val executors, holders, pending, cachedOn = mutable.LinkedHashSet.empty[String]
  val caches = mutable.LinkedHashSet.empty[Int] // cached datasets that the driver must unpersist
  val leftBlocks = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks] // files of lost executors, to be deleted
  var releasing = false
  val unclosed = mutable.ArrayBuffer.empty[String]
  var waiters = List.empty[CompletableFuture[Unit]]
  val counts = mutable.LinkedHashMap.empty[String, (Long, ExecutorCounts)]
  var jobs = 0
  val operators = new OperatorBook
  val spans = new SpanBook
  val executions = mutable.LinkedHashSet.empty[Long]
  val queries = mutable.LinkedHashSet.empty[String]

  private var forgottenCounts = ExecutorCounts()
  private val lostExecutors = new Bounded[String, Unit](retainedLost)((executor, _) => {
    Seq(executors, holders).foreach(_ -= executor)
    spans.forget(executor)
    counts.remove(executor).foreach { case (_, lost) =>
      forgottenCounts += lost.copy(deferred = Set.empty, partitions = lost.partitions.storing(PartitionCounts()))
    }
  })
  private var cachedView = Option.empty[TopologyView]

  def changed(): Unit = cachedView = None

  def lost(executor: String): Unit = lostExecutors(executor) = ()

  def view: TopologyView = cachedView.getOrElse {
    val forgotten = lostExecutors.forgotten
    val byExecutor = counts.iterator.map { case (executor, (_, executorCounts)) => executor -> executorCounts } ++
      Option.when(forgotten > 0)(Topology.Forgotten -> forgottenCounts)
    val view = TopologyView(
      description.id, description.name, kind, description.parent, state, started, ended, jobs, executors.toVector,
      byExecutor.to(VectorMap), lostExecutors.keys.toVector, unclosed.toVector, operators.views,
      spans.spans, spans.dropped, forgotten, operators.forgotten)
    cachedView = Some(view)
    view
  }
}

private[stagecrew] object Topology {
  /** The name of the sum of executors that are no longer listed, and of the sum of such operators. */
  val Forgotten = "forgotten"
}
