package org.apache.spark.stagecrew

import com.codahale.metrics.{Gauge, MetricRegistry}
import com.fasterxml.jackson.databind.node.{ArrayNode, ObjectNode}

/** Snapshots as JSON: what Python's reports and the tab's `/json` show. */
private[stagecrew] object Views {
  def json(snapshot: Snapshot): ObjectNode = {
    val node = Json.obj().put("version", 1)
    node.set[ObjectNode]("totals", snapshot.totals.json)
    val all = node.putArray("topologies")
    snapshot.topologies.foreach(topology => all.add(one(topology)))
    node
  }

  private def one(topology: TopologyView): ObjectNode = {
    val node = Json.obj().put("id", topology.id).put("name", topology.name).put("kind", topology.kind)
      .put("state", topology.state).put("started", topology.started).put("ended", topology.ended).put("jobs", topology.jobs)
    topology.parent.foreach(node.put("parent", _))
    node.set[ArrayNode]("askedBy", Json.arr(topology.askedBy))
    node.set[ArrayNode]("unclosed", Json.arr(topology.unclosed))
    node.set[ArrayNode]("lostExecutors", Json.arr(topology.lostExecutors))
    val executors = node.putObject("executors")
    topology.executors.foreach { case (id, counts) => executors.set[ObjectNode](id, counts.json) }
    node
  }
}

/** The counts as metrics of the plugin; what executors count is summed on the driver too. */
private[stagecrew] object DriverMetrics {
  def register(registry: MetricRegistry, crew: DriverCrew): Unit = {
    def gauge(name: String)(f: => Long): Unit = { registry.register(name, (() => f): Gauge[Long]); () }
    gauge("topologies.active")(crew.snapshot.topologies.count(_.state == "active").toLong)
    gauge("topologies.closing")(crew.snapshot.topologies.count(_.state == "closing").toLong)
    ListenerMetrics.all.foreach { case (name, f) => gauge(name)(f(crew.snapshot.totals)) }
  }
}

private[stagecrew] object ExecutorMetrics {
  def register(registry: MetricRegistry, ledger: Ledger): Unit = ListenerMetrics.all.foreach { case (name, f) =>
    registry.register(name, (() => f(ledger.totals)): Gauge[Long])
  }
}

private[stagecrew] object ListenerMetrics {
  val all: Seq[(String, Totals => Long)] = Seq(
    "listeners.opens" -> (_.opens), "listeners.closes" -> (_.closes), "listeners.failures" -> (_.failures),
    "listeners.lost" -> (_.lost))
}

/** What is shown of one topology: an immutable copy. */
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
    unclosed: Vector[String])

/** What the UI, metrics and reports read. `totals` are of all topologies, those that are forgotten too. */
final case class Snapshot(topologies: Vector[TopologyView], totals: Totals)
