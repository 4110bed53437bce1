package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.{ArrayNode, ObjectNode}
import scala.jdk.CollectionConverters._

/**
 * All that is shown: what the UI, metrics and reports read, and the event log keeps. `totals` are of all topologies, those that
 * are forgotten too. JSON of it is read back whole; what an older one lacks is nothing, what a newer one has more is ignored.
 */
final case class Snapshot(
    topologies: Vector[TopologyView],
    totals: Totals,
    processes: Vector[ProcessView] = Vector.empty,
    recovery: Option[RecoveryView] = None,
    coordinators: Option[OperatorView] = None, // the sum over all that there were
    forgottenTopologies: Int = 0) { // closed ones that are not listed any more

  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj().put("version", Snapshot.Version)
    node.set[ObjectNode]("totals", totals.json)
    Json.put(node, "topologies", topologies.map(_.json))
    Json.put(node, "processes", processes.map(_.json))
    recovery.foreach(one => node.set[ObjectNode]("recovery", one.json))
    coordinators.foreach(one => node.set[ObjectNode]("coordinators", one.json))
    node.put("forgottenTopologies", forgottenTopologies)
  }
}

object Snapshot {
  /** Of the JSON; it changes when what is there changes its meaning, not when something is added. */
  val Version = 1

  private[stagecrew] def of(node: JsonNode): Snapshot = Snapshot(
    Json.items(node.get("topologies")).map(TopologyView.of).toVector,
    Option(node.get("totals")).map(Totals.of).getOrElse(Totals()),
    Json.items(node.get("processes")).map(ProcessView.of).toVector,
    Option(node.get("recovery")).map(RecoveryView.of),
    Option(node.get("coordinators")).map(OperatorView.of),
    node.path("forgottenTopologies").asInt)
}

/** What is shown of one topology: an immutable copy. Times in ms since the epoch, 0 for one that has not come. */
final case class TopologyView(
    id: String,
    name: String,
    kind: String,
    parent: Option[String],
    state: String,
    started: Long,
    ended: Long,
    jobs: Int,
    askedBy: Vector[String], // the executors that ran its tasks
    executors: Vector[(String, ExecutorCounts)],
    lostExecutors: Vector[String],
    unclosed: Vector[String],
    operators: Vector[OperatorView] = Vector.empty,
    spans: Vector[Span] = Vector.empty,
    spansDropped: Long = 0, // how many more there were
    forgottenExecutors: Int = 0, // lost ones that are in none of the lists: their counts are those of "forgotten"
    forgottenOperators: Int = 0) { // the same of operators

  /** How many uses of operators there were. Their names have how-manieth each is: none is the sum's. */
  def coordinators: Int = operators.count(_.name != Topology.Forgotten) + forgottenOperators

  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj().put("id", id).put("name", name).put("kind", kind)
      .put("state", state).put("started", started).put("ended", ended).put("jobs", jobs)
    parent.foreach(node.put("parent", _))
    node.set[ArrayNode]("askedBy", Json.arr(askedBy))
    node.set[ArrayNode]("unclosed", Json.arr(unclosed))
    node.set[ArrayNode]("lostExecutors", Json.arr(lostExecutors))
    val counts = node.putObject("executors")
    executors.foreach { case (id, one) => counts.set[ObjectNode](id, one.json) }
    Json.put(node, "operators", operators.map(_.json))
    Json.put(node, "spans", spans.map(_.json))
    node.put("spansDropped", spansDropped).put("forgottenExecutors", forgottenExecutors)
      .put("forgottenOperators", forgottenOperators)
  }
}

object TopologyView {
  private[stagecrew] def of(node: JsonNode): TopologyView = TopologyView(
    node.path("id").asText, node.path("name").asText, node.path("kind").asText, Option(node.get("parent")).map(_.asText),
    node.path("state").asText, node.path("started").asLong, node.path("ended").asLong, node.path("jobs").asInt,
    Json.strings(node.get("askedBy")).toVector,
    node.path("executors").properties.asScala.toVector.map(entry => entry.getKey -> ExecutorCounts.of(entry.getValue)).toVector,
    Json.strings(node.get("lostExecutors")).toVector, Json.strings(node.get("unclosed")).toVector,
    Json.items(node.get("operators")).map(OperatorView.of).toVector,
    Json.items(node.get("spans")).map(Span.of).toVector, node.path("spansDropped").asLong, node.path("forgottenExecutors").asInt,
    node.path("forgottenOperators").asInt)
}

/** Something that took time on an executor: "open" or "close" of a listener, or a "task". */
final case class Span(executor: String, kind: String, name: String, started: Long, ended: Long, failed: Boolean) {
  private[stagecrew] def json: ObjectNode = Json.obj().put("executor", executor).put("kind", kind).put("name", name)
    .put("started", started).put("ended", ended).put("failed", failed)
}

object Span {
  private[stagecrew] def of(node: JsonNode): Span = Span(node.path("executor").asText, node.path("kind").asText,
    node.path("name").asText, node.path("started").asLong, node.path("ended").asLong, node.path("failed").asBoolean)
}

/** Percentiles of so many times, in microseconds. */
final case class Percentiles(count: Long = 0, p50: Long = 0, p95: Long = 0, p99: Long = 0, max: Long = 0) {
  private[stagecrew] def json: ObjectNode =
    Json.obj().put("count", count).put("p50", p50).put("p95", p95).put("p99", p99).put("max", max)
}

object Percentiles {
  private[stagecrew] def of(node: JsonNode): Percentiles = Percentiles(node.path("count").asLong, node.path("p50").asLong,
    node.path("p95").asLong, node.path("p99").asLong, node.path("max").asLong)
}

/** A coordinator, as the driver's Python tells of it; sums of all its instances. */
final case class OperatorView(
    name: String,
    kind: String, // "coordinator", "splits", "commit", "supersteps", "alignment"
    state: String, // "active", "failed", "closed"
    live: Long, // evaluations
    finished: Long,
    failed: Long,
    abandoned: Long,
    resets: Long,
    eventsIn: Long,
    eventsOut: Long,
    requests: Long,
    queued: Long, // messages that wait for the coordinator
    replies: Percentiles, // from a request's arrival on the driver to its reply
    acknowledgements: Percentiles, // from the sending of an event to the word that it is in its mailbox
    waitsFor: String, // whom, and since when, in words; empty when for nobody
    progress: Vector[(String, String)], // as "splits done" -> "3": numbers of any kind, or words
    lastError: String) {

  /** What never goes down, together. */
  private[stagecrew] def counted: Long = finished + failed + abandoned + resets + eventsIn + eventsOut + requests

  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj().put("name", name).put("kind", kind).put("state", state).put("live", live).put("finished", finished)
      .put("failed", failed).put("abandoned", abandoned).put("resets", resets).put("eventsIn", eventsIn).put("eventsOut", eventsOut)
      .put("requests", requests).put("queued", queued).put("waitsFor", waitsFor).put("lastError", lastError)
    node.set[ObjectNode]("replies", replies.json)
    node.set[ObjectNode]("acknowledgements", acknowledgements.json)
    val values = node.putObject("progress")
    progress.foreach { case (what, value) => values.put(what, value) }
    node
  }
}

object OperatorView {
  /** Numbers of several together, under the name of those that are not listed; no times and no words. */
  private[stagecrew] def sum(views: Iterable[OperatorView]): OperatorView = {
    def of(f: OperatorView => Long): Long = views.iterator.map(f).sum
    OperatorView(Topology.Forgotten, Topology.Forgotten, "", of(_.live), of(_.finished), of(_.failed), of(_.abandoned), of(_.resets), of(_.eventsIn),
      of(_.eventsOut), of(_.requests), of(_.queued), Percentiles(), Percentiles(), "", Vector.empty, "")
  }

  private[stagecrew] def of(node: JsonNode): OperatorView = OperatorView(
    node.path("name").asText, node.path("kind").asText, node.path("state").asText, node.path("live").asLong,
    node.path("finished").asLong, node.path("failed").asLong, Json.renamed(node, "abandoned", "cut").asLong, node.path("resets").asLong,
    node.path("eventsIn").asLong, node.path("eventsOut").asLong, node.path("requests").asLong, node.path("queued").asLong,
    Percentiles.of(node.path("replies")), Percentiles.of(node.path("acknowledgements")), node.path("waitsFor").asText,
    node.path("progress").properties.asScala.iterator.map(entry => entry.getKey -> entry.getValue.asText).toVector,
    node.path("lastError").asText)
}

/** A Python process of an executor: a "worker" or the "agent". `ended` is 0 while it lives. */
final case class ProcessView(
    executor: String, host: String, pid: Long, role: String, started: Long, ended: Long, samples: Vector[Sample]) {
  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj().put("executor", executor).put("host", host).put("pid", pid).put("role", role)
      .put("started", started).put("ended", ended)
    Json.put(node, "samples", samples.map(_.json))
    node
  }
}

object ProcessView {
  private[stagecrew] def of(node: JsonNode): ProcessView = ProcessView(node.path("executor").asText, node.path("host").asText,
    node.path("pid").asLong, node.path("role").asText, node.path("started").asLong, node.path("ended").asLong,
    Json.items(node.get("samples")).map(Sample.of).toVector)
}

/** One look at a process: memory in bytes, CPU since the look before in thousandths of a core. */
final case class Sample(time: Long, rss: Long, cpu: Long, threads: Long, files: Long) {
  private[stagecrew] def json: ObjectNode =
    Json.obj().put("time", time).put("rss", rss).put("cpu", cpu).put("threads", threads).put("files", files)
}

object Sample {
  private[stagecrew] def of(node: JsonNode): Sample = Sample(node.path("time").asLong, node.path("rss").asLong,
    node.path("cpu").asLong, node.path("threads").asLong, node.path("files").asLong)
}

/** The stored job whose driver this application is: what is known of it, in order, as "term" -> "3"; and its steps. */
final case class RecoveryView(
    facts: Vector[(String, String)],
    steps: Vector[StepView],
    forgottenSteps: Int = 0) { // how many more there were
  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj()
    val values = node.putObject("facts")
    facts.foreach { case (name, value) => values.put(name, value) }
    Json.put(node, "steps", steps.map(_.json))
    node.put("forgottenSteps", forgottenSteps)
  }
}

object RecoveryView {
  private[stagecrew] def of(node: JsonNode): RecoveryView = RecoveryView(
    node.path("facts").properties.asScala.toVector.map(entry => entry.getKey -> entry.getValue.asText).toVector,
    Json.items(node.get("steps")).map(StepView.of).toVector,
    node.path("forgottenSteps").asInt)

  /** So many of its steps: those that run, and the last ones. */
  private[stagecrew] def fewer(view: RecoveryView, most: Int): RecoveryView = {
    val (running, ended) = view.steps.indices.partition(view.steps(_).ended == 0)
    val runs = running.take(most)
    val kept = (runs ++ ended.takeRight(most - runs.size)).sorted.map(view.steps).toVector
    view.copy(steps = kept, forgottenSteps = view.forgottenSteps + view.steps.size - kept.size)
  }
}

/** A step of a stored job: "running", "finished", "failed", or "found", whose result an earlier run had stored. */
final case class StepView(name: String, state: String, started: Long, ended: Long) {
  private[stagecrew] def json: ObjectNode =
    Json.obj().put("name", name).put("state", state).put("started", started).put("ended", ended)
}

object StepView {
  private[stagecrew] def of(node: JsonNode): StepView =
    StepView(node.path("name").asText, node.path("state").asText, node.path("started").asLong, node.path("ended").asLong)
}
