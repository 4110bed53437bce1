package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.driver.{OperatorBook, Topology}
import org.apache.spark.stagecrew.ui.{OperatorView, TopologyView}
import org.apache.spark.stagecrew.wire.{Description, Json}

class ApplicationStatsSuite extends AnyFunSuite {
  import Views._

  private def view(name: String, failed: Long, state: String = "active", live: Long = 1): OperatorView =
    operator(name).copy(state = state, failed = failed, live = live)

  private def record(book: OperatorBook, sequence: Long, views: OperatorView*): Unit = {
    book.record(sequence, views.map(one => one.name -> one))
  }

  private def names(book: OperatorBook): Vector[String] = book.views.map(_.name)

  test("a coordinator's newest frame applies, and repeated or late frames change nothing") {
    val book = new OperatorBook
    record(book, 2, view("a", 5))
    record(book, 1, view("a", 3), view("b", 1))
    record(book, 2, view("a", 9))
    assert(book.views.map(one => one.name -> one.failed) == Vector("a" -> 5L, "b" -> 1L) && book.forgotten == 0)
  }

  test("idle coordinators are removed from the list first, and still count in the sums and in the number") {
    val book = new OperatorBook(limit = 3)
    record(
      book, 1, view("old", 1), view("over", 10, "closed", live = 0), view("leaving", 5, "closed"), view("new", 100))
    assert(names(book) == Vector("old", "leaving", "new", Topology.Forgotten) && book.forgotten == 1)
    record(book, 2, view("newer", 1000))
    assert(names(book) == Vector("leaving", "new", "newer", Topology.Forgotten) && book.forgotten == 2)
    assert(book.views.map(_.failed).sum == 1116 && book.views.last.failed == 11 && book.views.last.finished == 4)
    // Coordinators that are not listed still report.
    record(book, 3, view("old", 3), view("over", 10, "closed", live = 0))
    assert(names(book) == Vector("leaving", "new", "newer", Topology.Forgotten) && book.forgotten == 2)
    assert(book.views.map(_.failed).sum == 1118)
    record(book, 2, view("old", 2)) // late
    assert(book.views.map(_.failed).sum == 1118)
  }

  test("the number of coordinators in the book is limited, and its sums cover all coordinators") {
    val random = new Random(7)
    val book = new OperatorBook(limit = 5, remembered = 10)
    val failed = (1 to 200).map { i =>
      val count = random.nextInt(10).toLong
      record(book, i.toLong, view(s"o$i", count, if (random.nextInt(3) == 0) "active" else "closed", live = 0))
      assert(book.views.size <= 6)
      count
    }
    assert(book.views.map(_.failed).sum == failed.sum && book.forgotten == 195)
  }

  test("pages and JSON contain the number and the failures of all coordinators, listed or not") {
    val topology = new Topology(Description("a", "a", None, Vector.empty)(), "named")
    (1 to OperatorBook.Limit + 100).foreach(i => record(topology.operators, i.toLong, view(s"o$i", 1, "closed", live = 0)))
    val overview = page("", model(topology.view))
    assert(Seq("Coordinators", "Failures").map(cell(overview, "topologies", _)) == Seq("600", "600"))
    val html = page("topology", model(topology.view), "id" -> "a")
    assert(html.text.contains("Coordinators (600)") && html.text.contains("100; their counts"))
    val json = Json.tree(topology.view)
    assert(Json.as[TopologyView](json) == topology.view && json.get("forgottenOperators").asInt == 100)
  }
}
