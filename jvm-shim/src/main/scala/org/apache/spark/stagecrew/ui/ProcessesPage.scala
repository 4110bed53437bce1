package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import java.util.Locale
import scala.xml.{Node, NodeSeq}
import executor._, spark._, wire._

/** The page of the executors' Python processes, with their memory, CPU, threads and files over time. */
private[stagecrew] object ProcessesPage {
  def html(model: PageModel, request: PageRequest): Seq[Node] = {
    val (all, unsampled) = model.snapshot.processes.partition(_.problem.isEmpty)
    val processes = Table("processes", all.sortBy(p => (p.ended > 0, p.executor, p.role, p.pid)), columns(model))
    val running = all.filter(_.ended == 0)
    def sum(f: Sample => Long): Long = running.flatMap(_.samples.lastOption).map(f).sum
    Seq[NodeSeq]((model.notes.getOrElse("", Nil) ++ unsampled.map(process =>
        s"Executor ${process.executor} (host ${process.host}): ${process.problem}"))
        .distinct.map(Show.warning),
      if (all.isEmpty) <p>No Python process has been sampled yet. Workers start with the first Python task of an
        executor, and Spark's Python daemon samples them. An executor without a Python daemon has no Python processes
        to show.</p>
      else Show.properties(
        "Running" -> Show.value(s"${running.size}"), "Memory" -> Show.value(SparkUi.formatBytes(sum(_.rss))),
        "CPU" -> Show.value(s"${cores(sum(_.cpu))} cores"), "Ended" -> Show.value(s"${all.size - running.size}")) ++
        <h4>{s"Python processes (${all.size})"}</h4> ++
        new Tables(request, "processes/", Nil, processes)(processes)).flatten
  }

  def json(model: PageModel): ObjectNode =
    Tab.head(model).setAll[ObjectNode](Json.tree(Samples(model.snapshot.processes)))

  private def columns(model: PageModel): Seq[Column[ProcessView]] = Seq(
    Column.text("Executor")(_.executor), Column.text("Host")(_.host), Column.text("Role")(_.role),
    Column.number("Process", "The process id on its host")(_.pid),
    Column.text("State")(p => if (p.ended > 0) "ended" else "running"),
    Column.date("Started")(_.started), Column.date("Ended")(_.ended),
    Column.duration("Duration")(process => model.elapsed(process.started, process.ended)),
    lastSeen("Topology")(p => model.find(p.topology).fold(p.topology)(_.name)), lastSeen("Task")(_.task),
    overTime("Memory", "Resident memory: the last sample, and all samples over time")(_.rss, SparkUi.formatBytes),
    overTime("CPU", "In cores, since the previous sample")(_.cpu, cores),
    overTime("Threads", "")(_.threads, _.toString), overTime("Files", "Open file descriptors")(_.files, _.toString))

  private def lastSeen(name: String)(f: ProcessView => String): Column[ProcessView] =
    Column.text(name, "At the last sample; of processes that have listeners")(f).copy(isZero = f(_).isEmpty)

  private def overTime(name: String, help: String)(f: Sample => Long, format: Long => String): Column[ProcessView] =
    Column.of(name, help)((p: ProcessView) => p.samples.lastOption.map(f).getOrElse(0L)) { process =>
      val values = process.samples.map(sample => sample.time -> f(sample))
      <td class="text-nowrap">{if (values.isEmpty) NodeSeq.Empty else NodeSeq.fromSeq(Seq(
        <span>{s"${format(values.last._2)} "}</span>, Timeline.sparkline(values, s"$name: ", format)))}</td>
    }

  private def cores(thousandths: Long): String = String.format(Locale.ROOT, "%.2f", thousandths / 1000.0)
}
