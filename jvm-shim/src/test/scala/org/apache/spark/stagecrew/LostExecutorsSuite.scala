package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.driver.{Topology, TotalsBook}
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, PartitionCounts, SpanReport, Totals}
import org.apache.spark.stagecrew.ui.TopologyView
import org.apache.spark.stagecrew.wire.{Description, Json}

/** Tests that the driver's state of lost executors is limited. With dynamic allocation, a long-running application
  * loses many executors. */
class LostExecutorsSuite extends AnyFunSuite {
  private def topology() = new Topology(Description("t", "t", None, Vector.empty)(), "named", retainedLost = 3)

  private def counts(random: Random): ExecutorCounts = {
    def some() = random.nextInt(100).toLong
    val listeners = (0 until random.nextInt(4)).map(i => ListenerCounts(i, s"l$i", "worker", some(), some(), some(),
      some(), some(), some(), if (random.nextBoolean()) s"error ${some()}" else ""))
    ExecutorCounts(listeners.toVector, some(), some(), Set("gone with it"),
      PartitionCounts(released = some(), releasedBytes = some()))
  }

  test("a topology lists the executors that were lost last, and sums up those that were lost before") {
    val random = new Random(7)
    (1 to 20).foreach { _ =>
      val (state, allCounts) = (topology(), (1 to 50).map(i => s"$i" -> counts(random)))
      val lost = allCounts.take(45)
      allCounts.foreach { case (id, one) =>
        state.executors += id
        state.holders += id
        state.counts(id) = 1L -> one
        state.spans.record(id, 1, SpanReport(2, Vector.empty))
      }
      lost.foreach { case (id, _) => state.lost(id) }
      state.changed()
      val view = state.view
      val listed = allCounts.drop(42).map(_._1)
      assert(view.lostExecutors == Vector("43", "44", "45") && view.askedBy == listed && view.forgottenExecutors == 42)
      assert(view.executors.keys.toSeq == listed :+ Topology.Forgotten)
      assert(state.holders.toSeq == listed && state.counts.size == 8)
      assert(view.executors.values.map(_.totals).reduce(_ + _) == allCounts.map(_._2.totals).reduce(_ + _))
      assert(view.executors.values.toSeq.map(_.processes).sum == allCounts.map(_._2.processes).sum)
      assert(view.spansDropped == 100)
      (0 until 4).foreach { index => // for each listener
        def sum(all: Seq[(String, ExecutorCounts)]) = all.flatMap(_._2.listeners.find(_.index == index)).map(_.opens).sum
        assert(sum(view.executors.toSeq) == sum(allCounts))
      }
      val forgotten = view.executors.last._2
      assert(forgotten.deferred.isEmpty && forgotten.partitions.storing(PartitionCounts()) == forgotten.partitions)
      assert(Json.read[TopologyView](Json.write(view)) == view)
      val page = Views.page("topology", Views.model(view), "id" -> "t")
      assert(Views.rows(page, "executors").last.take(2) == Seq("forgotten", "lost"))
      assert(page.text.contains("42; their counts are in the row"))
      assert(Views.rows(Views.page("", Views.model(view)), "topologies").head.slice(6, 8).contains("50"))
    }
  }

  test("sums over all executors never decrease, and a late report of a forgotten executor changes nothing") {
    val random = new Random(3)
    val book = new TotalsBook(retainedLost = 5)
    var expected = Totals()
    (1 to 500).foreach { i =>
      val totals = counts(random).totals
      expected += totals
      assert(book.record(s"$i", 2, totals) && book.record(s"$i", 1, Totals(opens = 1000000)) && book.sum == expected)
      book.executorLost(s"$i")
      book.executorLost(s"$i")
      assert(book.sum == expected && book.size <= 5)
    }
    assert(!book.record("1", 9, Totals(opens = 1000000)) && book.sum == expected && book.size == 5)
    val late = counts(random).totals
    assert(book.record("500", 3, late) && book.size == 5) // lost, but not forgotten
  }
}
