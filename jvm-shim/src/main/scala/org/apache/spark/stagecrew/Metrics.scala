package org.apache.spark.stagecrew

import com.codahale.metrics.{Gauge, Histogram, MetricRegistry, SlidingTimeWindowArrayReservoir}
import java.util.concurrent.TimeUnit
import driver._, executor._, ui._

/** A gauge of the plugin. Its name ends with a unit, unless it is a count. docs/reference/metrics.md describes each
  * metric. */
private[stagecrew] final case class Metric[A](name: String, value: A => Long)

/** The values of one executor, or of the whole application on the driver. `processes` contains the role and the last
  * sample of each running process. */
private[stagecrew] final case class Sums(totals: Totals, partitions: PartitionCounts, processes: Seq[(String, Sample)])

private[stagecrew] object Metrics {
  /** Gauges of each executor, and of the driver, where they cover all executors. */
  val both: Seq[Metric[Sums]] = Seq(
    Metric("listeners.opens", _.totals.opens), Metric("listeners.closes", _.totals.closes),
    Metric("listeners.failures", _.totals.failures), Metric("listeners.lost", _.totals.lost),
    Metric("listeners.open.micros", _.totals.openMicros), Metric("listeners.close.micros", _.totals.closeMicros),
    Metric("partitions.inProgress", _.partitions.inProgress), Metric("partitions.outputs", _.partitions.outputs),
    Metric("partitions.outputs.bytes", _.partitions.outputBytes), Metric("partitions.blocks", _.partitions.blocks),
    Metric("partitions.blocks.bytes", _.partitions.blockBytes), Metric("partitions.released", _.totals.released),
    Metric("partitions.released.bytes", _.totals.releasedBytes),
    Metric("processes.workers", _.processes.count(_._1 == "worker").toLong),
    Metric("processes.agents", _.processes.count(_._1 == "agent").toLong),
    Metric("processes.memory.bytes", _.processes.map(_._2.rss).sum),
    Metric("processes.cpu.millicores", _.processes.map(_._2.cpu).sum),
    Metric("processes.threads", _.processes.map(_._2.threads).sum),
    Metric("processes.files", _.processes.map(_._2.files).sum))

  /** Gauges of the driver only. */
  val driver: Seq[Metric[Snapshot]] = {
    def operators(name: String, f: OperatorView => Long) =
      Metric[Snapshot](s"coordinators.$name", _.coordinators.fold(0L)(f))
    def percentiles(name: String, select: OperatorView => Percentiles) =
      Seq[(String, Percentiles => Long)]("p50" -> (_.p50), "p95" -> (_.p95), "p99" -> (_.p99), "max" -> (_.max))
        .map { case (part, f) => operators(s"$name.$part.micros", view => f(select(view))) }
    Seq(
      Metric[Snapshot]("topologies.active", _.topologies.count(_.state == "active").toLong),
      Metric[Snapshot]("topologies.closing", _.topologies.count(_.state == "closing").toLong),
      operators("evaluations.live", _.live), operators("evaluations.finished", _.finished),
      operators("evaluations.failed", _.failed), operators("evaluations.abandoned", _.abandoned),
      operators("resets", _.resets), operators("events.in", _.eventsIn), operators("events.out", _.eventsOut),
      operators("requests", _.requests), operators("queued", _.queued)) ++
      percentiles("replies", _.replies) ++ percentiles("acknowledgements", _.acknowledgements)
  }

  /** Histograms of each executor over the last minute, by the kind of span. Dropwizard timers are not used, because
    * their unit depends on the sink. */
  val times: Seq[(String, String)] = Seq(
    "open" -> "listeners.open.duration.micros", "close" -> "listeners.close.duration.micros",
    "task" -> "tasks.duration.micros")

  def registerDriver(registry: MetricRegistry, crew: DriverCrew): Unit = {
    driver.foreach(metric => gauge(registry, metric.name)(metric.value(crew.snapshot)))
    both.foreach(metric => gauge(registry, metric.name)(metric.value(sums(crew.snapshot))))
  }

  def registerExecutor(registry: MetricRegistry, ledger: Ledger): Unit = {
    both.foreach(metric => gauge(registry, metric.name)(
      metric.value(Sums(ledger.totals, ledger.stored, lastSamples(ledger.samples.toSeq.flatMap(_.now))))))
    val durations = times.map { case (kind, name) =>
      kind -> registry.register(name, new Histogram(new SlidingTimeWindowArrayReservoir(1, TimeUnit.MINUTES)))
    }.toMap
    ledger.onDuration = (kind, micros) => durations.get(kind).foreach(_.update(micros))
  }

  private def gauge(registry: MetricRegistry, name: String)(f: => Long): Unit =
    registry.register(name, (() => f): Gauge[Long])

  private def sums(snapshot: Snapshot): Sums = Sums(snapshot.totals,
    snapshot.topologies.iterator.flatMap(_.executors.valuesIterator.map(_.partitions))
      .foldLeft(PartitionCounts())(_ + _),
    lastSamples(snapshot.processes))

  private[stagecrew] def lastSamples(processes: Seq[ProcessView]): Seq[(String, Sample)] =
    processes.filter(_.ended == 0).flatMap(process => process.samples.lastOption.map(process.role -> _))
}
