package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import java.lang.ref.SoftReference
import org.apache.spark.SparkConf
import org.apache.spark.scheduler.{SparkListener, SparkListenerEvent}
import org.apache.spark.util.kvstore.KVIndex
import scala.annotation.meta.getter
import driver._, executor._, spark._, wire._

/** The last event of a topology or of the application, in the store of the History Server. */
private[stagecrew] final case class KeptState(
    @(KVIndex @getter) key: String, kind: String, id: String, version: Int, time: Long,
    capped: Boolean, trimmed: Boolean, body: String)

/** Stores the last event of each topology in one event log, for at most `retained` closed topologies. Skips events that
  * cannot be read. */
private[stagecrew] final class HistoryListener(store: TypedStore[KeptState], retained: Int) extends SparkListener {
  private val forgotten = scala.collection.mutable.HashSet.empty[String] // by key, because events may be repeated
  private val closed = new Bounded[String, Long](retained)((key, time) => {
    store.delete(key)
    forgotten += key
    store.write(KeptState(History.Forgotten, History.Forgotten, "", Snapshot.Version, time, capped = false,
      trimmed = false, forgotten.size.toString))
  })

  override def onOtherEvent(event: SparkListenerEvent): Unit = event match {
    case state: StagecrewState if state.kind == StagecrewState.Topology || state.kind == StagecrewState.Application =>
      Log.contained("reading an event of the event log")(keep(state))
    case _ => ()
  }

  private def keep(state: StagecrewState): Unit = {
    val id = Option(state.id).getOrElse("")
    val key = s"${state.kind} $id"
    val body = Json.parse(state.body) // throws if it is not JSON
    store.write(KeptState(key, state.kind, id, state.version, state.time, state.capped, state.trimmed, state.body))
    if (state.kind == StagecrewState.Topology && body.path("state").asText == "closed" &&
      body.path("kind").asText != DriverCrew.ApplicationKind) {
      closed.remove(key) // so that the next line adds the key as the newest one
      forgotten.remove(key)
      closed(key) = state.time
    }
  }
}

/** The tab in the History Server, registered in META-INF/services. */
final class HistoryPlugin extends HistoryTab[KeptState](Tab.Prefix, classOf[KeptState]) {
  override def listener(conf: SparkConf, store: TypedStore[KeptState]): SparkListener =
    new HistoryListener(store, retained(conf))

  /** An invalid setting must not prevent the History Server from showing applications. */
  private def retained(conf: SparkConf): Int =
    try new Settings(conf).retainedTopologies catch {
      case Failure(error) =>
        Log.log.warn("using the default settings", error)
        new Settings(new SparkConf(false)).retainedTopologies
    }

  override def pages(store: TypedStore[KeptState]): Seq[Page] = Tab.pages(History.reader(store))
}

private[stagecrew] object History {
  /** The kind of the entry that counts the closed topologies that are no longer kept. */
  val Forgotten = "forgotten"

  /** Reads the stored events once, because they do not change. The garbage collector may free the result. The next call
    * then reads the events again. */
  def reader(store: TypedStore[KeptState]): () => PageModel = {
    var read = new SoftReference[PageModel](null)
    () => synchronized {
      Option(read.get).getOrElse {
        val model = of(store.all)
        read = new SoftReference(model)
        model
      }
    }
  }

  def of(all: Seq[KeptState]): PageModel = {
    val (forgotten, states) = all.partition(_.kind == Forgotten)
    val (topologies, applications) = states.partition(_.kind == StagecrewState.Topology)
    val views = read(topologies)(body => Some(Json.as[TopologyView](body)))
    val rest = read(applications)(body => Some(Json.as[Snapshot](body))).lastOption
    val sums = read(states)(body => Option(body.get("totals")).map(Json.as[Totals](_)))
    // The newest sum has the highest counts. In older logs, only the event of the application contains the sum.
    val coordinators = read(states)(body => Option(body.get("coordinators")).map(Json.as[OperatorView](_)))
      .maxByOption { case (state, sum) => (sum.counted, state.time) }.map(_._2)
    val now = states.map(_.time).maxOption.getOrElse(0L)
    val ended = views.exists { case (_, view) => view.kind == DriverCrew.ApplicationKind && view.state == "closed" }
    val notes = views.map { case (state, view) => view.id ->
      notesOf(state, view.state == "closed", "The event log shows this topology") }.toMap ++
      rest.map { case (state, _) =>
        "" -> notesOf(state, ended, "The event log shows Python processes and the stored job") }
    PageModel(
      rest.fold(Snapshot(Vector.empty, Totals()))(_._2).copy(topologies = views.map(_._2).sortBy(_.started).toVector,
        totals = sums.map(_._2).foldLeft(Totals())(_ max _), coordinators = coordinators,
        forgottenTopologies = forgotten.map(_.body.toInt).sum),
      now, history = true, views.map { case (state, view) => view.id -> state.time }.toMap, notes)
  }

  /** Reads a value from the bodies of these events. Events without the value are left out. */
  private def read[T](states: Seq[KeptState])(value: ObjectNode => Option[T]): Seq[(KeptState, T)] =
    states.flatMap { state =>
      try value(Json.parse(state.body)).map(state -> _) catch {
        case Failure(error) =>
          Log.log.warn(s"the stored event of ${state.key} cannot be read", error)
          None
      }
    }

  private def notesOf(state: KeptState, ended: Boolean, subject: String): Seq[String] = Seq(
    Option.when(!ended)(s"$subject as of ${Show.date(state.time)}, before the end."),
    Option.when(state.capped)(s"The event log has reached its limit (${Settings.EventLogMaxEvents}): " +
      (if (ended) "events shortly before the end are missing." else "later events are missing.")),
    Option.when(state.trimmed)(
      "An event was too large for the event log: some spans, texts, coordinators or executors are missing."),
    Option.when(state.version > Snapshot.Version)(
      "A newer version of stagecrew wrote this event log: its new fields are not shown.")).flatten
}
