package org.apache.spark.stagecrew
package driver

import java.util.concurrent.CompletableFuture
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import executor._, spark._, ui._, wire._

/**
 * The state of one topology on the driver. Used by the driver's loop only. Other threads see it as a `TopologyView` in
 * `DriverCrew.snapshot`. The last `retainedLost` lost executors are listed, and the older ones are only in a sum.
 */
private[stagecrew] final class Topology(
    var description: Description, val kind: String, retainedLost: Int = Int.MaxValue) {
  var state = "active"
  val started: Long = System.currentTimeMillis()
  var ended = 0L
  var cancelled = Option.empty[String] // the reason
  /** Sets of executors: those that requested the topology's description (`executors`), those that may store partitions
    * of the topology without having requested its description (`holders`), those that have not closed the topology yet
    * (`pending`), and those that had blocks of `caches` (`cachedOn`). */
  val executors, holders, pending, cachedOn = mutable.LinkedHashSet.empty[String]
  val caches = mutable.LinkedHashSet.empty[Int] // cached datasets that the driver must unpersist
  val leftBlocks = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks] // files of lost executors, to be deleted
  var releasing = false // whether the driver has begun to release `caches` and `leftBlocks`
  val unclosed = mutable.ArrayBuffer.empty[String] // descriptions of listeners and executors, for messages
  val closed = new CompletableFuture[Unit]() // completes when the state is "closed"
  val counts = mutable.LinkedHashMap.empty[String, (Long, ExecutorCounts)] // by executor, with the report's number
  var jobs = 0
  val lastJobs = new Bounded[Int, SparkJob](Topology.LastJobs)()
  val operators = new OperatorBook
  val spans = new SpanBook
  val executions = mutable.LinkedHashSet.empty[Long] // running SQL executions
  val queries = mutable.LinkedHashSet.empty[String] // run ids of running streaming queries

  private var forgottenCounts = ExecutorCounts()
  private val lostExecutors = new Bounded[String, Unit](retainedLost)((executor, _) => {
    Seq(executors, holders).foreach(_ -= executor)
    spans.forget(executor)
    counts.remove(executor).foreach { case (_, lost) =>
      forgottenCounts += lost.copy(deferred = Set.empty, partitions = lost.partitions.storing(PartitionCounts()))
    }
  })
  private var cachedView = Option.empty[TopologyView]

  /** The next `view` is computed again. */
  def changed(): Unit = cachedView = None

  def lost(executor: String): Unit = lostExecutors(executor) = ()

  def view: TopologyView = cachedView.getOrElse {
    val forgotten = lostExecutors.forgotten
    val byExecutor = counts.iterator.map { case (executor, (_, executorCounts)) => executor -> executorCounts } ++
      Option.when(forgotten > 0)(Topology.Forgotten -> forgottenCounts)
    val view = TopologyView(
      description.id, description.name, kind, description.parent, state, started, ended, jobs, executors.toVector,
      byExecutor.to(VectorMap), lostExecutors.keys.toVector, unclosed.toVector, operators.views,
      spans.spans, spans.dropped, forgotten, operators.forgotten, lastJobs.values.toVector)
    cachedView = Some(view)
    view
  }
}

private[stagecrew] object Topology {
  /** How many of a topology's jobs are listed: those that began last. */
  val LastJobs = 50

  /** The name of the sum of executors that are no longer listed, and of the sum of such operators. */
  val Forgotten = "forgotten"
}
