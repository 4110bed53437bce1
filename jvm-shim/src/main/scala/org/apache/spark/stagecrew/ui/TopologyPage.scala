package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import scala.xml.{Node, NodeSeq}
import driver._, executor._, spark._, wire._

/** The page of one topology. */
private[stagecrew] object TopologyPage {
  def html(model: PageModel, request: PageRequest): Seq[Node] = {
    val topology = requested(model, request)
    val inside = Table("topologies", model.snapshot.topologies.filter(_.parent.contains(topology.id)),
      insideColumns(model, request))
    val operators = Table("coordinators", topology.operators, operatorColumns)
    val listeners = Table("listeners", for {
      (executor, counts) <- topology.executors.toVector
      listener <- counts.listeners
    } yield (executor, listener), OverviewPage.listenerColumns(
      Column.text("Executor")((_: (String, ListenerCounts))._1))(_._2))
    val executors = Table("executors", topology.executors.toVector, executorColumns(topology))
    val jobs = Table("jobs", topology.lastJobs.reverse, jobColumns(request))
    val tables = new Tables(request, "topology/", Seq("id" -> Tab.key(topology.id)), inside,
      operators, listeners, executors, jobs)
    def section(name: String, table: Table[_], otherwise: String, count: Int = 0): NodeSeq =
      if (table.rows.nonEmpty) <h4>{s"$name (${math.max(count, table.rows.size)})"}</h4> ++ tables(table)
      else if (otherwise.isEmpty) NodeSeq.Empty else <h4>{name}</h4><p>{otherwise}</p>
    Seq[NodeSeq](model.notes.getOrElse(topology.id, Nil).map(Show.warning),
      Hints.of(topology, model.until(topology)).map(Show.hint), summary(model, request, topology),
      <h4>Timeline</h4>, Timeline.of(topology, model.until(topology), model.running(topology)),
      section("Coordinators", operators, "", topology.coordinators),
      section("Listeners", listeners,
        "No listener has been opened. Listeners open before the first task of the topology."),
      section("Partitions and processes by executor", executors, "No executor has reported about this topology."),
      section("Jobs", jobs, "", topology.jobs), section("Topologies inside", inside, "")).flatten
  }

  def title(model: PageModel, request: PageRequest): String =
    s"Stagecrew: ${Show.first(requested(model, request).name, Show.Length)}"

  def json(model: PageModel, request: PageRequest): ObjectNode = {
    val topology = requested(model, request)
    Tab.head(model, topology.id).put("until", model.until(topology)).set[ObjectNode]("topology", Json.tree(topology))
      .set[ObjectNode]("running", Json.list(model.running(topology)))
  }

  private def requested(model: PageModel, request: PageRequest): TopologyView = {
    val id = request.parameters.getOrElse("id",
      throw new IllegalArgumentException("the parameter id is missing: it names the topology"))
    model.find(id).getOrElse(throw new IllegalArgumentException(
      "no topology has this id. It may have been removed: the number of closed topologies that are kept is limited " +
        s"(${Settings.RetainedTopologies})"))
  }

  private def summary(model: PageModel, request: PageRequest, topology: TopologyView): Node = {
    val stored = topology.executors.values.map(_.partitions).foldLeft(PartitionCounts())(_ + _)
    Show.properties(
      "Id" -> Show.text(topology.id), "Kind" -> Show.value(topology.kind),
      "Inside" -> topology.parent.fold(NodeSeq.Empty)(id => model.find(id).map(Tab.topology(request, _))
        .getOrElse(Show.text(id))),
      "State" -> Show.value(topology.state),
      "Started" -> Show.value(Show.date(topology.started)), "Ended" -> Show.value(Show.date(topology.ended)),
      (if (topology.ended > 0) "Duration" else "Duration so far") ->
        Show.value(SparkUi.formatDuration(model.duration(topology))),
      "Jobs" -> Show.value(topology.jobs.toString), "Executors" -> Show.list(topology.askedBy),
      "Partitions" -> Show.value(partitions(stored)),
      "Lost executors" -> Show.list(topology.lostExecutors),
      "Earlier lost executors" -> Show.value(if (topology.forgottenExecutors == 0) "" else
        s"${topology.forgottenExecutors}; their counts are in the row '${Topology.Forgotten}'"),
      "Earlier coordinators" -> Show.value(if (topology.forgottenOperators == 0) "" else
        s"${topology.forgottenOperators}; their counts are in the row '${Topology.Forgotten}'"),
      "Unclosed" -> Show.list(topology.unclosed))
  }

  private def partitions(counts: PartitionCounts): String = {
    def some(count: Long, label: String, bytes: Long): Option[String] =
      Option.when(count > 0)(s"$count $label" + (if (bytes > 0) s" (${SparkUi.formatBytes(bytes)})" else ""))
    Seq(some(counts.inProgress, "in progress", 0), some(counts.outputs, "finished outputs", counts.outputBytes),
      some(counts.blocks, "cached blocks", counts.blockBytes),
      some(counts.released, "released", counts.releasedBytes),
      some(counts.releaseFailures, "could not be deleted", 0)).flatten.mkString(", ")
  }

  private def operatorColumns: Seq[Column[OperatorView]] = Seq(
    Column.text("Name")(_.name), Column.text("Kind")(_.kind), Column.text("State")(_.state),
    Column.of("Progress")((_: OperatorView).progress.mkString)(o => <td>{progressBar(o)}{
      Show.text(o.progress.map { case (label, value) =>
        if (value.toDoubleOption.isEmpty) s"$label: $value" else s"$label $value" }.mkString(" / "))}</td>),
    Column.text("Waits for", "What the coordinator or its tasks wait for, and since when")(_.waitsFor),
    Column.number("Live", "Running evaluations")(_.live),
    Column.number("Finished", "Evaluations that succeeded")(_.finished),
    Column.number("Failed", "Evaluations that failed, or whose process or executor was lost")(_.failed),
    Column.number("Abandoned", "Evaluations that Spark stopped reading before their end")(_.abandoned),
    Column.number("Resets", "How often the coordinator was replaced by one from a checkpoint")(_.resets),
    Column.number("Events in", "From tasks to the coordinator")(_.eventsIn),
    Column.number("Events out", "From the coordinator to tasks")(_.eventsOut),
    Column.number("Requests", "From tasks to the coordinator, which replies to each")(_.requests),
    Column.number("Queued", "Messages in the queue of the coordinator")(_.queued),
    percentiles("Replies",
      "From a request's arrival on the driver to its reply: median, 95th and 99th percentile, longest")(_.replies),
    percentiles("Acknowledgements",
      "From sending an event to the acknowledgement that it is in the task's mailbox")(_.acknowledgements),
    Column.of("Last error")((_: OperatorView).lastError)(o => Show.error(o.lastError)))

  /** A bar of the splits, if it is known how many there are. */
  private[stagecrew] def progressBar(operator: OperatorView): Seq[Node] = {
    def number(label: String): Option[Int] = operator.progress.get(label).flatMap(_.toIntOption)
    (for {
      done <- number("splits done")
      running <- number("splits in progress")
      left <- number("splits left") if done + running + left > 0
    } yield SparkUi.progressBar(running, done, done + running + left)).getOrElse(Nil)
  }

  private def jobColumns(request: PageRequest): Seq[Column[SparkJob]] = {
    val root = request.root.stripSuffix(s"/${Tab.Prefix}")
    def link(path: String, id: Long): Node = <a href={s"$root/$path=$id"}>{id.toString}</a>
    Seq(Column.of("Job")((_: SparkJob).id)(job => <td>{link("jobs/job/?id", job.id)}</td>),
      Column.of("Stages")((_: SparkJob).stages.headOption)(job => <td>{job.stages.flatMap(stage =>
        Seq[Node](scala.xml.Text(" "), link("stages/stage/?attempt=0&id", stage))).drop(1)}</td>),
      Column.of("SQL query")((_: SparkJob).execution)(job => <td>{
        if (job.execution < 0) NodeSeq.Empty else link("SQL/execution/?id", job.execution)}</td>))
  }

  private def percentiles(name: String, help: String)(f: OperatorView => Percentiles): Column[OperatorView] =
    Column.of(name, help)((o: OperatorView) => f(o).p95) { o =>
      val times = f(o)
      val text = if (times.count == 0) "" else Seq(times.p50, times.p95, times.p99, times.max)
        .map(Show.micros).mkString(" / ")
      <td title={Show.title(if (times.count == 0) "" else s"of ${times.count}")}>{text}</td>
    }

  private def executorColumns(topology: TopologyView): Seq[Column[(String, ExecutorCounts)]] = Seq(
    Column.text("Executor")(_._1),
    Column.text("State") { case (executor, _) =>
      val forgotten = executor == Topology.Forgotten && topology.forgottenExecutors > 0
      if (forgotten || topology.lostExecutors.contains(executor)) "lost" else ""
    },
    Column.number("In progress", "Partitions that tasks are writing")(_._2.partitions.inProgress),
    Column.number("Finished outputs", "Of shuffles")(_._2.partitions.outputs),
    Column.bytes("Output size", "Of the finished outputs")(_._2.partitions.outputBytes),
    Column.number("Cached blocks", "Of cached datasets")(_._2.partitions.blocks),
    Column.bytes("Block size", "Of the cached blocks, in memory and on disk")(_._2.partitions.blockBytes),
    Column.number("Released", "Partitions that were deleted when the topology ended")(_._2.partitions.released),
    Column.bytes("Released size", "Of the released partitions")(_._2.partitions.releasedBytes),
    Column.number("Not deleted", "Partitions that could not be deleted; the executor's log has the reason")
      (_._2.partitions.releaseFailures),
    Column.number("Python processes", "Processes that opened a listener")(_._2.processes),
    Column.number("Lost processes", "Processes that ended before they closed a listener")(_._2.lostProcesses))

  private def insideColumns(model: PageModel, request: PageRequest): Seq[Column[TopologyView]] = Seq(
    Column.of("Topology")((_: TopologyView).name)(t => <td>{Tab.topology(request, t)}</td>),
    Column.text("State")(_.state), Column.date("Started")(_.started), Column.duration("Duration")(model.duration))
}
