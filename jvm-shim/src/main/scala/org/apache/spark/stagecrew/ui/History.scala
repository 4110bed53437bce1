package org.apache.spark.stagecrew
package ui

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

/** Handles the events of one event log. An event that cannot be read is skipped. */
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
      closed.remove(key) // adds it again as the newest one
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
    try new Settings(conf).retainedTopologies
    catch { case Failure(error) => Log.log.warn("using the default settings", error);
      new Settings(new SparkConf(false)).retainedTopologies }

  override def pages(store: TypedStore[KeptState]): Seq[Page] = Tab.pages(History.reader(store))
}

private[stagecrew] object History {
  /** The kind of the entry that counts the closed topologies that are no longer kept. */
  val Forgotten = "forgotten"

  /** Reads the stored events once, because they do not change. The garbage collector may free the result, and the next
    * call then reads them again. */
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
    val views = states.filter(_.kind == StagecrewState.Topology).flatMap(state =>
      parsed(state)(Json.as[TopologyView](_)).map(state -> _))
    val sums = states.flatMap(state =>
      parsed(state)(node => Option(node.get("totals")).map(Json.as[Totals](_)))).flatten
    // The newest sum has the highest counts. In older logs, only the event of the application contains the sum.
    val coordinators = states.flatMap(state =>
      parsed(state)(node => Option(node.get("coordinators")).map(Json.as[OperatorView](_) -> state.time))).flatten
      .maxByOption { case (sum, time) => (sum.counted, time) }.map(_._1)
    val rest = states.filter(_.kind == StagecrewState.Application).flatMap(state =>
      parsed(state)(Json.as[Snapshot](_)).map(state -> _)).lastOption
    val now = states.map(_.time).maxOption.getOrElse(0L)
    val ended = views.exists { case (_, view) => view.kind == DriverCrew.ApplicationKind && view.state == "closed" }
    val notes = views.map { case (state, view) => view.id ->
      notesOf(state, view.state == "closed", "The event log shows this topology") }.toMap ++
      rest.map { case (state, _) =>
        "" -> notesOf(state, ended, "The event log shows Python processes and the stored job") }
    PageModel(
      rest.fold(Snapshot(Vector.empty, Totals()))(_._2).copy(topologies = views.map(_._2).sortBy(_.started).toVector,
          totals = sums.foldLeft(Totals())(_ max _), coordinators = coordinators,
        forgottenTopologies = forgotten.map(_.body.toInt).sum),
      now, history = true, views.map { case (state, view) => view.id -> state.time }.toMap, notes)
  }

  private def parsed[T](state: KeptState)(read: com.fasterxml.jackson.databind.node.ObjectNode => T): Option[T] =
    try Some(read(Json.parse(state.body)))
    catch { case Failure(error) =>
      Log.log.warn(s"the stored event of ${state.key} cannot be read", error); None }

  private def notesOf(state: KeptState, ended: Boolean, subject: String): Seq[String] = Seq(
    if (ended) None else Some(s"$subject as of ${Show.date(state.time)}, before the end."),
    if (!state.capped) None
    else Some(s"The event log has reached its limit (${Settings.EventLogMaxEvents}): " +
      (if (ended) "events shortly before the end are missing." else "later events are missing.")),
    if (!state.trimmed) None
    else Some("An event was too large for the event log: some spans, texts, coordinators or executors are missing."),
    if (state.version > Snapshot.Version)
      Some("A newer version of stagecrew wrote this event log: its new fields are not shown.") else None).flatten
}
