package org.apache.spark.stagecrew

import com.codahale.metrics.{Gauge, Histogram, MetricRegistry, SlidingTimeWindowArrayReservoir}
import java.util.concurrent.TimeUnit

/**
 * One metric of the plugin: its name, with the unit at its end unless it is a number of things, and what it says. All are gauges
 * of what is counted anyway, but for the times of an executor.
 */
private[stagecrew] final case class Metric[A](name: String, doc: String, value: A => Long)

private[stagecrew] object Metrics {
  private type Looks = Seq[(String, Sample)]

  /** On the driver, where what executors count is summed up, and on each executor. */
  val both: Seq[Metric[(Totals, Stored, Looks)]] = {
    def of(name: String, doc: String)(f: Totals => Long) = Metric[(Totals, Stored, Looks)](name, doc, all => f(all._1))
    def stored(name: String, doc: String)(f: Stored => Long) = Metric[(Totals, Stored, Looks)](name, doc, all => f(all._2))
    def looks(name: String, doc: String)(f: Looks => Long) = Metric[(Totals, Stored, Looks)](name, doc, all => f(all._3))
    Seq(
      of("listeners.opens", "How often a listener's `open` was called.")(_.opens),
      of("listeners.closes", "How often a listener's `close` ended, also by raising or by its time limit.")(_.closes),
      of("listeners.failures", "How often a hook raised or was interrupted.")(_.failures),
      of("listeners.lost", "How many opens have no close, as their process went before its executor: killed, or ended in a hook that ignored its time limit. Listeners in the JVM are never lost.")(_.lost),
      of("listeners.open.micros", "How long all opens took together, those that failed or were ended too.")(_.openMicros),
      of("listeners.close.micros", "How long all closes took together, those that failed or were ended too.")(_.closeMicros),
      stored("partitions.inProgress", "Partitions that tasks of topologies write.")(_.inProgress),
      stored("partitions.outputs", "Shuffle outputs that topologies have stored.")(_.outputs),
      stored("partitions.outputs.bytes", "How much these are.")(_.outputBytes),
      stored("partitions.blocks", "Cached blocks that topologies have stored.")(_.blocks),
      stored("partitions.blocks.bytes", "How much these are.")(_.blockBytes),
      of("partitions.released", "Partitions that went when their topology ended.")(_.released),
      of("partitions.released.bytes", "How much these were.")(_.releasedBytes),
      looks("processes.workers", "Python workers, as of the last look.")(_.count(_._1 == "worker").toLong),
      looks("processes.agents", "Agents, as of the last look.")(_.count(_._1 == "agent").toLong),
      looks("processes.memory.bytes", "Resident memory of these together.")(_.map(_._2.rss).sum),
      looks("processes.cpu.millicores", "CPU time of these together since the look before, in thousandths of a core.")(_.map(_._2.cpu).sum),
      looks("processes.threads", "Threads of these together.")(_.map(_._2.threads).sum),
      looks("processes.files", "Open files of these together.")(_.map(_._2.files).sum))
  }

  /** On the driver. */
  val driver: Seq[Metric[Snapshot]] = {
    def operators(name: String, doc: String)(f: OperatorView => Long) =
      Metric[Snapshot](s"coordinators.$name", doc, _.coordinators.map(f).getOrElse(0L))
    Seq(
      Metric[Snapshot]("topologies.active", "Topologies that run; the application's is one.", _.topologies.count(_.state == "active").toLong),
      Metric[Snapshot]("topologies.closing", "Topologies that end.", _.topologies.count(_.state == "closing").toLong),
      operators("evaluations.live", "Evaluations that talk with coordinators now.")(_.live),
      operators("evaluations.finished", "Evaluations that came to their end.")(_.finished),
      operators("evaluations.failed", "Evaluations that failed.")(_.failed),
      operators("evaluations.abandoned", "Evaluations that Spark stopped reading before their end.")(_.abandoned),
      operators("resets", "How often a coordinator began anew.")(_.resets),
      operators("events.in", "Events from tasks.")(_.eventsIn),
      operators("events.out", "Events to tasks.")(_.eventsOut),
      operators("requests", "Requests of tasks.")(_.requests),
      operators("queued", "Messages that wait for their coordinator.")(_.queued)) ++
      Seq("replies" -> "From a request's arrival on the driver to its reply",
        "acknowledgements" -> "From the sending of an event to the word that it is in its mailbox").flatMap { case (name, words) =>
        def times(of: OperatorView) = if (name == "replies") of.replies else of.acknowledgements
        Seq[(String, String, Percentiles => Long)](("p50", "half took less", _.p50), ("p95", "of 20, 19 took less", _.p95),
          ("p99", "of 100, 99 took less", _.p99), ("max", "the longest", _.max)).map { case (part, meaning, f) =>
          operators(s"$name.$part.micros", s"$words: $meaning.")(of => f(times(of)))
        }
      }
  }

  /** On each executor: histograms of the last minute. (A Dropwizard timer's unit would be another in each sink.) */
  val times: Seq[(String, String, String)] = Seq(
    ("open", "listeners.open.duration.micros", "How long an open took."),
    ("close", "listeners.close.duration.micros", "How long a close took."),
    ("task", "tasks.duration.micros", "How long a task took, from its start to its end on the executor; of topologies, or with listeners."))

  /** For the documentation. */
  def table: String = {
    val rows = both.map(m => (m.name, "driver, executors", "gauge", m.doc)) ++ driver.map(m => (m.name, "driver", "gauge", m.doc)) ++
      times.map { case (_, name, doc) => (name, "executors", "histogram", doc) }
    val lines = rows.map { case (name, where, kind, doc) => s"| `$name` | $kind | $where | $doc |" }
    (Seq("| metric | type | where | what it says |", "| --- | --- | --- | --- |") ++ lines).mkString("", "\n", "\n")
  }

  private[stagecrew] def gauge(registry: MetricRegistry, name: String)(f: => Long): Unit = {
    registry.register(name, (() => f): Gauge[Long])
    ()
  }

  /** The last look at each process that lives. */
  private[stagecrew] def looks(processes: Seq[ProcessView]): Looks =
    processes.filter(_.ended == 0).flatMap(one => one.samples.lastOption.map(one.role -> _))
}

private[stagecrew] object DriverMetrics {
  def register(registry: MetricRegistry, crew: DriverCrew): Unit = {
    Metrics.driver.foreach(metric => Metrics.gauge(registry, metric.name)(metric.value(crew.snapshot)))
    Metrics.both.foreach(metric => Metrics.gauge(registry, metric.name)(metric.value(sums(crew.snapshot))))
  }

  private def sums(snapshot: Snapshot) = {
    val stored = snapshot.topologies.iterator.flatMap(_.executors.iterator.map(_._2.stored)).foldLeft(Stored())(_ + _)
    (snapshot.totals, stored, Metrics.looks(snapshot.processes))
  }
}

private[stagecrew] object ExecutorMetrics {
  def register(registry: MetricRegistry, ledger: Ledger): Unit = {
    Metrics.both.foreach { metric =>
      Metrics.gauge(registry, metric.name)(metric.value((ledger.totals, ledger.stored, ledger.samples.map(_.now).getOrElse(Nil))))
    }
    val durations = Metrics.times.map { case (kind, name, _) =>
      kind -> registry.register(name, new Histogram(new SlidingTimeWindowArrayReservoir(1, TimeUnit.MINUTES)))
    }.toMap
    ledger.timed = (kind, micros) => durations.get(kind).foreach(_.update(micros))
  }
}
