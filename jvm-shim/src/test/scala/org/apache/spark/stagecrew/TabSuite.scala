package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.xml.Elem
import org.apache.spark.stagecrew.driver.DriverCrew
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, Totals}
import org.apache.spark.stagecrew.spark.PageRequest
import org.apache.spark.stagecrew.ui.{PageHead, PageModel, ProcessView, RecoveryView, Sample, Show, Snapshot, SparkJob, StepView}
import org.apache.spark.stagecrew.ui.{Tab, TopologyView}
import org.apache.spark.stagecrew.wire.Json

class TabSuite extends AnyFunSuite {
  import Views._

  private val application = topology("application", DriverCrew.ApplicationKind)

  private def overview(topologies: TopologyView*): Elem = page("", model(topologies: _*))

  private def of(view: TopologyView, parameters: (String, String)*): Elem =
    page("topology", model(application, view), ("id" -> Tab.key(view.id)) +: parameters: _*)

  test("the overview lists the application, then active topologies, then closed ones, each newest first") {
    val listed = rows(overview(application, topology("a", state = "closed"), topology("b"),
      topology("c", state = "closed"), topology("d", state = "closing")), "topologies")
    assert(listed.map(_(1)) == Seq("application", "d", "b", "c", "a"))
    assert(listed.head(5) == "1.0 min" && listed.last(5) == "30 s")
  }

  test("the header of each column with numbers has a tooltip") {
    val withoutTooltip = Seq(overview(busy("t1")), of(busy("t1"))).flatMap(_ \\ "th")
      .filterNot(header => (header \\ "span").exists(_ \@ "title" != "")).map(_.text.trim).distinct
    assert(withoutTooltip.toSet == Set("Topology", "Id", "Kind", "State", "Started", "Listener", "Scope", "Last error",
      "Name", "Progress", "Executor")) // texts and dates
  }

  test("a page of a running application is updated by a script") {
    assert((overview(application) \\ "div").exists(_ \@ "id" == "stagecrew-content"))
    assert((overview() \\ "script").map(_ \@ "src") == Seq("/ui/stagecrew/static/live.js"))
    val history = page("", model(topology("a")).copy(history = true))
    assert((history \\ "script").isEmpty && !(history \\ "div").exists(_ \@ "id" == "stagecrew-content"))
  }

  test("columns that are zero in all rows are not shown") {
    val headers = (overview(topology("a", listeners = 1)) \\ "th").map(_.text.trim)
    assert(headers.contains("Opens") && !headers.contains("Lost") && !headers.contains("Coordinators"))
  }

  test("the page of a topology links to its last jobs, their stages and their SQL queries, newest first") {
    val html = of(topology("a").copy(jobs = 70, lastJobs = Vector(SparkJob(7, Vector(3, 4), -1),
      SparkJob(8, Vector(5), 2))))
    assert(rows(html, "jobs") == Seq(Seq("8", "5", "2"), Seq("7", "3 4", "")))
    val links = (html \\ "table").filter(_ \@ "id" == "stagecrew-jobs").flatMap(_ \\ "td").flatMap(_ \\ "a").map(_ \@ "href")
    assert(links == Seq("/ui/jobs/job/?id=8", "/ui/stages/stage/?attempt=0&id=5", "/ui/SQL/execution/?id=2",
      "/ui/jobs/job/?id=7", "/ui/stages/stage/?attempt=0&id=3", "/ui/stages/stage/?attempt=0&id=4"))
    assert((html \\ "h4").map(_.text).contains("Jobs (70)"))
  }

  test("splits have a progress bar if their number is known") {
    def bars(progress: (String, Long)*): Int =
      (of(topology("a").copy(operators = Vector(operator("o", progress: _*)))) \\ "div").count(
        div => (div \@ "class").split(" ").contains("progress"))
    assert(bars("splits done" -> 4, "splits in progress" -> 1, "splits left" -> 2) > 0)
    assert(bars("splits done" -> 4, "splits in progress" -> 1) == 0)
    assert(bars("splits done" -> 0, "splits in progress" -> 0, "splits left" -> 0) == 0)
    assert(bars("step" -> 4) == 0)
  }

  test("a hint explains how to begin a topology, but only before the first one") {
    assert((overview(application) \\ "code").text.contains("topology("))
    assert((overview(application, topology("a")) \\ "code").isEmpty)
  }

  test("the overview shows the sum of a listener over all executors, and a topology's page shows each executor") {
    val one = ExecutorCounts(Vector(ListenerCounts(0, "pool", "worker", 3, 2, 1, 1, 1500, 1500, "bad")))
    val view = topology("a").copy(executors = VectorMap("1" -> one, "2" -> one))
    assert(rows(overview(view), "listeners") == Seq(Seq("name of a", "pool", "worker", "2", "6", "4", "2", "2", "3.0 ms", "3.0 ms", "bad")))
    assert(rows(of(view), "listeners").map(_.take(5)) == Seq(Seq("pool", "worker", "1", "3", "2"), Seq("pool", "worker", "2", "3", "2")))
  }

  test("an error is shortened to the line that describes it") {
    def shown(error: String, scope: String): String =
      rows(overview(topology("a", listeners = 1, error = error, scope = scope)), "listeners").head.last
    assert(shown("", "worker") == "")
    assert(shown("Traceback (most recent call last):\n  File \"x\", line 1, in f\nValueError: bad\n", "worker") == "ValueError: bad")
    assert(shown("java.io.IOException: bad\n\tat x.Y", "jvm") == "java.io.IOException: bad")
    assert(shown("x" * 500, "worker") == "x" * 119 + "\u2026")
  }

  test("a topology's page shows its coordinators with events in both directions, waits, progress and percentiles") {
    val html = of(topology("a").copy(operators = Vector(operator("budget"))))
    def cell(header: String): String = Views.cell(html, "coordinators", header)
    assert(Seq("Name", "Events in", "Events out", "Requests", "Queued").map(cell) == Seq("budget", "6", "7", "8", "9"))
    assert(cell("Progress") == "splits done 4 / splits left 2" && cell("Waits for") == "subtask 3 since 4 s")
    assert(cell("Replies") == "1.1 ms / 2.2 ms / 3.3 ms / 4.4 ms" && cell("Acknowledgements") == "")
  }

  test("a topology's page shows the numbers and sizes of partitions by state, for each executor and in total") {
    val html = of(busy("a"))
    assert(rows(html, "executors").map(_.take(9)) ==
      Seq("1", "2").map(id => Seq(id, "", "1", "2", "2.9 KiB", "4", "4.9 KiB", "6", "6.8 KiB")))
    assert(html.text.contains("2 in progress, 4 finished outputs (5.9 KiB), 8 cached blocks (9.8 KiB), 12 released (13.7 KiB)"))
    assert(!html.text.contains("could not be deleted"))
  }

  test("a topology's page and its JSON count partitions that could not be deleted, for each executor and in total") {
    val view = busy("a").copy(executors = busy("a").executors.map { case (id, counts) => id -> counts.copy(partitions = counts.partitions.copy(releaseFailures = id.toLong)) })
    assert(Seq("1", "2").map(id => rows(of(view), "executors").find(_.head == id).get(9)) == Seq("1", "2"))
    assert(of(view).text.contains("12 released (13.7 KiB), 3 could not be deleted"))
    assert(Json.tree(view).at("/executors/2/partitions/releaseFailures").asLong == 2)
  }

  test("a topology's page links to its parent and to the topologies inside it") {
    val inner = topology("inner").copy(parent = Some("outer"))
    def links(of: String): Seq[String] =
      (page("topology", model(topology("outer"), inner), "id" -> of) \\ "a").map(_ \@ "href").filter(_.contains("?id="))
    assert(links("outer").contains("/ui/stagecrew/topology/?id=inner"))
    assert(links("inner").contains("/ui/stagecrew/topology/?id=outer"))
  }

  test("processes are shown with current and past values, and ended ones are marked") {
    val samples = Vector(Sample(1000, 100L << 20, 0, 3, 20), Sample(2000, 300L << 20, 1500, 4, 21))
    val views = Vector(ProcessView("1", "h", 77, "worker", 1000, 5000, samples), ProcessView("1", "h", 78, "agent", 1000, 0, samples))
    val html = page("processes", PageModel(Snapshot(Vector.empty, Totals(), views), 61000))
    assert(rows(html, "processes").map(_.slice(2, 5)) == Seq(Seq("agent", "78", "running"), Seq("worker", "77", "ended")))
    assert(Views.cell(html, "processes", "Memory").startsWith("300.0 MiB") && Views.cell(html, "processes", "CPU").startsWith("1.50"))
    assert((html \\ "svg").size == 8 && (html \\ "svg").forall(_ \@ "role" == "img"))
    assert((html \\ "polyline").head \@ "points" == "1.0,13.0 99.0,1.0")
  }

  test("the page of the stored job shows facts and steps, and the menu links to it if there is a stored job") {
    val recovery = RecoveryView(VectorMap("job" -> "nightly", "term" -> "3"), Vector(StepView("load", "found", 1000, 2500), StepView("run", "running", 3000, 0)))
    val withJob = PageModel(Snapshot(Vector.empty, Totals(), Vector.empty, Some(recovery)), 61000)
    val html = page("jobs", withJob)
    assert((html \\ "li").map(_.text) == Seq("Job: nightly", "Term: 3"))
    assert(rows(html, "steps").map(_.take(2)) == Seq(Seq("load", "found"), Seq("run", "running")) && rows(html, "steps")(1).last == "58 s")
    assert(html.text.contains("Steps (2)") && !html.text.contains("Listed are"))
    val more = page("jobs", withJob.copy(snapshot = withJob.snapshot.copy(recovery = Some(recovery.copy(forgottenSteps = 300)))))
    assert(more.text.contains("Steps (302)") && more.text.contains("The table lists running steps and the last ended steps (2)."))
    def linked(model: PageModel): Boolean = (page("", model) \\ "a").exists(_ \@ "href" == "/ui/stagecrew/jobs/")
    assert(linked(withJob) && !linked(model(application)) && page("jobs", model(application)).text.contains("does not run a stored job"))
  }

  test("each page is also available as JSON, with its version") {
    val full = Snapshot(Vector(busy("a"), topology("b")), Totals(), Vector(ProcessView("1", "h", 77, "worker", 1, 0, Vector.empty)),
      Some(RecoveryView(VectorMap("job" -> "j"), Vector.empty)))
    val pages = Tab.pages(() => PageModel(full, 61000)).map(page => page.path -> Json.parse(page.json(PageRequest("", Map("id" -> "a"))))).toMap
    assert(pages.values.forall(_.get("version").asInt == 1))
    assert(Json.as[Snapshot](pages("")) == full && Json.as[TopologyView](pages("topology").get("topology")) == busy("a"))
    assert(pages("processes").get("processes").size == 1 && pages("jobs").at("/recovery/facts/job").asText == "j")
  }

  test("a missing or unknown id is refused, and not echoed") {
    Seq(Nil, Seq("id" -> "echo-me")).foreach { parameters =>
      val refused = intercept[IllegalArgumentException](page("topology", model(application), parameters: _*))
      assert(refused.getMessage.contains("id") && !refused.getMessage.contains("echo-me"))
    }
  }

  test("the duration of a topology without an end in an event log is measured up to its last event") {
    val view = topology("a")
    val html = page("topology", PageModel(snapshot(view), 90000, history = true, Map("a" -> 11000L), Map("a" -> Seq("a note"))), "id" -> "a")
    assert(html.text.contains("Duration so far: 10 s") && (html \\ "p").exists(p => p.text == "a note" && (p \@ "class").contains("alert")))
  }

  test("the notes of a page from an event log are also in its JSON, and a live page has no notes") {
    def notes(model: PageModel): Map[String, Seq[String]] =
      Tab.pages(() => model).map(page => page.path -> Json.read[PageHead](page.json(PageRequest("", Map("id" -> "a")))).notes).toMap
    val old = Map("" -> Seq("as of yesterday"), "a" -> Seq("a note"))
    val seen = notes(PageModel(snapshot(topology("a")), 61000, history = true, notes = old))
    assert(seen == Map("" -> old(""), "processes" -> old(""), "jobs" -> old(""), "topology" -> old("a")))
    assert(Seq("", "processes").forall(path => page(path, PageModel(snapshot(topology("a")), 61000, history = true, notes = old)).text.contains(old("").head)))
    assert(notes(model(topology("a"))).values.forall(_.isEmpty) && notes(model(topology("a"))).size == 4)
  }

  test("the title of a long Python error contains the end of the error, and that of a JVM error the beginning") {
    def title(scope: String): String = {
      val html = of(topology("a", listeners = 1, error = s"first\n${"x\n" * 4000}last", scope = scope))
      (html \\ "@title").map(_.text).find(_.contains("x\nx")).get
    }
    assert(title("worker").endsWith("last") && title("jvm").startsWith("first"))
    assert(Seq("worker", "jvm").map(title(_).length).forall(_ == Show.TitleLength))
  }
}
