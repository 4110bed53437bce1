package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import java.util.Locale
import scala.xml.{Node, NodeSeq}
import executor._, spark._, wire._

/** The Python processes of the executors, with their figures over time. */
private[stagecrew] object ProcessesPage {
  def html(shown: PageModel, ask: PageRequest): Seq[Node] = {
    val (all, unsampled) = shown.snapshot.processes.partition(_.problem.isEmpty)
    val processes = Table("processes", all.sortBy(p => (p.ended > 0, p.executor, p.role, p.pid)), columns(shown))
    val running = all.filter(_.ended == 0)
    def sum(f: Sample => Long): Long = running.flatMap(_.samples.lastOption).map(f).sum
    Seq[NodeSeq](
      (shown.notes.getOrElse("", Nil) ++ unsampled.map(of =>
        s"Executor ${of.executor} (host ${of.host}): ${of.problem}"))
        .distinct.map(Show.note),
      if (all.isEmpty) <p>No Python process has been sampled yet. Workers start with the first Python task of an
        executor, and Spark's Python daemon samples them. An executor without a Python daemon has no Python processes
        to show.</p>
      else Show.facts(
        "Running" -> Show.fact(running.size.toString),
        "Memory" -> Show.fact(SparkUi.formatBytes(sum(_.rss))),
        "CPU" -> Show.fact(s"${cores(sum(_.cpu))} cores"),
        "Ended" -> Show.fact((all.size - running.size).toString)) ++
        <h4>{s"Python processes (${all.size})"}</h4> ++
        new Tables(ask, "processes/", Nil, processes)(processes)).flatten
  }

  def json(shown: PageModel): ObjectNode =
    Tab.head(shown).setAll[ObjectNode](Json.tree(Samples(shown.snapshot.processes)))

  private def columns(shown: PageModel): Seq[Column[ProcessView]] = Seq(
    Column.text("Executor")(_.executor), Column.text("Host")(_.host), Column.text("Role")(_.role),
    Column.number("Process")(_.pid), Column.text("State")(p => if (p.ended > 0) "ended" else "running"),
    Column.date("Started")(_.started), Column.date("Ended")(_.ended),
    Column.duration("Duration")(p => math.max(0L, (if (p.ended > 0) p.ended else shown.now) - p.started)),
    over("Memory", "Resident memory: the last sample, and all samples over time")(_.rss, SparkUi.formatBytes),
    over("CPU", "In cores, since the previous sample")(_.cpu, cores),
    over("Threads", "")(_.threads, _.toString), over("Files", "Open file descriptors")(_.files, _.toString))

  private def over(name: String, help: String)(f: Sample => Long, words: Long => String): Column[ProcessView] =
    Column.of(name, help)((p: ProcessView) => p.samples.lastOption.map(f).getOrElse(0L)) { process =>
      val values = process.samples.map(sample => sample.time -> f(sample))
      <td class="text-nowrap">{if (values.isEmpty) NodeSeq.Empty else NodeSeq.fromSeq(Seq(
        <span>{s"${words(values.last._2)} "}</span>, Timeline.sparkline(values, s"$name: ", words)))}</td>
    }

  private def cores(thousandths: Long): String = String.format(Locale.ROOT, "%.2f", thousandths / 1000.0)
}
