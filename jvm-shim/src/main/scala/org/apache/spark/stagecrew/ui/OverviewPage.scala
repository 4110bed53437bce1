package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import scala.xml.{Node, NodeSeq}
import driver._, executor._, spark._

/** The first page of the tab: the application, its topologies, and their listeners, summed over all executors. */
private[stagecrew] object OverviewPage {
  /** A listener of a topology, summed over all executors. */
  private final case class Row(topology: TopologyView, executors: Seq[String], sum: ListenerCounts)

  def html(model: PageModel, request: PageRequest): Seq[Node] = {
    val all = model.snapshot.topologies
    val topologies = Table("topologies", ordered(all), columns(model, request))
    val listeners = Table("listeners", topologies.rows.flatMap(sums),
      Column.of("Topology")((_: Row).topology.name)(row => <td>{Tab.topology(request, row.topology)}</td>) +:
        listenerColumns(Column.count("Executors", "Executors that have reported it")((_: Row).executors))(_.sum))
    val tables = new Tables(request, "", Nil, topologies, listeners)
    val totals = model.snapshot.totals
    val forgotten = model.snapshot.forgottenTopologies
    val listed = all.filter(_.kind != DriverCrew.ApplicationKind).groupBy(_.state).view.mapValues(_.size).toMap
    val states = listed.updated("closed", listed.getOrElse("closed", 0) + forgotten).filter(_._2 > 0).toSeq.sorted
    Seq[NodeSeq](notes(model), Hints.of(model).map(Show.hint),
      Show.properties(
        "Topologies in the application" -> Show.value(
          states.map { case (state, count) => s"$count $state" }.mkString(", ") +
            (if (forgotten > 0) s"; the last ${listed.getOrElse("closed", 0)} closed ones are listed" else "")),
        "Listeners" -> Show.value(s"opens ${totals.opens}, closes ${totals.closes}, failures ${totals.failures}, " +
          s"lost ${totals.lost}"),
        "Python processes" -> Show.value(processes(model.snapshot.processes))),
      if (all.forall(_.kind == DriverCrew.ApplicationKind)) beginning else NodeSeq.Empty,
      <h4>{s"Topologies (${topologies.rows.size})"}</h4>, tables(topologies),
      <h4>{s"Listeners (${listeners.rows.size})"}</h4>,
      if (listeners.rows.isEmpty)
        <p>No listener has been opened yet: they open before the first task that they cover.</p>
      else tables(listeners)).flatten
  }

  def json(model: PageModel): ObjectNode = model.snapshot.json.setAll[ObjectNode](Tab.head(model))

  private def notes(model: PageModel): NodeSeq = (if (!model.history) NodeSeq.Empty
    else <p>This page shows the event log. Its last entry of stagecrew is from {Show.date(model.now)}.</p>) ++
    model.notes.getOrElse("", Nil).map(Show.warning)

  private def processes(sampled: Seq[ProcessView]): String = {
    val all = sampled.filter(_.problem.isEmpty)
    val running = all.filter(_.ended == 0)
    val memory = SparkUi.formatBytes(running.flatMap(_.samples.lastOption).map(_.rss).sum)
    if (all.isEmpty) "" else s"${running.size} running with $memory of memory, ${all.size - running.size} ended"
  }

  /** The application, then topologies that have not closed, then closed ones. In each group the newest comes first. */
  private def ordered(topologies: Seq[TopologyView]): Seq[TopologyView] =
    topologies.reverse.sortBy(t => if (t.kind == DriverCrew.ApplicationKind) 0 else if (t.state != "closed") 1 else 2)

  private def beginning: NodeSeq =
    <p id="stagecrew-begin">No topology has begun yet. A topology is a run with a lifecycle; it begins in Python with
      {" "}<code>with stagecrew.crew(spark).topology("name", listeners=[...]):</code>{" "}
      and spans every job, query and stream that is started inside.</p>

  private def columns(model: PageModel, request: PageRequest): Seq[Column[TopologyView]] = Seq(
    Column.of("Topology")((_: TopologyView).name)(t => <td>{Tab.topology(request, t)}</td>),
    Column.text("Id")(_.id), Column.text("Kind")(_.kind), Column.text("State")(_.state),
    Column.date("Started")(_.started),
    Column.duration("Duration")(model.duration),
    Column.number("Jobs", "Jobs of Spark that began in it, or in a topology inside it")(_.jobs.toLong),
    Column.count("Executors", "Executors that ran its tasks")(_.askedBy, _.forgottenExecutors),
    Column.number("Coordinators", "Uses of operators, each with its own coordinator")(_.coordinators.toLong),
    Column.number("Failures", "Failed open, close and decorate calls of listeners, and failed evaluations")
      (failures),
    Column.count("Lost executors", "Executors that were lost while they ran its tasks")
      (_.lostExecutors, _.forgottenExecutors),
    Column.count("Unclosed", "Listeners that were not closed when the topology ended")(_.unclosed))

  private def failures(topology: TopologyView): Long =
    topology.executors.values.map(_.totals.failures).sum + topology.operators.map(_.failed).sum

  private def sums(topology: TopologyView): Seq[Row] = topology.executors.toSeq
    .flatMap { case (executor, counts) => counts.listeners.map(executor -> _) }
    .groupBy(_._2.index).toSeq.sortBy(_._1).map { case (_, rows) =>
      Row(topology, rows.map(_._1), rows.map(_._2).reduce(_ + _)) }

  /** The columns of a listener and its counts. `executors` is the column of the executors that the counts are from. */
  def listenerColumns[T](executors: Column[T])(f: T => ListenerCounts): Seq[Column[T]] = Seq(
    Column.text("Listener")(f(_).name), Column.text("Scope")(f(_).scope), executors,
    Column.number("Opens", "Calls of open, including failed ones")(f(_).opens),
    Column.number("Closes", "Calls of close, including failed ones")(f(_).closes),
    Column.number("Failures", "Failed calls of open, close and decorate")(f(_).failures),
    Column.number("Lost", "Opens in processes that ended without a close")(f(_).lost),
    Column.micros("Time in open", "The sum over all calls")(f(_).openMicros),
    Column.micros("Time in close", "The sum over all calls")(f(_).closeMicros),
    Column.of("Last error")(f.andThen(_.lastError))(row =>
      Show.error(f(row).lastError, f(row).lastErrorLine, f(row).scope == "jvm")))
}
