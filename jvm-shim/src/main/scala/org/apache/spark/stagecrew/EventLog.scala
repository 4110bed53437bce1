package org.apache.spark.stagecrew

import com.fasterxml.jackson.annotation.JsonIgnoreProperties
import com.fasterxml.jackson.databind.node.ObjectNode
import java.nio.charset.StandardCharsets.UTF_8
import scala.collection.mutable
import org.apache.spark.scheduler.SparkListenerEvent

/**
 * What the event log keeps: the whole state of one topology, or what there is of the application beside them, as of this time.
 * Later ones of the same `kind` and `id` replace earlier ones; fields are added, never changed. In what others write, or a
 * newer version, anything may be missing.
 *
 * @param number how many there are of it up to this one
 * @param capped no more is stored of it until it ends; of what has ended: something in between was not stored
 * @param trimmed something was left out of the body, which was too large
 */
@JsonIgnoreProperties(ignoreUnknown = true)
final case class StagecrewState(
    version: Int, kind: String, id: String, time: Long, number: Int, capped: Boolean, trimmed: Boolean, body: String) extends SparkListenerEvent

private[stagecrew] object StagecrewState {
  val Topology = "topology"
  val Application = "application" // processes and the stored job

  /** How large a body may be in UTF-8; one that cannot be made so small is not stored. */
  val MaxBytes: Int = 256 * 1024
}

/**
 * Decides what of the driver's snapshots goes to the event log, and when: the beginning and the end of a topology at once,
 * changes in between once per interval and at most so often. Of one thread.
 */
private[stagecrew] final class EventLog(intervalMs: Long, maxEvents: Int, clock: () => Long, post: SparkListenerEvent => Unit) {
  import EventLog._

  private val topologies = mutable.HashMap.empty[String, Stored[TopologyView]]
  private var application = Option.empty[Stored[Snapshot]]

  /** After a change: what has begun or ended is stored. */
  def changed(snapshot: Snapshot): Unit = snapshot.topologies.foreach { view =>
    val before = topologies.get(view.id)
    if (before.forall(stored => view.state == "closed" && stored.what.state != "closed")) store(view, snapshot.totals, before)
  }

  /** From time to time: what has changed since it was stored, and is due. */
  def tick(snapshot: Snapshot): Unit = {
    changed(snapshot)
    store(snapshot, last = false)
    topologies.filterInPlace((id, _) => snapshot.topologies.exists(_.id == id))
  }

  /** At the end: all that has changed since it was stored. */
  def flush(snapshot: Snapshot): Unit = store(snapshot, last = true)

  private def store(snapshot: Snapshot, last: Boolean): Unit = {
    snapshot.topologies.foreach { view =>
      val before = topologies.get(view.id)
      if (before.forall(due(view, _, last))) store(view, snapshot.totals, before, last)
    }
    val rest = snapshot.copy(topologies = Vector.empty)
    if (application.forall(due(rest, _, last))) {
      application = Some(send(StagecrewState.Application, "", rest, application, last)(EventLog.body(rest)))
    }
  }

  /** Whether this is to be stored; that it is not for its number is noted. What was said to be the last before its end is stored
    * at its end in any case, so that it is known whether something was between. */
  private def due[T <: AnyRef](what: T, before: Stored[T], last: Boolean): Boolean = {
    def changed = !(before.what eq what) && before.what != what
    val full = before.number >= maxEvents
    if (last) (full && !before.ended) || changed
    else if (before.leftOut || clock() - before.time < intervalMs || !changed) false
    else {
      before.leftOut = full
      !full
    }
  }

  private def store(view: TopologyView, totals: Totals, before: Option[Stored[TopologyView]], last: Boolean = false): Unit =
    topologies(view.id) = send(StagecrewState.Topology, view.id, view, before, last || view.state == "closed")(EventLog.body(view, totals))

  private def send[T](kind: String, id: String, what: T, before: Option[Stored[T]], ends: Boolean)(body: => Option[(String, Boolean)]): Stored[T] = {
    val stored = new Stored(what, clock(), before.fold(0)(_.number) + 1, ends, before.exists(_.leftOut))
    val capped = if (ends) stored.leftOut else stored.number >= maxEvents
    body.foreach { case (text, trimmed) => post(StagecrewState(Snapshot.Version, kind, id, stored.time, stored.number, capped, trimmed, text)) }
    stored
  }
}

private[stagecrew] object EventLog {
  private final class Stored[T](val what: T, val time: Long, val number: Int, val ended: Boolean, var leftOut: Boolean)

  /** The body of an event, and whether something was left out. With the sums of all topologies at this time: those of an application
    * that is killed are never older than what its topologies say. */
  def body(view: TopologyView, totals: Totals): Option[(String, Boolean)] =
    smallest(view)(_.json.set[ObjectNode]("totals", totals.json), trimmed)

  def body(rest: Snapshot): Option[(String, Boolean)] = smallest(rest)(_.json, (snapshot, step) =>
    snapshot.copy(processes = snapshot.processes.map(p => p.copy(samples = p.samples.takeRight(if (step == 1) 10 else 1)))
      .takeRight(if (step < 3) Int.MaxValue else 100), recovery = snapshot.recovery.map(r => r.copy(steps = r.steps.takeRight(1000 / step)))))

  private def smallest[T](what: T)(json: T => ObjectNode, less: (T, Int) => T): Option[(String, Boolean)] =
    (0 to 4).iterator.map(step => Json.write(json(if (step == 0) what else less(what, step))) -> (step > 0))
      .find(_._1.getBytes(UTF_8).length <= StagecrewState.MaxBytes)

  /** Less of a topology: first its older spans, then all, then long texts, then what only some executors tell. */
  private def trimmed(view: TopologyView, step: Int): TopologyView = {
    val spans = view.spans.takeRight(if (step == 1) 500 else 0)
    val fewer = view.copy(spans = spans, spansDropped = view.spansDropped + view.spans.size - spans.size)
    if (step <= 2) fewer
    else {
      val executors = if (step == 3) fewer.executors else fewer.executors.take(50)
      fewer.copy(name = Show.cut(view.name, 1000), unclosed = view.unclosed.take(20).map(Show.cut(_, 200)), askedBy = view.askedBy.take(1000),
        lostExecutors = view.lostExecutors.take(1000), operators = view.operators.take(100).map(o => o.copy(
          name = Show.cut(o.name, 200), waitsFor = Show.cut(o.waitsFor, 200), lastError = Show.cut(o.lastError, 500), progress = o.progress.take(20))),
        executors = executors.map { case (id, counts) => id -> counts.copy(deferred = Set.empty, listeners =
          counts.listeners.toSeq.sortBy(_._1).take(if (step == 3) Int.MaxValue else 20).map { case (index, one) =>
            index -> one.copy(name = Show.cut(one.name, 200), lastError = Show.cut(one.lastError, 500)) }.toMap) })
    }
  }
}
