package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import scala.collection.immutable.VectorMap
import driver._, executor._, wire._

/**
 * The data that the UI, the metrics and the reports show, and that the event log stores. `Json` writes it, so the field
 * names of all classes in this file are part of the format.
 *
 * @param totals sums over all topologies, including those that are no longer listed
 * @param coordinators the sum over all coordinators
 * @param forgottenTopologies the number of closed topologies that are no longer listed
 * @param running the running hooks, and the running tasks of named topologies, by the topology's id. They are not in
 * the event log
 */
final case class Snapshot(
    topologies: Vector[TopologyView], totals: Totals, processes: Vector[ProcessView] = Vector.empty,
    recovery: Option[RecoveryView] = None, coordinators: Option[OperatorView] = None, forgottenTopologies: Int = 0,
    running: VectorMap[String, Vector[Span]] = VectorMap.empty) {
  private[stagecrew] def json: ObjectNode = Json.tree(this).put("version", Snapshot.Version)
}

object Snapshot {
  /** The version of the JSON. It changes when the meaning of a field changes, not when a field is added. */
  val Version = 1
}

/**
 * An immutable copy of the state of one topology. Times are milliseconds since the epoch, or 0 if not known yet.
 *
 * @param askedBy the executors that ran the topology's tasks
 * @param spansDropped the number of recorded spans that are not in `spans`
 * @param forgottenExecutors the number of lost executors that are no longer listed. Their sum is in `executors`, as
 * "forgotten"
 * @param forgottenOperators the number of operators that are no longer listed. Their sum is in `operators`, as
 * "forgotten"
 * @param lastJobs the last jobs that began in the topology, or in a topology inside it
 */
final case class TopologyView(
    id: String, name: String, kind: String, parent: Option[String], state: String, started: Long, ended: Long,
    jobs: Int, askedBy: Vector[String], executors: VectorMap[String, ExecutorCounts], lostExecutors: Vector[String],
    unclosed: Vector[String], operators: Vector[OperatorView] = Vector.empty, spans: Vector[Span] = Vector.empty,
    spansDropped: Long = 0, forgottenExecutors: Int = 0, forgottenOperators: Int = 0,
    lastJobs: Vector[SparkJob] = Vector.empty) {

  /** The number of operator uses. Names of operator uses end with a number, so no use has the name "forgotten". */
  def coordinators: Int = operators.count(_.name != Topology.Forgotten) + forgottenOperators
}

/** A job of Spark, with its stages, and with the SQL execution that it belongs to, or -1. */
final case class SparkJob(id: Int, stages: Vector[Int], execution: Long)

/** A timed activity on an executor: "open" or "close" of a listener, or a "task". `ended` is 0 while it is running. A
  * span that is `lost` ended with its process or its executor; it has also failed. */
final case class Span(
    executor: String, kind: String, name: String, started: Long, ended: Long, failed: Boolean, lost: Boolean = false)

/** Percentiles of `count` durations, in microseconds. */
final case class Percentiles(count: Long = 0, p50: Long = 0, p95: Long = 0, p99: Long = 0, max: Long = 0)

/**
 * The statistics of one use of an operator, as the driver's Python reports them. They continue when the coordinator is
 * reset.
 *
 * @param kind "coordinator", "splits", "commit", "supersteps" or "alignment"
 * @param state "active", "failed" or "closed"
 * @param live running evaluations
 * @param queued messages in the queue of the coordinator
 * @param replies durations from the arrival of a request on the driver to the reply
 * @param acknowledgements durations from sending an event to the acknowledgement that it is in the mailbox
 * @param waitsFor describes what the coordinator or its tasks wait for, and since when. Empty if they do not wait
 * @param progress for example "splits done" -> "3"
 */
final case class OperatorView(
    name: String, kind: String, state: String, live: Long, finished: Long, failed: Long, abandoned: Long, resets: Long,
    eventsIn: Long, eventsOut: Long, requests: Long, queued: Long, replies: Percentiles, acknowledgements: Percentiles,
    waitsFor: String, progress: VectorMap[String, String], lastError: String) {

  /** The sum of the counters that never decrease. */
  private[stagecrew] def counted: Long = finished + failed + abandoned + resets + eventsIn + eventsOut + requests
}

object OperatorView {
  /** The sum of the counts of several operators that are not listed. Durations and texts are left out. */
  private[stagecrew] def sum(views: Iterable[OperatorView]): OperatorView = {
    def of(f: OperatorView => Long): Long = views.iterator.map(f).sum
    OperatorView(Topology.Forgotten, Topology.Forgotten, "", of(_.live), of(_.finished), of(_.failed), of(_.abandoned),
      of(_.resets), of(_.eventsIn), of(_.eventsOut), of(_.requests), of(_.queued), Percentiles(), Percentiles(), "",
      VectorMap.empty, "")
  }
}

/** A Python process of an executor. Its role is "worker" or "agent", or "daemon" for a daemon that cannot sample, which
  * `problem` explains. `ended` is 0 while the process is running. `topology` (an id) and `task` are those that it was
  * running at the last sample, if it has listeners. */
final case class ProcessView(
    executor: String, host: String, pid: Long, role: String, started: Long, ended: Long, samples: Vector[Sample],
    problem: String = "", topology: String = "", task: String = "") {
  private[stagecrew] def key: (String, Long, Long) = (executor, pid, started)
}

/** One sample of a process: resident memory in bytes, CPU since the previous sample in thousandths of a core, threads,
  * and open file descriptors. */
final case class Sample(time: Long, rss: Long, cpu: Long, threads: Long, files: Long)

/** The stored job that this application runs: facts in order, such as "term" -> "3", and steps. `forgottenSteps` is the
  * number of steps that are no longer listed. */
final case class RecoveryView(facts: VectorMap[String, String], steps: Vector[StepView], forgottenSteps: Int = 0) {
  /** This job with at most `limit` of its steps: running steps first, then the last of the other steps. */
  private[stagecrew] def fewer(limit: Int): RecoveryView = {
    val (running, ended) = steps.indices.partition(steps(_).ended == 0)
    val runs = running.take(limit)
    val kept = (runs ++ ended.takeRight(limit - runs.size)).sorted.map(steps).toVector
    copy(steps = kept, forgottenSteps = forgottenSteps + steps.size - kept.size)
  }
}

/** A step of a stored job: "running", "finished", "failed", or "found" if an earlier run had stored its result. */
final case class StepView(name: String, state: String, started: Long, ended: Long)
