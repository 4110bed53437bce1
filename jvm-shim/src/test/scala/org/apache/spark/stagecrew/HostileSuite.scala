package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.xml.Elem
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, Totals}
import org.apache.spark.stagecrew.ui.{PageModel, ProcessView, RecoveryView, Show, Snapshot, Span, StepView, Tab}
import org.apache.spark.stagecrew.ui.TopologyView

/** Tests that pages show values from users as text, whatever the values contain and however long they are. */
class HostileSuite extends AnyFunSuite {
  import Views._

  private val Long = "long name " * 1000
  private val Reversed = "\u202Egpj.exe\u2066\u200F"
  private val Texts = Seq(Hostile, "</td></tr></table><script>alert(2)</script>", "' onmouseover='alert(3)", "]]><!-- -->", Reversed, Long, "\uD83D\uDE00" * 5000, "a\u0000b\u001Bc")

  private def everywhere(text: String): PageModel = {
    val counts = ExecutorCounts(Vector(ListenerCounts(0, text, text, 1, 1, 1, 0, 1, 1, s"Traceback\n$text")))
    val view = TopologyView(s"$text-0123", text, text, Some(text), text, 1000, 0, 1, Vector(text), VectorMap(text -> counts), Vector(text), Vector(text),
      Vector(operator(text, text -> 1L).copy(kind = text, state = text, waitsFor = text, lastError = text)),
      Vector(Span(text, text, text, 1000, 2000, failed = true)))
    PageModel(Snapshot(Vector(view), Totals(), Vector(ProcessView(text, text, 1, text, 1, 0, Vector.empty)),
      Some(RecoveryView(VectorMap(text -> text), Vector(StepView(text, text, 1, 0))))), 61000)
  }

  private def pages(model: PageModel): Seq[Elem] =
    Seq("", "topology", "processes", "jobs").map(path => page(path, model, "id" -> Tab.key(model.snapshot.topologies.head.id)))

  test("markup, quotes and control characters remain text in cells, titles and SVG images") {
    Texts.foreach { text =>
      pages(everywhere(text)).foreach { html =>
        assert((html \\ "script").map(_ \@ "src") == Seq("/ui/stagecrew/static/live.js") && (html \\ "img").isEmpty)
        assert((html \\ "_").forall(_.attributes.forall(!_.key.startsWith("on"))))
        val written = html.toString.replaceFirst("<script src=", "")
        assert(!written.contains("<script") && !written.exists(c => c < ' ' && c != '\n' && c != '\t' && c != '\r'))
      }
    }
    assert(pages(everywhere(Hostile)).head.toString.contains("&lt;script&gt;alert(1)"))
  }

  test("a long text is shortened in its cell, and its title shows more of the text") {
    val html = pages(everywhere(Long))
    html.foreach(one => (one \\ "td").foreach(cell => assert(cell.text.length <= 2 * Show.Length, cell.text)))
    html.foreach(one => assert((one \\ "@title").map(_.text.length).forall(_ <= Show.TitleLength)))
    assert((html.head \\ "@title").exists(_.text.length == Show.TitleLength))
    html.foreach(one => assert((one \\ "@href").forall(_.text.length < 200)))
  }

  test("the shortened beginning of a text never ends with half a surrogate pair") {
    (1 to 6).foreach { length =>
      val cut = Show.first("a" + "\uD83D\uDE00" * 5, length)
      assert(cut.length <= length && !cut.dropRight(1).lastOption.exists(_.isHighSurrogate))
    }
  }

  test("a right-to-left text does not affect the text around it") {
    val cells = (pages(everywhere(Reversed)).head \\ "td").filter(_.text.contains(Reversed))
    assert(cells.nonEmpty && cells.forall(cell => (cell \\ "bdi").exists(_.text.contains(Reversed))))
  }

  test("the shortened end of a text never begins with half a surrogate pair") {
    (1 to 6).foreach { length =>
      val cut = Show.last("\uD83D\uDE00" * 5 + "a", length)
      assert(cut.length <= length && !cut.drop(1).headOption.exists(_.isLowSurrogate) && (length == 1 || cut.endsWith("a")))
    }
    assert(Show.last("short", 5) == "short")
  }
}
