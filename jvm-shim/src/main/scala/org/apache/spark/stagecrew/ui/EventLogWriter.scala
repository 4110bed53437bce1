package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import java.nio.charset.StandardCharsets.UTF_8
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import org.apache.spark.scheduler.SparkListenerEvent
import driver._, executor._, wire._

/**
 * Stores parts of the driver's snapshots in the event log: the beginning and the end of a topology immediately, and
 * changes in between at most once per interval. A topology has at most `maxEvents` events before its end. Not
 * thread-safe.
 */
private[stagecrew] final class EventLogWriter(
    intervalMs: Long, maxEvents: Int, clock: () => Long, post: SparkListenerEvent => Unit) {
  import EventLogWriter._

  private val topologies = mutable.HashMap.empty[String, Stored[TopologyView]]
  private var application = Option.empty[Stored[Snapshot]]

  /** Called after each change: stores topologies that have begun or ended. */
  def changed(snapshot: Snapshot): Unit = snapshot.topologies.foreach { view =>
    val before = topologies.get(view.id)
    if (before.forall(stored => view.state == "closed" && stored.value.state != "closed"))
      storeTopology(view, snapshot, before)
  }

  /** Called periodically: stores changes that are due. */
  def tick(snapshot: Snapshot): Unit = {
    changed(snapshot)
    storeAll(snapshot, isFinal = false)
    val listed = snapshot.topologies.iterator.map(_.id).toSet
    topologies.filterInPlace((id, _) => listed(id))
  }

  /** Called at the end of the application: stores all changes. */
  def flush(snapshot: Snapshot): Unit = storeAll(snapshot, isFinal = true)

  private def storeAll(snapshot: Snapshot, isFinal: Boolean): Unit = {
    snapshot.topologies.foreach { view =>
      val before = topologies.get(view.id)
      // Dropped spans are no change, because the event already in the log still contains them.
      before.filter(stored => onlySpansDropped(stored.value, view)).foreach(_.value = view)
      if (before.forall(isDue(view, _, isFinal))) storeTopology(view, snapshot, before, isFinal)
    }
    // The number of forgotten topologies is not stored: the reader computes it from its own limit.
    val rest = snapshot.copy(topologies = Vector.empty, forgottenTopologies = 0, running = VectorMap.empty)
    if (application.forall(isDue(rest, _, isFinal)))
      application = Some(send(StagecrewState.Application, "", rest, application, isFinal)(EventLogWriter.body(rest)))
  }

  /** Whether a change must be stored now. If the limit prevents this, sets `leftOut`. The final state is stored even if
    * the limit has been reached, so that readers know whether changes were left out. */
  private def isDue[T <: AnyRef](value: T, before: Stored[T], isFinal: Boolean): Boolean = {
    def changed = !(before.value eq value) && before.value != value
    val full = before.number >= maxEvents
    if (isFinal) (full && !before.isFinal) || changed
    else if (before.leftOut || clock() - before.time < intervalMs || !changed) false
    else {
      before.leftOut = full
      !full
    }
  }

  private def storeTopology(
    view: TopologyView, snapshot: Snapshot, before: Option[Stored[TopologyView]], isFinal: Boolean = false): Unit =
    topologies(view.id) = send(StagecrewState.Topology, view.id, view, before, isFinal || view.state == "closed")(
      EventLogWriter.body(view, snapshot))

  private def send[T](kind: String, id: String, value: T, before: Option[Stored[T]], isFinal: Boolean)(
      body: (String, Boolean)): Stored[T] = {
    val stored = new Stored(value, clock(), before.fold(0)(_.number) + 1, isFinal, before.exists(_.leftOut))
    val capped = if (isFinal) stored.leftOut else stored.number >= maxEvents
    val (text, trimmed) = body
    post(StagecrewState(Snapshot.Version, kind, id, stored.time, stored.number, capped, trimmed, text))
    stored
  }
}

private[stagecrew] object EventLogWriter {
  /** The last event of a topology or of the application. `leftOut` says that the limit has left out later changes. */
  private final class Stored[T](
    var value: T, val time: Long, val number: Int, val isFinal: Boolean, var leftOut: Boolean)

  /** Whether a closed topology is unchanged, except that `SpanBook.trim` has dropped its spans. */
  private def onlySpansDropped(before: TopologyView, view: TopologyView): Boolean =
    view.state == "closed" && view.spans.isEmpty && before.spans.nonEmpty &&
      before.copy(spans = view.spans, spansDropped = view.spansDropped) == view

  /** The body of a topology's event, and whether it was trimmed. The body includes the current sums over all topologies
    * and coordinators, so the sums of a killed application are as recent as its topologies. */
  def body(view: TopologyView, snapshot: Snapshot): (String, Boolean) =
    fitting(view, TopologyLimits)(trimmed) { trimmedView =>
      val node = Json.tree(trimmedView).set[ObjectNode]("totals", Json.tree(snapshot.totals))
      snapshot.coordinators.foreach(all => node.set[ObjectNode]("coordinators", Json.tree(all)))
      node
    }

  /** The body of the application's event, and whether it was trimmed. */
  def body(rest: Snapshot): (String, Boolean) = fitting(rest, ApplicationLimits)(trimmed)(_.json)

  /** The JSON of a value, and whether the value was trimmed. The JSON is trimmed by the first limits that make it small
    * enough, otherwise by the last limits: it is always stored. */
  private def fitting[T, L](value: T, limits: Seq[L])(trim: (T, L) => T)(json: T => ObjectNode): (String, Boolean) =
    (Iterator(value) ++ limits.iterator.map(trim(value, _))).map(trimmed => Json.write(json(trimmed))).zipWithIndex
      .collectFirst {
        case (text, index) if index == limits.size || text.getBytes(UTF_8).length <= StagecrewState.MaxBytes =>
          text -> (index > 0)
      }.get

  /** The numbers of samples of each process, of processes, and of job steps. Without processes, long texts are cut. */
  private val ApplicationLimits =
    Seq((10, Int.MaxValue, 1000), (1, Int.MaxValue, 500), (1, 100, 333), (1, 100, 250), (0, 0, 100))

  private def trimmed(rest: Snapshot, limits: (Int, Int, Int)): Snapshot = {
    val (samples, processes, steps) = limits
    val fewer = rest.recovery.map(_.fewer(steps))
    rest.copy(
      processes = rest.processes.map(p => p.copy(samples = p.samples.takeRight(samples))).takeRight(processes),
      recovery = if (processes > 0) fewer else fewer.map(job => job.copy(
        job.facts.take(50).map { case (name, value) => Show.first(name, 100) -> Show.first(value, 200) },
        job.steps.map(step => step.copy(name = Show.first(step.name, 100))))))
  }

  /** What remains of a trimmed topology. `ids` and `length` limit the number and the lengths of executors' ids. */
  private final case class Limits(spans: Int, operators: Int, executors: Int, listeners: Int, ids: Int, length: Int)

  /** First older spans are left out, then all spans, then long texts, then executors and listeners, and finally
    * everything except the sums. The sums include executors, listeners and coordinators that are left out. */
  private val TopologyLimits: Seq[Limits] = {
    val all = Int.MaxValue
    Seq(Limits(500, all, all, all, all, all), Limits(0, all, all, all, all, all), Limits(0, 100, all, all, 1000, 1000),
      Limits(0, 100, 50, 20, 1000, 1000), Limits(0, 0, 0, 20, 500, 20))
  }

  private def trimmed(view: TopologyView, limits: Limits): TopologyView = {
    val spans = view.spans.takeRight(limits.spans)
    val fewer = view.copy(spans = spans, spansDropped = view.spansDropped + view.spans.size - spans.size)
    if (limits.ids == Int.MaxValue) fewer
    else {
      val (forgotten, known) = fewer.operators.partition(_.name == Topology.Forgotten)
      val (unlisted, listed) = known.splitAt(known.size - limits.operators)
      fewer.copy(name = Show.first(view.name, 1000), unclosed = view.unclosed.take(20).map(Show.first(_, 200)),
        askedBy = view.askedBy.take(limits.ids).map(Show.first(_, limits.length)),
        lostExecutors = view.lostExecutors.take(limits.ids).map(Show.first(_, limits.length)),
        forgottenOperators = view.forgottenOperators + unlisted.size,
        operators = listed.map(o => o.copy(name = Show.first(o.name, 200), waitsFor = Show.first(o.waitsFor, 200),
          lastError = Show.first(o.lastError, 500), progress = o.progress.take(20))) ++
          Option.when(forgotten.nonEmpty || unlisted.nonEmpty)(OperatorView.sum(forgotten ++ unlisted)),
        executors = limitedExecutors(fewer.executors, limits.executors).map { case (id, counts) =>
          id -> counts.copy(deferred = Set.empty,
            listeners = limitedListeners(counts.listeners, limits.listeners).map { l =>
              l.copy(name = Show.first(l.name, 200),
                lastError = if (l.scope == "jvm") Show.first(l.lastError, 500) else Show.last(l.lastError, 500),
                lastErrorLine = Show.first(l.lastErrorLine, Show.Length)) }) })
    }
  }

  /** At most `limit` executors, followed by the sum of the others as "forgotten". */
  private def limitedExecutors(executors: VectorMap[String, ExecutorCounts], limit: Int) = {
    val (listed, unlisted) = executors.removed(Topology.Forgotten).splitAt(limit)
    listed ++ (executors.get(Topology.Forgotten) ++ unlisted.values).reduceOption(_ + _).map(Topology.Forgotten -> _)
  }

  /** At most `limit` listeners, followed by the sum of the others as one more. */
  private def limitedListeners(listeners: Vector[ListenerCounts], limit: Int): Vector[ListenerCounts] = {
    val (listed, unlisted) = listeners.splitAt(limit)
    listed ++ unlisted.reduceOption(_ + _).map(_.copy(index = -1, name = s"${unlisted.size} others"))
  }
}
