package org.apache.spark.stagecrew

import com.codahale.metrics.{Gauge, MetricRegistry}

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
