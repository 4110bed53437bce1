package org.apache.spark.stagecrew

import java.util.Locale
import scala.xml.{Node, NodeSeq, Text}
import org.apache.spark.SparkContext

/**
 * The tab "Stagecrew" of the Spark UI: the state of topologies and listeners at the moment when it is loaded; as JSON at
 * `/stagecrew/json`. It is read-only, echoes nothing of a request, and is made of XML nodes only, which escape all text.
 */
private[stagecrew] object Tab {
  val Prefix = "stagecrew"

  /** How many rows of listeners are shown; the JSON has all of them. */
  val MaxRows = 2000

  private val ErrorLength = 120

  def attach(sc: SparkContext, crew: DriverCrew): Unit = SparkInternals.attachTab(sc, Prefix, new TabContent {
    override def html: Seq[Node] = page(crew.snapshot, System.currentTimeMillis())
    override def json: String = Json.write(crew.snapshot.json)
  })

  /** The page of a snapshot at this time. */
  def page(snapshot: Snapshot, now: Long): Seq[Node] = {
    val topologies = ordered(snapshot.topologies)
    val listeners = for {
      topology <- topologies
      (executor, counts) <- topology.executors
      (_, listener) <- counts.listeners.toSeq.sortBy(_._1)
    } yield (topology, executor, listener)
    Seq[NodeSeq](
      <p>The state when this page was loaded. The same as <a href="json">JSON</a>.</p>,
      <h4>{s"Topologies (${topologies.size})"}</h4>,
      if (topologies.forall(_.kind == DriverCrew.ApplicationKind)) beginning else NodeSeq.Empty,
      SparkInternals.table("stagecrew-topologies", topologyHeaders, topologies.map(topologyRow(_, now))),
      <h4>{s"Listeners (${listeners.size})"}</h4>,
      if (listeners.isEmpty) <p>No listener has been opened yet: they open before the first task that they cover.</p>
      else SparkInternals.table("stagecrew-listeners", listenerHeaders,
        listeners.take(MaxRows).map { case (topology, executor, listener) => listenerRow(topology, executor, listener) }),
      if (listeners.size <= MaxRows) NodeSeq.Empty
      else <p>{s"The first $MaxRows of ${listeners.size} are shown; the JSON has all."}</p>).flatten
  }

  /** The application's first, then those that run, then those that have closed; the newest first. */
  private def ordered(topologies: Seq[TopologyView]): Seq[TopologyView] =
    topologies.reverse.sortBy(t => if (t.kind == DriverCrew.ApplicationKind) 0 else if (t.state != "closed") 1 else 2)

  private def beginning: NodeSeq =
    <p id="stagecrew-begin">No topology has begun yet. A topology is a run with a lifecycle; it begins in Python with
      {" "}<code>with stagecrew.crew(spark).topology("name", listeners=[...]):</code>{" "}
      and spans every job, query and stream that is started inside.</p>

  private val topologyHeaders =
    Seq("Topology", "Id", "Kind", "State", "Started", "Duration", "Jobs", "Executors", "Lost executors", "Unclosed")

  private def topologyRow(topology: TopologyView, now: Long): Node = {
    val duration = math.max(0L, (if (topology.ended > 0) topology.ended else now) - topology.started)
    <tr>
      <td>{topology.name}</td>
      <td>{topology.id}</td>
      <td>{topology.kind}</td>
      <td>{topology.state}</td>
      <td sorttable_customkey={topology.started.toString}>{SparkInternals.formatDate(topology.started)}</td>
      <td sorttable_customkey={duration.toString}>{SparkInternals.formatDuration(duration)}</td>
      <td>{topology.jobs.toString}</td>
      {several(topology.askedBy)}
      {several(topology.lostExecutors)}
      {several(topology.unclosed)}
    </tr>
  }

  /** How many, and which in the title. */
  private def several(what: Seq[String]): Node =
    <td sorttable_customkey={what.size.toString} title={title(what.mkString("\n"))}>{what.size.toString}</td>

  private val listenerHeaders = Seq("Topology", "Listener", "Scope", "Executor", "Opens", "Closes", "Failures", "Lost",
    "Time in open", "Time in close", "Last error")

  private def listenerRow(topology: TopologyView, executor: String, listener: ListenerCounts): Node =
    <tr>
      <td title={topology.id}>{topology.name}</td>
      <td>{listener.name}</td>
      <td>{listener.scope}</td>
      <td>{executor}</td>
      <td>{listener.opens.toString}</td>
      <td>{listener.closes.toString}</td>
      <td>{listener.failures.toString}</td>
      <td>{listener.lost.toString}</td>
      {time(listener.openMicros)}
      {time(listener.closeMicros)}
      <td title={title(listener.lastError)}>{shortened(listener)}</td>
    </tr>

  private def time(micros: Long): Node = {
    val text =
      if (micros < 1000000L) String.format(Locale.ROOT, "%.1f ms", micros / 1000.0) else SparkInternals.formatDuration(micros / 1000)
    <td sorttable_customkey={micros.toString}>{text}</td>
  }

  private def title(text: String): Option[Text] = if (text.isEmpty) None else Some(Text(text))

  /** The line that says what happened: the last of a Python traceback, the first of what a JVM's exception says. */
  private[stagecrew] def shortened(listener: ListenerCounts): String = {
    val lines = listener.lastError.linesIterator.map(_.trim).filter(_.nonEmpty).toSeq
    val line = (if (listener.scope == "jvm") lines.headOption else lines.lastOption).getOrElse("")
    if (line.length <= ErrorLength) line else s"${line.take(ErrorLength - 1)}\u2026"
  }
}
