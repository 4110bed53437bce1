package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import java.nio.charset.StandardCharsets.UTF_8
import java.security.MessageDigest
import scala.xml.{Node, Text}
import org.apache.spark.SparkContext
import driver._, spark._, wire._

/** The content of the pages: a snapshot that was taken at `now`. If it was read from an event log (`history`), `times`
  * contains the time of each topology's last event, by id, and `notes` explain missing parts, by the topology's id, or
  * by "" for the other pages. */
private[stagecrew] final case class PageModel(
    snapshot: Snapshot, now: Long, history: Boolean = false, times: Map[String, Long] = Map.empty,
    notes: Map[String, Seq[String]] = Map.empty) {

  /** The time up to which the state of a topology is known. */
  def until(topology: TopologyView): Long =
    if (topology.ended > 0) topology.ended else times.getOrElse(topology.id, now)

  def duration(topology: TopologyView): Long = math.max(0L, until(topology) - topology.started)

  /** The time from `started` to `ended`, or to now if `ended` is 0. */
  def elapsed(started: Long, ended: Long): Long = math.max(0L, (if (ended > 0) ended else now) - started)

  /** The running tasks of a topology. */
  def running(topology: TopologyView): Vector[Span] = snapshot.running.getOrElse(topology.id, Vector.empty)

  /** The topology with this id or link key. */
  def find(key: String): Option[TopologyView] = snapshot.topologies.find(t => t.id == key || Tab.key(t.id) == key)
}

/** The first fields in the JSON of each page: the version, and the notes of the page. */
private[stagecrew] final case class PageHead(version: Int, notes: Seq[String])

/**
 * The tab "Stagecrew" of the Spark UI: the current state of topologies, processes and the stored job. Each page is also
 * available as JSON, under its path followed by `json`. The History Server has the same pages. The pages are read-only.
 * They never return unknown parts of a request, and consist of XML nodes, which escape all text.
 */
private[stagecrew] object Tab {
  val Prefix = "stagecrew"
  private val Static = "static"

  def attach(sc: SparkContext, crew: DriverCrew): Unit =
    SparkUi.attachTab(sc, Prefix, pages(() => PageModel(crew.snapshot, System.currentTimeMillis(),
      notes = Map("" -> crew.partitions.problems))), s"$Prefix/$Static", script)

  def pages(model: () => PageModel): Seq[Page] = {
    def page(
        path: String, title: (PageModel, PageRequest) => String, content: (PageModel, PageRequest) => Seq[Node],
        json: (PageModel, PageRequest) => ObjectNode): Page = {
      def html(now: PageModel, request: PageRequest): Seq[Node] =
        live(now, request, menu(now, request, path) ++ content(now, request))
      Page(path, title(model(), _), html(model(), _), request => Json.write(json(model(), request)))
    }
    Seq(
      page("", (_, _) => "Stagecrew", OverviewPage.html, (now, _) => OverviewPage.json(now)),
      page("topology", TopologyPage.title, TopologyPage.html, TopologyPage.json),
      page("processes", (_, _) => "Stagecrew: Python processes", ProcessesPage.html,
        (now, _) => ProcessesPage.json(now)),
      page("jobs", (_, _) => "Stagecrew: stored job", JobPage.html, (now, _) => JobPage.json(now)))
  }

  /** The content of a page, which the script updates. In the History Server nothing changes. */
  private def live(model: PageModel, request: PageRequest, content: Seq[Node]): Seq[Node] =
    if (model.history) content
    else <div id="stagecrew-content">{content}</div> ++
      <script src={s"${request.root}/$Static/live.js"} defer="defer"></script>

  private lazy val script: Array[Byte] =
    getClass.getResourceAsStream("/org/apache/spark/stagecrew/ui/live.js").readAllBytes()

  /** The first fields in the JSON of a page. `id` is the topology's id on the page of a topology. */
  def head(model: PageModel, id: String = ""): ObjectNode =
    Json.tree(PageHead(Snapshot.Version, model.notes.getOrElse(id, Nil)))

  /** The menu: links to the pages and to the JSON of this page. */
  private def menu(model: PageModel, request: PageRequest, here: String): Seq[Node] = {
    val pages = Seq("" -> "Overview", "processes" -> "Python processes") ++
      model.snapshot.recovery.map(_ => "jobs" -> "Stored job")
    val links = pages.map { case (path, name) =>
      if (path == here) <strong aria-current="page">{name}</strong> else <a href={link(request, path)}>{name}</a>
    }
    val id = if (here == "topology")
      request.parameters.get("id").flatMap(model.find).map(t => s"?id=${key(t.id)}") else None
    val json = s"${link(request, here)}json/${id.getOrElse("")}"
    <p class="stagecrew-menu">{
      (links :+ <a href={json}>JSON</a>).flatMap(node => Seq[Node](Text(" | "), node)).drop(1)}</p>
  }

  private def link(request: PageRequest, path: String): String =
    if (path.isEmpty) s"${request.root}/" else s"${request.root}/$path/"

  /** A link to a topology's page. */
  def topology(request: PageRequest, topology: TopologyView): Node =
    <a href={s"${link(request, "topology")}?id=${key(topology.id)}"}>{Show.text(topology.name)}</a>

  /** The key of a topology in links: its id if the id is short and has only safe characters, otherwise a digest. Ids
    * contain names that users choose. */
  def key(id: String): String =
    if (id.length <= 100 && id.forall(c => c < 128 && (c.isLetterOrDigit || c == '-' || c == '_' || c == '.'))) id
    else MessageDigest.getInstance("SHA-256").digest(id.getBytes(UTF_8))
      .take(16).map(byte => f"$byte%02x").mkString("key-", "", "")
}
