package org.apache.spark.stagecrew

import scala.collection.immutable.VectorMap
import scala.xml.{Elem, Group, Node}
import org.apache.spark.stagecrew.driver.DriverCrew
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, PartitionCounts, Totals}
import org.apache.spark.stagecrew.spark.PageRequest
import org.apache.spark.stagecrew.ui.{OperatorView, PageModel, Snapshot, Span, Tab, TopologyView}
import org.apache.spark.stagecrew.wire.Json

/** Builds views of topologies for the suites that test pages, and reads the pages. */
object Views {
  val Hostile = "<script>alert(1)</script>\"'&"

  def topology(id: String, kind: String = DriverCrew.NamedKind, state: String = "active", listeners: Int = 0,
      error: String = "", scope: String = "worker"): TopologyView =
    TopologyView(id, s"name of $id", kind, None, state, 1000, if (state == "closed") 31000 else 0, 2, Vector("1"),
      VectorMap("1" -> ExecutorCounts((0 until listeners).map(i =>
        ListenerCounts(i, s"l$i", scope, opens = 1, openMicros = 1500, closeMicros = 2500000, lastError = error)).toVector)),
      Vector.empty, Vector.empty)

  def operator(name: String, progress: (String, Long)*): OperatorView = {
    val node = Json.parse("""{"kind": "splits", "state": "active", "live": 1, "finished": 2, "failed": 3, "abandoned": 4, "resets": 5, "eventsIn": 6,
      "eventsOut": 7, "requests": 8, "queued": 9, "waitsFor": "subtask 3 since 4 s",
      "replies": {"count": 10, "p50": 1100, "p95": 2200, "p99": 3300, "max": 4400}}""").put("name", name)
    val values = node.putObject("progress")
    (if (progress.isEmpty) Seq("splits done" -> 4L, "splits left" -> 2L) else progress)
      .foreach { case (label, value) => values.put(label, value) }
    Json.as[OperatorView](node)
  }

  /** A topology with listeners, spans and coordinators on two executors. */
  def busy(id: String, spans: Int = 200): TopologyView = {
    val listeners = (0 until 3).map(i => ListenerCounts(i, s"listener $i", "worker", 4, 4, 0, 0, 7000, 8000)).toVector
    topology(id, state = "closed").copy(
      askedBy = Vector("1", "2"), executors = Vector("1", "2").map(_ -> ExecutorCounts(listeners, 2, 0, Set.empty,
        PartitionCounts(1, 2, 3000, 4, 5000, 6, 7000))).to(VectorMap),
      operators = Vector(operator("splits"), operator("budget")),
      spans = (0 until spans).map(i => Span(s"${i % 2 + 1}", if (i < 4) "open" else "task", s"stage 1, partition $i", 1000 + 100L * i, 1150 + 100L * i, i % 50 == 7)).toVector)
  }

  def snapshot(topologies: TopologyView*): Snapshot = Snapshot(topologies.toVector, Totals(1, 2, 3, 4))

  def model(topologies: TopologyView*): PageModel = PageModel(snapshot(topologies: _*), 61000)

  def page(path: String, model: PageModel, parameters: (String, String)*): Elem = {
    val page = Tab.pages(() => model).find(_.path == path).get
    plain(<div>{page.html(PageRequest("/ui/stagecrew", parameters.toMap))}</div>).asInstanceOf[Elem]
  }

  // Expands the groups in Spark's own tables, because `\\` does not search inside groups.
  private def plain(node: Node): Node = node match {
    case elem: Elem => elem.copy(child = elem.child.flatMap { case Group(nodes) => nodes; case other => Seq(other) }.map(plain))
    case other => other
  }

  /** The text of the cell below this heading, in the first row of a table. */
  def cell(page: Elem, table: String, header: String): String = {
    val headers = (page \\ "table").filter(_ \@ "id" == s"stagecrew-$table").flatMap(_ \\ "th").map(_.text.trim)
    rows(page, table).head(headers.indexOf(header))
  }

  /** The texts of the cells of a table, row by row. */
  def rows(page: Elem, id: String): Seq[Seq[String]] =
    (page \\ "table").filter(_ \@ "id" == s"stagecrew-$id").flatMap(_ \\ "tr").map(_ \ "td").map(_.map(_.text.trim)).filter(_.nonEmpty)
}
