package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.xml.NodeSeq
import org.apache.spark.stagecrew.ui.{Span, Timeline}

class TimelineSuite extends AnyFunSuite {
  private def span(executor: String, from: Long, to: Long, kind: String = "task", failed: Boolean = false): Span =
    Span(executor, kind, s"of $from", from, to, failed)

  private def drawn(until: Long, spans: Span*): NodeSeq =
    Timeline.of(Views.topology("t").copy(started = 0, spans = spans.toVector), until)

  private def bars(html: NodeSeq): NodeSeq = (html \\ "rect").filter(bar => (bar \@ "class").startsWith("stagecrew-"))

  test("each span is a bar at its time, with its duration, and with a title") {
    val html = drawn(1000, span("1", 0, 500, "open"), span("1", 500, 1000))
    val (first, second) = (bars(html).head, bars(html).last)
    assert((first \@ "class", first \@ "x", first \@ "width") == ("stagecrew-open", "120.0", "535.0"))
    assert((second \@ "class", second \@ "x", (second \ "title").text) ==
      ("stagecrew-task", "655.0", "task of 500 on 1, 500 ms"))
  }

  test("running tasks are drawn up to the end of the timeline, and are counted in the summary") {
    val html = Timeline.of(Views.topology("t").copy(started = 0), 1000, Seq(span("1", 200, 0), span("2", 900, 0)))
    assert(bars(html).map(bar => (bar \ "title").text) ==
      Seq("task of 200 on 1, still running", "task of 900 on 2, still running"))
    assert((html \\ "p").last.text == "2 tasks on 2 executors, none failed, 2 still running.")
    val many = Timeline.of(Views.topology("t").copy(started = 0), 1000, Seq.fill(600)(span("1", 200, 0)))
    assert(bars(many).size == Timeline.MaxRunning)
  }

  test("each executor has a lane, in which overlapping spans are below each other") {
    val html = drawn(100, span("1", 0, 50), span("1", 10, 60), span("2", 0, 50), span("1", 50, 90))
    assert(bars(html).map(bar => (bar \@ "y").toInt).toSet.size == 3)
    assert((html \\ "text").map(_.text).exists(_.startsWith("2")))
    assert(Timeline.pack(Seq(span("1", 0, 50), span("1", 10, 60), span("1", 50, 90)))._1.map(_._2) == Seq(0, 1, 0))
    assert(Timeline.pack((0 until 50).map(_ => span("1", 0, 10)))._2 == Timeline.MaxRows)
  }

  test("failed spans are marked by more than a colour, and are counted in the summary") {
    val html = drawn(100, span("1", 0, 50, failed = true), span("1", 50, 60, "close"))
    assert(bars(html).map(_ \@ "class") == Seq("stagecrew-failed", "stagecrew-close"))
    assert(bars(html).head \@ "stroke" == "currentColor" && (bars(html).head \ "title").text.endsWith("failed"))
    assert((html \\ "svg").last \@ "aria-label" == "Timeline: 1 task, 1 close on 1 executor, 1 failed.")
  }

  test("the bar of a running span reaches the end of the timeline, and the bar of a very short span is visible") {
    val html = drawn(1000, span("1", 0, 0), span("1", 999, 999))
    assert(bars(html).map(_ \@ "width") == Seq("1070.0", "2.0") && (bars(html).head \ "title").text.endsWith("still running"))
  }

  test("the number of spans in the image is limited, and the text below it counts the spans that are left out") {
    val many = (0 until Timeline.MaxSpans + 5).map(i => span(s"${i % 100}", i, i + 1))
    val html = Timeline.of(Views.topology("t").copy(started = 0, spans = many.toVector, spansDropped = 7), 10000)
    assert(bars(html).size <= Timeline.MaxSpans && (html \\ "text").size == Timeline.MaxLanes + 6)
    assert(html.text.contains("12 more are not shown") && html.text.contains("Only the first 40 executors are shown"))
    assert(drawn(10).text.contains("Nothing is recorded"))
  }

  test("times out of order, from hosts with different clocks, are drawn inside the image") {
    val html = drawn(100, span("1", -50, 20), span("2", 90, 40), span("3", 500, 600))
    assert(bars(html).forall(bar => (bar \@ "x").toDouble >= 120))
    assert(bars(html).forall(bar => (bar \@ "x").toDouble + (bar \@ "width").toDouble <= 1192.1))
  }

  test("if no span is kept, the number of recorded spans is shown") {
    val html = Timeline.of(Views.topology("t").copy(started = 0, spansDropped = 12), 10000)
    assert(html.text.contains("12") && !html.text.contains("Nothing is recorded") && (html \\ "svg").isEmpty)
  }
}
