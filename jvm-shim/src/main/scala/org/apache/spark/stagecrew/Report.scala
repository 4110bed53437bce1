package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.node.ObjectNode
import org.apache.spark.scheduler._
import spark._, ui._, wire._

/** The main class that `stagecrew report` runs with spark-submit. It reads an event log like the History Server, and
  * prints the content of the tab as JSON. */
object Report {
  /** The prefix of the printed line, which contains either the JSON or an error.
    * python/stagecrew/observability/event_log.py reads the line. */
  private val ReportPrefix = "stagecrew-report: "
  private val ErrorPrefix = "stagecrew-report-error: "

  def main(arguments: Array[String]): Unit = {
    val line = try ReportPrefix + Json.write(of(arguments.head)) catch {
      case Failure(error) => ErrorPrefix + String.valueOf(error.getMessage).linesIterator.mkString(" ")
    }
    new java.io.PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true, "UTF-8").println(line)
  }

  /** The content of an event log, with the application and the notes. */
  private[stagecrew] def of(log: String): ObjectNode = {
    val store = SparkUi.inMemory(classOf[KeptState])
    val application = new Application
    SparkUi.replay(log, Seq(new HistoryListener(store, Int.MaxValue), application), application.inspect)
    val model = History.of(store.all)
    val node = model.snapshot.json
    node.set[ObjectNode]("application", application.json)
    val names = model.snapshot.topologies.map(topology => topology.id -> topology.name).toMap
    val notes = model.notes.toSeq.sortBy(_._1).flatMap { case (id, texts) =>
      texts.map(text => names.get(id).fold(text)(name => s"$name: $text")) }
    node.setAll[ObjectNode](Json.tree(PageHead(Snapshot.Version, notes)))
  }

  /** The events that the report needs. Lines with other events are not parsed. */
  private val EventNames =
    Seq(classOf[StagecrewState].getName, "SparkListenerApplicationStart", "SparkListenerApplicationEnd")

  private final class Application extends SparkListener {
    val json: ObjectNode = Json.obj().put("id", "").put("name", "").put("spark", "").put("started", 0L).put("ended", 0L)

    override def onApplicationStart(event: SparkListenerApplicationStart): Unit =
      json.put("id", event.appId.getOrElse("")).put("name", event.appName).put("started", event.time)
    override def onApplicationEnd(event: SparkListenerApplicationEnd): Unit = json.put("ended", event.time)

    /** Returns whether the report needs this line. Also reads the Spark version from the line of
      * SparkListenerLogStart, because Spark does not pass that event to listeners. */
    def inspect(line: String): Boolean = {
      if (line.contains("SparkListenerLogStart"))
        Log.contained("reading the Spark version")(json.put("spark", Json.parse(line).path("Spark Version").asText))
      EventNames.exists(line.contains)
    }
  }
}
