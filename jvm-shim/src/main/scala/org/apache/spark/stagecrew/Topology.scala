package org.apache.spark.stagecrew

import java.util.concurrent.CompletableFuture
import scala.collection.mutable

/** What the driver knows of one topology. Of its loop's thread; `view` is what others see. */
private[stagecrew] final class Topology(var description: Description, val kind: String) {
  var state = "active"
  val started: Long = System.currentTimeMillis()
  var ended = 0L
  var cancelled = Option.empty[String]
  val executors = mutable.LinkedHashSet.empty[String] // which asked for it
  val holders = mutable.LinkedHashSet.empty[String] // which have, or may have, something stored of it without having asked
  val pending = mutable.LinkedHashSet.empty[String] // which have not said that it is closed there
  val lostExecutors = mutable.LinkedHashSet.empty[String]
  val caches = mutable.LinkedHashSet.empty[Int] // which the driver is to release
  val cachedOn = mutable.LinkedHashSet.empty[String] // executors that had blocks of these
  val left = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks] // with external shuffle services, to be deleted
  var releasing = false
  val unclosed = mutable.ArrayBuffer.empty[String]
  var waiters = List.empty[CompletableFuture[Unit]]
  val counts = mutable.LinkedHashMap.empty[String, (Long, ExecutorCounts)]
  var jobs = 0
  val operators = new OperatorBook
  val spans = new SpanBook
  val executions = mutable.LinkedHashSet.empty[Long]
  val queries = mutable.LinkedHashSet.empty[String]

  private var forgotten = 0 // lost executors
  private var folded = ExecutorCounts() // of these

  private var shown = Option.empty[TopologyView]

  def changed(): Unit = shown = None

  /** An executor is gone. Of those that are, the last so many are known by themselves, the others in the sums only. */
  def lost(executor: String, retained: Int): Unit = {
    lostExecutors += executor
    while (lostExecutors.size > retained) {
      val oldest = lostExecutors.head
      Seq(lostExecutors, executors, holders).foreach(_ -= oldest)
      spans.forget(oldest)
      counts.remove(oldest).foreach { case (_, of) => folded += of.copy(deferred = Set.empty, stored = Stored()) }
      forgotten += 1
    }
  }

  def view: TopologyView = shown.getOrElse {
    val view = TopologyView(
      description.id, description.name, kind, description.parent, state, started, ended, jobs,
      executors.toVector, counts.view.mapValues(_._2).toVector ++ Option.when(forgotten > 0)(Topology.Forgotten -> folded), lostExecutors.toVector, unclosed.toVector,
      operators.views, spans.spans, spans.dropped, forgotten, operators.forgotten)
    shown = Some(view)
    view
  }
}

private[stagecrew] object Topology {
  /** Under this name stand the counts of all lost executors that are not known by themselves any more, and of operators. */
  val Forgotten = "forgotten"
}
