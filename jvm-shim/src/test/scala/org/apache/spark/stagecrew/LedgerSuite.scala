package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.node.ObjectNode
import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ExecutorReport, Ledger, PartitionCounts, Totals}
import org.apache.spark.stagecrew.wire.Json

class LedgerSuite extends AnyFunSuite {
  private def opened(ledger: Ledger, topology: String): Unit =
    ledger.listener(topology, 0, "pool", "worker")(c => c.copy(opens = c.opens + 1))

  private def sent(report: ExecutorReport): ExecutorReport = Json.read[ExecutorReport](Json.write(report))
  private def topologiesIn(report: ExecutorReport): Map[String, ExecutorCounts] = sent(report).topologies
  private def totalsIn(report: ExecutorReport): Totals = sent(report).totals

  test("a report contains the complete counts of changed topologies, and without changes there is no report") {
    val ledger = new Ledger
    assert(ledger.report().isEmpty)
    opened(ledger, "a")
    opened(ledger, "b")
    val (first, body) = ledger.report().get
    assert(topologiesIn(body).keySet == Set("a", "b"))
    assert(ledger.report().isEmpty)
    opened(ledger, "a")
    val (second, next) = ledger.report().get
    assert(second > first)
    assert(topologiesIn(next).keySet == Set("a"))
    assert(topologiesIn(next)("a").listeners(0).opens == 2)
  }

  test("the driver receives the same counts that the executor has") {
    val ledger = new Ledger
    ledger.listener("a", 3, "\"<&", "executor")(_.copy(opens = 1, closes = 2, failures = 3, lost = 4, openMicros = 5,
      closeMicros = Long.MaxValue, lastError = "line\n\u00e4\u20ac"))
    ledger.change("a")(_.copy(processes = 2, lostProcesses = 1, deferred = Set("q")))
    assert(topologiesIn(ledger.report().get._2) == Map("a" -> ledger.of("a")))
  }

  test("an undelivered report is repeated, and its topologies are kept until it is delivered") {
    val ledger = new Ledger
    opened(ledger, "a")
    opened(ledger, "b")
    val (lost, _) = ledger.report().get
    assert(!ledger.forget("b"))
    ledger.notDelivered(lost)
    val (again, body) = ledger.report().get
    assert(topologiesIn(body).keySet == Set("a", "b"))
    ledger.delivered(again)
    assert(ledger.forget("b"))
    assert(ledger.report().isEmpty)
  }

  test("a full report of a topology may arrive too late, so the next report repeats its counts") {
    val ledger = new Ledger
    opened(ledger, "a")
    val (first, body) = ledger.full("a")
    assert(topologiesIn(body)("a").listeners(0).opens == 1)
    val (number, next) = ledger.report().get
    assert(number > first && topologiesIn(next)("a").listeners(0).opens == 1)
    assert(ledger.full("a")._1 > first)
    assert(topologiesIn(ledger.full("unknown")._2).isEmpty)
  }

  test("a topology is not forgotten before its last counts are reported") {
    val ledger = new Ledger
    opened(ledger, "a")
    ledger.forget("a")
    assert(ledger.of("a").listeners(0).opens == 1)
    ledger.full("a")
    assert(!ledger.forget("a"))
    ledger.delivered(ledger.report().get._1)
    assert(ledger.forget("a") && ledger.of("a") == ExecutorCounts())
  }

  test("totals are the sums of all counts, never decrease, and are in each report") {
    val random = new Random(7)
    val ledger = new Ledger
    var expected = Totals()
    var reported = Totals()
    (1 to 2000).foreach { _ =>
      val topology = random.nextInt(5).toString
      val more = Totals(random.nextInt(2).toLong, random.nextInt(2).toLong,
        random.nextInt(2).toLong, random.nextInt(2).toLong)
      random.nextInt(4) match {
        case 0 => ledger.forget(topology)
        case 1 => ledger.report().foreach { case (number, body) =>
          if (random.nextBoolean()) { reported = totalsIn(body); ledger.delivered(number) }
            else ledger.notDelivered(number)
        }
        case _ =>
          expected = expected + more
          ledger.listener(topology, random.nextInt(3), "l", "worker")(c => c.copy(opens = c.opens + more.opens,
            closes = c.closes + more.closes, failures = c.failures + more.failures, lost = c.lost + more.lost))
      }
      assert(ledger.totals == expected)
    }
    assert(reported.opens > 0 && reported.opens <= expected.opens)
    assert(totalsIn(ledger.full("0")._2) == expected)
  }

  test("counts survive being written and read as JSON, and counts of an older version (no releaseFailures) are read") {
    val counts = ExecutorCounts(partitions = PartitionCounts(1, 2, 3, 4, 5, 6, 7, 8))
    assert(Json.as[ExecutorCounts](Json.tree(counts)) == counts)
    assert((counts + counts).partitions.releaseFailures == 16)
    val older = Json.tree(counts)
    older.get("partitions").asInstanceOf[ObjectNode].remove("releaseFailures")
    assert(Json.as[ExecutorCounts](older) == counts.copy(partitions = counts.partitions.copy(releaseFailures = 0)))
  }
}
