package org.apache.spark.stagecrew

import java.nio.file.{Files, Path}
import com.codahale.metrics.MetricRegistry
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import org.apache.spark.stagecrew.executor.{Ledger, PartitionCounts}

class MetricsSuite extends AnyFunSuite {
  private val page =
    Seq("docs", "../docs").map(folder => Path.of(folder, "reference", "metrics.md")).find(Files.exists(_)).get

  test("the table in the docs lists the metrics of the code in order, with their types, places and descriptions") {
    val Row = """\| `(\S+)` \| (\w+) \| ([\w, ]+) \| (.+) \|""".r
    val documented = Files.readString(page).linesIterator
      .collect { case Row(name, kind, where, what) => (name, kind, where, what) }.toSeq
    val expected = Metrics.both.map(m => (m.name, "gauge", "driver, executors")) ++
      Metrics.driver.map(m => (m.name, "gauge", "driver")) ++
        Metrics.times.map { case (_, name) => (name, "histogram", "executors") }
    assert(documented.map { case (name, kind, where, _) => (name, kind, where) } == expected)
    documented.foreach { case (name, _, _, what) => assert(what.endsWith("."), name) }
  }

  test("metric names are unique, and end with a unit if there is one") {
    val names = Metrics.both.map(_.name) ++ Metrics.driver.map(_.name) ++ Metrics.times.map(_._2)
    assert(names.distinct == names)
    names.filter(name =>
      Seq("duration", "memory", "cpu", "p50", "p95", "p99", "max", "open", "close").exists(name.split('.').contains))
      .foreach(name => assert(Seq("micros", "bytes", "millicores").contains(name.split('.').last), name))
  }

  test("an executor's metrics are the counts of its ledger, and histograms of durations in microseconds") {
    val (ledger, registry) = (new Ledger, new MetricRegistry)
    Metrics.registerExecutor(registry, ledger)
    ledger.listener("t", 0, "a", "worker")(_.copy(opens = 2, openMicros = 70))
    ledger.change("t")(_.copy(partitions = PartitionCounts(1, 2, 3, 4, 5, 6, 7)))
    ledger.change("u")(_.copy(partitions = PartitionCounts(10, 20, 30, 40, 50)))
    ledger.span("t", "open", "a", 30, failed = false)
    ledger.span("t", "open", "a", 40, failed = true)
    val gauges = registry.getGauges.asScala.view.mapValues(_.getValue).toMap
    assert(gauges("listeners.opens") == 2L && gauges("listeners.open.micros") == 70L)
    assert(gauges("partitions.outputs.bytes") == 33L && gauges("partitions.released.bytes") == 7L)
    assert(gauges("processes.workers") == 0L)
    val opens = registry.getHistograms.get("listeners.open.duration.micros")
    assert(opens.getCount == 2 && opens.getSnapshot.getMax == 40)
    assert(registry.getHistograms.get("tasks.duration.micros").getCount == 0)
  }
}
