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

  /** How large a body may be in UTF-8: what is larger is stored with less. */
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
    if (before.forall(stored => view.state == "closed" && stored.what.state != "closed")) store(view, snapshot, before)
  }

  /** From time to time: what has changed since it was stored, and is due. */
  def tick(snapshot: Snapshot): Unit = {
    changed(snapshot)
    store(snapshot, last = false)
    val known = snapshot.topologies.iterator.map(_.id).toSet
    topologies.filterInPlace((id, _) => known(id))
  }

  /** At the end: all that has changed since it was stored. */
  def flush(snapshot: Snapshot): Unit = store(snapshot, last = true)

  private def store(snapshot: Snapshot, last: Boolean): Unit = {
    snapshot.topologies.foreach { view =>
      val before = topologies.get(view.id)
      before.filter(stored => withoutSpans(stored.what, view)).foreach(_.what = view) // what is stored has more
      if (before.forall(due(view, _, last))) store(view, snapshot, before, last)
    }
    // That another was forgotten is nothing to store: who reads it lists as many as its own settings say.
    val rest = snapshot.copy(topologies = Vector.empty, forgottenTopologies = 0)
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

  private def store(view: TopologyView, sums: Snapshot, before: Option[Stored[TopologyView]], last: Boolean = false): Unit =
    topologies(view.id) = send(StagecrewState.Topology, view.id, view, before, last || view.state == "closed")(EventLog.body(view, sums))

  private def send[T](kind: String, id: String, what: T, before: Option[Stored[T]], ends: Boolean)(body: => (String, Boolean)): Stored[T] = {
    val stored = new Stored(what, clock(), before.fold(0)(_.number) + 1, ends, before.exists(_.leftOut))
    val capped = if (ends) stored.leftOut else stored.number >= maxEvents
    val (text, trimmed) = body
    post(StagecrewState(Snapshot.Version, kind, id, stored.time, stored.number, capped, trimmed, text))
    stored
  }
}

private[stagecrew] object EventLog {
  private final class Stored[T](var what: T, val time: Long, val number: Int, val ended: Boolean, var leftOut: Boolean)

  /** Whether a closed topology is as it was, but that its spans are not kept any more (`SpanBook.trim`). */
  private def withoutSpans(before: TopologyView, view: TopologyView): Boolean = view.state == "closed" && view.spans.isEmpty &&
    before.spans.nonEmpty && before.copy(spans = view.spans, spansDropped = view.spansDropped) == view

  /** The body of an event, and whether something was left out. With the sums of all topologies and coordinators at this time: those of
    * an application that is killed are never older than what its topologies say. */
  def body(view: TopologyView, sums: Snapshot): (String, Boolean) = smallest(view)({ one =>
    val node = one.json.set[ObjectNode]("totals", sums.totals.json)
    sums.coordinators.foreach(all => node.set[ObjectNode]("coordinators", all.json))
    node
  }, trimmed)

  def body(rest: Snapshot): (String, Boolean) = smallest(rest)(_.json, trimmed)

  /** The last step of what is left out. What it leaves is small, whatever it is of: it is stored in any case. */
  private val Least = 5

  private def smallest[T](what: T)(json: T => ObjectNode, less: (T, Int) => T): (String, Boolean) =
    (0 until Least).iterator.map(step => Json.write(json(if (step == 0) what else less(what, step))) -> (step > 0))
      .find(_._1.getBytes(UTF_8).length <= StagecrewState.MaxBytes).getOrElse(Json.write(json(less(what, Least))) -> true)

  /** Less of the application: first older samples and steps, then processes, then all of them and long texts. */
  private def trimmed(rest: Snapshot, step: Int): Snapshot =
    if (step < Least) rest.copy(
      processes = rest.processes.map(p => p.copy(samples = p.samples.takeRight(if (step == 1) 10 else 1))).takeRight(if (step < 3) Int.MaxValue else 100),
      recovery = rest.recovery.map(RecoveryView.fewer(_, 1000 / step)))
    else rest.copy(processes = Vector.empty, recovery = rest.recovery.map(RecoveryView.fewer(_, 100)).map(r => r.copy(
      r.facts.take(50).map { case (name, value) => Show.cut(name, 100) -> Show.cut(value, 200) },
      r.steps.map(one => one.copy(name = Show.cut(one.name, 100))))))

  /** Less of a topology: first its older spans, then all, then long texts, then what only some executors tell, then all but sums.
    * Of executors, listeners and coordinators that are left out the sums stay. */
  private def trimmed(view: TopologyView, step: Int): TopologyView = {
    val spans = view.spans.takeRight(if (step == 1) 500 else 0)
    val fewer = view.copy(spans = spans, spansDropped = view.spansDropped + view.spans.size - spans.size)
    if (step <= 2) fewer
    else {
      val (executors, listeners, operators) = if (step == 3) (Int.MaxValue, Int.MaxValue, 100) else if (step < Least) (50, 20, 100) else (0, 20, 0)
      val (ids, length) = if (step < Least) (1000, 1000) else (500, 20)
      val (sums, known) = fewer.operators.partition(_.name == Topology.Forgotten)
      val (unlisted, listed) = known.splitAt(known.size - operators)
      fewer.copy(
        name = Show.cut(view.name, 1000), unclosed = view.unclosed.take(20).map(Show.cut(_, 200)),
        askedBy = view.askedBy.take(ids).map(Show.cut(_, length)), lostExecutors = view.lostExecutors.take(ids).map(Show.cut(_, length)),
        forgottenOperators = view.forgottenOperators + unlisted.size,
        operators = listed.map(o => o.copy(name = Show.cut(o.name, 200), waitsFor = Show.cut(o.waitsFor, 200), lastError = Show.cut(o.lastError, 500),
          progress = o.progress.take(20))) ++ Option.when(sums.nonEmpty || unlisted.nonEmpty)(OperatorView.sum(sums ++ unlisted)),
        executors = some(fewer.executors, executors).map { case (id, counts) =>
          id -> counts.copy(deferred = Set.empty, listeners = some(counts.listeners, listeners).map { case (index, one) =>
            index -> one.copy(name = Show.cut(one.name, 200),
              lastError = if (one.scope == "jvm") Show.cut(one.lastError, 500) else Show.errorEnd(one.lastError, 500)) }) })
    }
  }

  /** So many executors, and the sums of the others under one name. */
  private def some(executors: Vector[(String, ExecutorCounts)], most: Int): Vector[(String, ExecutorCounts)] = {
    val (sums, known) = executors.partition(_._1 == Topology.Forgotten)
    val (listed, unlisted) = known.splitAt(most)
    listed ++ (sums ++ unlisted).map(_._2).reduceOption(_ + _).map(Topology.Forgotten -> _)
  }

  /** So many listeners, and the sums of the others as one. */
  private def some(listeners: Map[Int, ListenerCounts], most: Int): Map[Int, ListenerCounts] = {
    val (listed, unlisted) = listeners.toSeq.sortBy(_._1).splitAt(most)
    (listed ++ unlisted.map(_._2).reduceOption(_ + _).map(sum => -1 -> sum.copy(name = s"${unlisted.size} others"))).toMap
  }
}
