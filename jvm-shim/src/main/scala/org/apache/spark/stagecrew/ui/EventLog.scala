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
 * changes in between once per interval, up to a limit of `maxEvents` events. Not thread-safe.
 */
private[stagecrew] final class EventLog(
    intervalMs: Long, maxEvents: Int, clock: () => Long, post: SparkListenerEvent => Unit) {
  import EventLog._

  private val topologies = mutable.HashMap.empty[String, Stored[TopologyView]]
  private var application = Option.empty[Stored[Snapshot]]

  /** Called after each change: stores topologies that have begun or ended. */
  def changed(snapshot: Snapshot): Unit = snapshot.topologies.foreach { view =>
    val before = topologies.get(view.id)
    if (before.forall(stored => view.state == "closed" && stored.value.state != "closed")) store(view, snapshot, before)
  }

  /** Called periodically: stores changes that are due. */
  def tick(snapshot: Snapshot): Unit = {
    changed(snapshot)
    store(snapshot, last = false)
    val known = snapshot.topologies.iterator.map(_.id).toSet
    topologies.filterInPlace((id, _) => known(id))
  }

  /** Called at the end of the application: stores all changes. */
  def flush(snapshot: Snapshot): Unit = store(snapshot, last = true)

  private def store(snapshot: Snapshot, last: Boolean): Unit = {
    snapshot.topologies.foreach { view =>
      val before = topologies.get(view.id)
      before.filter(stored => withoutSpans(stored.value, view)).foreach(_.value = view) // the stored view has the spans
      if (before.forall(due(view, _, last))) store(view, snapshot, before, last)
    }
    // The number of forgotten topologies is not stored, because the reader's settings limit how many it lists.
    val rest = snapshot.copy(topologies = Vector.empty, forgottenTopologies = 0)
    if (application.forall(due(rest, _, last))) {
      application = Some(send(StagecrewState.Application, "", rest, application, last)(EventLog.body(rest)))
    }
  }

  /** Whether a change must be stored now. If the limit prevents this, sets `leftOut`. The last state is stored even
    * after the limit, so that readers know whether changes were left out. */
  private def due[T <: AnyRef](value: T, before: Stored[T], last: Boolean): Boolean = {
    def changed = !(before.value eq value) && before.value != value
    val full = before.number >= maxEvents
    if (last) (full && !before.ended) || changed
    else if (before.leftOut || clock() - before.time < intervalMs || !changed) false
    else {
      before.leftOut = full
      !full
    }
  }

  private def store(
    view: TopologyView, sums: Snapshot, before: Option[Stored[TopologyView]], last: Boolean = false): Unit = {
    val ends = last || view.state == "closed"
    topologies(view.id) = send(StagecrewState.Topology, view.id, view, before, ends)(EventLog.body(view, sums))
  }

  private def send[T](kind: String, id: String, value: T, before: Option[Stored[T]], ends: Boolean)(
      body: => (String, Boolean)): Stored[T] = {
    val stored = new Stored(value, clock(), before.fold(0)(_.number) + 1, ends, before.exists(_.leftOut))
    val capped = if (ends) stored.leftOut else stored.number >= maxEvents
    val (text, trimmed) = body
    post(StagecrewState(Snapshot.Version, kind, id, stored.time, stored.number, capped, trimmed, text))
    stored
  }
}

private[stagecrew] object EventLog {
  private final class Stored[T](var value: T, val time: Long, val number: Int, val ended: Boolean, var leftOut: Boolean)

  /** Whether a closed topology is unchanged, except that `SpanBook.trim` has dropped its spans. */
  private def withoutSpans(before: TopologyView, view: TopologyView): Boolean =
    view.state == "closed" && view.spans.isEmpty && before.spans.nonEmpty &&
      before.copy(spans = view.spans, spansDropped = view.spansDropped) == view

  /** The body of an event, and whether it was trimmed. It includes the current sums over all topologies and
    * coordinators, so the sums of a killed application are as recent as its topologies. */
  def body(view: TopologyView, sums: Snapshot): (String, Boolean) = smallest(view)({ trimmedView =>
    val node = Json.tree(trimmedView).set[ObjectNode]("totals", Json.tree(sums.totals))
    sums.coordinators.foreach(all => node.set[ObjectNode]("coordinators", Json.tree(all)))
    node
  }, trimmed)

  def body(rest: Snapshot): (String, Boolean) = smallest(rest)(_.json, trimmed)

  /** The last step of trimming. Its result is always small enough, and is stored unconditionally. */
  private val LastStep = 5

  private def smallest[T](value: T)(json: T => ObjectNode, less: (T, Int) => T): (String, Boolean) =
    (0 to LastStep).iterator.map(step => Json.write(json(if (step == 0) value else less(value, step))) -> step)
      .collectFirst {
        case (text, step) if step == LastStep || text.getBytes(UTF_8).length <= StagecrewState.MaxBytes =>
          text -> (step > 0)
      }.get

  /** Trims the application: first older samples and steps, then some processes, then all processes and long texts. */
  private def trimmed(rest: Snapshot, step: Int): Snapshot =
    if (step < LastStep) rest.copy(
      processes = rest.processes.map(p => p.copy(samples = p.samples.takeRight(if (step == 1) 10 else 1)))
        .takeRight(if (step < 3) Int.MaxValue else 100),
      recovery = rest.recovery.map(_.fewer(1000 / step)))
    else rest.copy(processes = Vector.empty, recovery = rest.recovery.map(_.fewer(100)).map(r => r.copy(
      r.facts.take(50).map { case (name, value) => Show.cut(name, 100) -> Show.cut(value, 200) },
      r.steps.map(step => step.copy(name = Show.cut(step.name, 100))))))

  /** Trims a topology: first older spans, then all spans, then long texts, then executors and listeners, and finally
    * everything except the sums. The sums include executors, listeners and coordinators that are left out. */
  private def trimmed(view: TopologyView, step: Int): TopologyView = {
    val spans = view.spans.takeRight(if (step == 1) 500 else 0)
    val fewer = view.copy(spans = spans, spansDropped = view.spansDropped + view.spans.size - spans.size)
    if (step <= 2) fewer
    else {
      val (executors, listeners, operators) =
        if (step == 3) (Int.MaxValue, Int.MaxValue, 100) else if (step < LastStep) (50, 20, 100) else (0, 20, 0)
      val (ids, length) = if (step < LastStep) (1000, 1000) else (500, 20)
      val (sums, known) = fewer.operators.partition(_.name == Topology.Forgotten)
      val (unlisted, listed) = known.splitAt(known.size - operators)
      fewer.copy(name = Show.cut(view.name, 1000), unclosed = view.unclosed.take(20).map(Show.cut(_, 200)),
        askedBy = view.askedBy.take(ids).map(Show.cut(_, length)),
        lostExecutors = view.lostExecutors.take(ids).map(Show.cut(_, length)),
        forgottenOperators = view.forgottenOperators + unlisted.size,
        operators = listed.map(o => o.copy(name = Show.cut(o.name, 200), waitsFor = Show.cut(o.waitsFor, 200),
          lastError = Show.cut(o.lastError, 500), progress = o.progress.take(20))) ++
          Option.when(sums.nonEmpty || unlisted.nonEmpty)(OperatorView.sum(sums ++ unlisted)),
        executors = limitedExecutors(fewer.executors, executors).map { case (id, counts) =>
          id -> counts.copy(deferred = Set.empty, listeners = limitedListeners(counts.listeners, listeners).map { l =>
            l.copy(name = Show.cut(l.name, 200),
              lastError = if (l.scope == "jvm") Show.cut(l.lastError, 500) else Show.end(l.lastError, 500),
              lastErrorLine = Show.cut(l.lastErrorLine, Show.Length)) }) })
    }
  }

  /** At most `limit` executors, and the sum of the others as "forgotten". */
  private def limitedExecutors(executors: VectorMap[String, ExecutorCounts], limit: Int) = {
    val (listed, unlisted) = executors.removed(Topology.Forgotten).splitAt(limit)
    listed ++ (executors.get(Topology.Forgotten) ++ unlisted.values).reduceOption(_ + _).map(Topology.Forgotten -> _)
  }

  /** At most `limit` listeners, and the sum of the others as another one. */
  private def limitedListeners(listeners: Vector[ListenerCounts], limit: Int): Vector[ListenerCounts] = {
    val (listed, unlisted) = listeners.splitAt(limit)
    listed ++ unlisted.reduceOption(_ + _).map(_.copy(index = -1, name = s"${unlisted.size} others"))
  }
}
