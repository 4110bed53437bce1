package org.apache.spark.stagecrew
package ui

import java.util.Locale
import scala.collection.mutable
import scala.xml.{Node, NodeSeq}
import executor._, spark._

/** Draws spans as SVG, without JavaScript. Labels and lines have the text colour of the page. Pure functions. */
private[stagecrew] object Timeline {
  val MaxLanes = 40
  val MaxRows = 12 // in the lane of each executor
  val MaxSpans: Int = SpanBook.PerTopology
  val MaxRunning = 500

  private val Width = 1200
  private val Left = 120
  private val RowHeight = 9
  private val Kinds = Seq("open", "task", "close")
  private val Colours = Map("task" -> "#4c8dc9", "open" -> "#2a9d6f", "close" -> "#d08c1d")
  private val OtherColour = "#8a8a8a"
  private val FailedColour = "#d64550"

  /** The timeline of a topology up to the time `until`, with its running tasks, and a summary in words. */
  def of(topology: TopologyView, until: Long, running: Seq[Span] = Nil): NodeSeq =
    if (topology.spans.isEmpty && running.isEmpty && topology.spansDropped == 0)
      <p>Nothing is recorded: no listener or task began.</p>
    else if (topology.spans.isEmpty && running.isEmpty)
      <p>{s"The recorded spans (${topology.spansDropped}) are no longer kept."}</p>
    else {
      val ended = topology.spans.takeRight(MaxSpans)
      val spans = ended ++ running.take(MaxRunning)
      val executors = spans.map(_.executor).distinct.sortBy(id => (id.length, id)) // 2 before 10
      val notShown = topology.spansDropped + topology.spans.size - ended.size
      val words = summary(topology.spans ++ running, executors.size)
      svg(spans, executors.take(MaxLanes), topology.started, until) ++ <p>{words}{
        if (notShown > 0) s" $notShown more are not shown." else ""}{
        if (executors.size > MaxLanes) s" Only the first $MaxLanes executors are shown." else ""}</p>
    }

  /** A summary of the spans in words: visible text, and the description of the drawing for screen readers. */
  def summary(spans: Seq[Span], executors: Int): String = {
    val kinds = Kinds.map(kind => kind -> spans.count(_.kind == kind)).collect {
      case (kind, count) if count > 0 => s"$count $kind${if (count == 1) "" else "s"}"
    }
    val failed = spans.count(_.failed)
    val runs = spans.count(_.ended == 0)
    s"${kinds.mkString(", ")} on $executors executor${if (executors == 1) "" else "s"}, " +
      s"${if (failed == 0) "none" else failed.toString} failed${if (runs > 0) s", $runs still running" else ""}."
  }

  private def svg(spans: Seq[Span], executors: Seq[String], started: Long, until: Long): Node = {
    val from = math.min(started, spans.map(_.started).min)
    val to = math.max(from + 1, math.max(until, spans.map(_.ended).max))
    def x(ms: Long): Double =
      Left + (Width - Left - 10) * (math.max(from, math.min(to, ms)) - from).toDouble / (to - from)
    var top = 24
    val lanes = executors.flatMap { executor =>
      val (placed, rows) = pack(spans.filter(_.executor == executor))
      val at = top
      top += rows * RowHeight + 10
      val middle = at + rows * RowHeight / 2 + 4
      Seq[Node](
        <text x="0" y={middle.toString} fill="currentColor" font-size="12">{Show.first(executor, 16)}<title>{
          Show.first(executor, Show.Length)}</title></text>,
        line(Left.toString, (Width - 10).toString, (at - 5).toString, (at - 5).toString)) ++
        placed.map { case (span, row) =>
          bar(span, x(span.started), x(if (span.ended > 0) span.ended else to), at + row * RowHeight) }
    }
    val height = top + 6
    val ticks = (0 to 5).flatMap { i =>
      val ms = from + (to - from) * i / 5
      val anchor = if (i == 0) "start" else if (i == 5) "end" else "middle"
      Seq[Node](
        <text x={decimal(x(ms))} y="12" fill="currentColor" font-size="11" text-anchor={anchor}>{
          elapsed(ms - from)}</text>,
        line(decimal(x(ms)), decimal(x(ms)), "16", height.toString))
    }
    val description = summary(spans, executors.size)
    <div>
      <p>{Kinds.map(kind => legend(Colours(kind), kind, failed = false))}{legend(FailedColour, "failed", true)}</p>
      <svg xmlns="http://www.w3.org/2000/svg" id="stagecrew-timeline" role="img" aria-label={s"Timeline: $description"}
        viewBox={s"0 0 $Width $height"} style="width: 100%; max-width: 1800px; height: auto;">{ticks}{lanes}</svg>
    </div>
  }

  private def line(x1: String, x2: String, y1: String, y2: String): Node =
    <line x1={x1} x2={x2} y1={y1} y2={y2} stroke="currentColor" stroke-opacity="0.2"/>

  /** Places overlapping spans in different rows. If all `MaxRows` rows are occupied, a span overlaps another one, in
    * the row that becomes free first. Returns each span with its row, and the number of rows. */
  private[stagecrew] def pack(spans: Seq[Span]): (Seq[(Span, Int)], Int) = {
    val ends = mutable.ArrayBuffer.empty[Long]
    val placed = spans.sortBy(_.started).map { span =>
      val ended = if (span.ended > 0) span.ended else Long.MaxValue
      val free = ends.indexWhere(_ <= span.started)
      val row =
        if (free >= 0) free
        else if (ends.size < MaxRows) { ends += 0; ends.size - 1 }
        else ends.indices.minBy(ends)
      ends(row) = math.max(ends(row), ended)
      span -> row
    }
    placed -> math.max(1, ends.size)
  }

  private def bar(span: Span, from: Double, to: Double, y: Int): Node = {
    val label = s"${span.kind} ${Show.first(span.name, Show.Length)} on ${Show.first(span.executor, Show.Length)}"
    val duration = if (span.ended > 0) s", ${elapsed(span.ended - span.started)}" else ", still running"
    val fill = if (span.failed) FailedColour else Colours.getOrElse(span.kind, OtherColour)
    val kind = if (span.failed) "failed" else if (Colours.contains(span.kind)) span.kind else "other"
    <rect class={s"stagecrew-$kind"} x={decimal(from)} y={y.toString} width={decimal(math.max(2.0, to - from))}
      height={(RowHeight - 2).toString} fill={fill}
      stroke={edge(span.failed)}><title>{
        s"$label$duration${if (span.lost) ", lost" else if (span.failed) ", failed" else ""}"}</title></rect>
  }

  private def legend(colour: String, name: String, failed: Boolean): Node =
    <span class="me-3"><svg xmlns="http://www.w3.org/2000/svg" width="14" height="10" aria-hidden="true"><rect
      x="1" y="1" width="12" height="8" fill={colour} stroke={edge(failed)}/></svg>{s" $name"}</span>

  private def edge(failed: Boolean): Option[Node] = Option.when(failed)(scala.xml.Text("currentColor"))

  /** Draws values over time as a small line, scaled from zero to the largest value. */
  def sparkline(values: Seq[(Long, Long)], prefix: String, format: Long => String): Node = {
    val largest = math.max(1L, values.map(_._2).max)
    val (from, to) = (values.map(_._1).min, math.max(values.map(_._1).min + 1, values.map(_._1).max))
    val points = values.map { case (time, value) =>
      s"${decimal(1 + 98.0 * (time - from) / (to - from))},${decimal(19 - 18.0 * math.max(0L, value) / largest)}"
    }
    val text = s"${prefix}latest ${format(values.last._2)}, minimum ${format(values.map(_._2).min)}, " +
      s"maximum ${format(values.map(_._2).max)}, over ${values.size} samples"
    <svg xmlns="http://www.w3.org/2000/svg" class="stagecrew-sparkline" role="img" aria-label={text}
      viewBox="0 0 100 20" width="100" height="20"><title>{text}</title><polyline
      points={points.mkString(" ")} fill="none" stroke="currentColor" stroke-width="1.2"/></svg>
  }

  private def elapsed(ms: Long): String =
    if (ms < 1000) s"$ms ms" else if (ms < 10000) s"${decimal(ms / 1000.0)} s" else SparkUi.formatDuration(ms)

  private def decimal(value: Double): String = String.format(Locale.ROOT, "%.1f", value)
}
