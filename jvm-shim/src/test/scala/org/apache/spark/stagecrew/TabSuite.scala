package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.xml.Elem

class TabSuite extends AnyFunSuite {
  private val Hostile = "<script>alert(1)</script>\"'&"

  private def topology(id: String, kind: String = DriverCrew.NamedKind, state: String = "active", listeners: Int = 0,
      error: String = "", scope: String = "worker"): TopologyView =
    TopologyView(id, s"name of $id", kind, None, state, 1000, 0, 2, Vector("1"),
      Vector("1" -> ExecutorCounts((0 until listeners).map(i =>
        i -> ListenerCounts(s"l$i", scope, opens = 1, openMicros = 1500, closeMicros = 2500000, lastError = error)).toMap)),
      Vector.empty, Vector.empty)

  private def page(topologies: TopologyView*): Elem = <div>{Tab.page(Snapshot(topologies.toVector, Totals()), 61000)}</div>

  private def rows(page: Elem, id: String): Seq[Seq[String]] =
    (page \\ "table").filter(_ \@ "id" == id).flatMap(_ \\ "tr").map(_ \ "td").map(_.map(_.text)).filter(_.nonEmpty)

  private val application = topology("application", DriverCrew.ApplicationKind)

  test("the application comes first, then what runs, then what has closed, each the newest first") {
    val shown = rows(page(application, topology("a", state = "closed"), topology("b"), topology("c", state = "closed"),
      topology("d", state = "closing")), "stagecrew-topologies")
    assert(shown.map(_(1)) == Seq("application", "d", "b", "c", "a"))
    assert(shown.head(5) == "1.0 min")
  }

  test("without topologies a sentence says how to begin, and only then") {
    assert((page(application) \\ "code").text.contains("topology("))
    assert((page(application, topology("a")) \\ "code").isEmpty)
  }

  test("everything that a user supplied is text, in cells and in titles") {
    val view = topology(Hostile, listeners = 1, error = s"Traceback $Hostile\n$Hostile")
      .copy(name = Hostile, unclosed = Vector(Hostile), lostExecutors = Vector(Hostile), askedBy = Vector(Hostile))
    val text = page(application, view).toString
    assert(!text.contains("<script") && text.contains("&lt;script&gt;"))
    assert(!text.contains("\"'&\"") && !text.contains("""</script>"'"""))
  }

  test("an error is shortened to the line that says what happened") {
    def shown(error: String, scope: String): String = rows(page(topology("a", listeners = 1, error = error, scope = scope)),
      "stagecrew-listeners").head.last
    assert(shown("", "worker") == "")
    assert(shown("Traceback (most recent call last):\n  File \"x\"\nValueError: bad\n", "worker") == "ValueError: bad")
    assert(shown("java.io.IOException: bad\n\tat x.Y", "jvm") == "java.io.IOException: bad")
    assert(shown("x" * 500, "worker") == "x" * 119 + "\u2026")
  }

  test("times are readable, and sort by their value") {
    val html = page(topology("a", listeners = 1))
    assert(rows(html, "stagecrew-listeners").head.slice(8, 10) == Seq("1.5 ms", "3 s"))
    assert((html \\ "@sorttable_customkey").map(_.text).containsSlice(Seq("1500", "2500000")))
  }

  test("a page has a bounded number of rows, and says so") {
    val html = page(topology("a", listeners = Tab.MaxRows + 1))
    assert(rows(html, "stagecrew-listeners").size == Tab.MaxRows)
    assert(html.text.contains(s"The first ${Tab.MaxRows} of ${Tab.MaxRows + 1} are shown"))
    assert(Json.items(Snapshot(Vector(topology("a", listeners = Tab.MaxRows + 1)), Totals()).json.get("topologies"))
      .head.get("executors").get("1").get("listeners").size == Tab.MaxRows + 1)
  }
}
