package org.apache.spark.stagecrew
package driver

import java.util.{Map => JMap}
import java.util.concurrent.{ConcurrentHashMap, TimeUnit, TimeoutException}
import org.apache.spark.sql.StagecrewSql
import ui._, wire._

/** The methods that Python calls on the driver over py4j. They use only simple types, and return quickly, except
  * `drain`, `end` and `activity`, which wait. */
final class DriverFacade(crew: DriverCrew) {
  def version(): String = Shim.version
  def settings(): JMap[String, String] = Settings.allDefaults
  def closeTimeoutMs(): Long = crew.settings.closeTimeoutMs

  def registerApplication(frame: Array[Byte]): Unit = crew.registerApplication(decoded(frame))
  def begin(frame: Array[Byte]): Unit = crew.begin(decoded(frame))

  private def decoded(frame: Array[Byte]): Description = {
    if (frame.length > crew.settings.maxFrame) throw new IllegalArgumentException(
      s"the pickled listeners have ${frame.length} bytes, more than ${Settings.MaxFrame} allows")
    Description.decode(Frames.decodeMessage(frame))
  }

  private val ends = new ConcurrentHashMap[String, java.util.concurrent.Future[Unit]]()

  /** Ends a topology, and waits for it, but at most for `waitMs`. Returns its report when it has ended, and "" if it
    * has not ended yet: then call this again. The first call also searches for the partitions of kept datasets, which
    * can take a long time. */
  def end(id: String, timeoutMs: Long, waitMs: Long): String = try {
    ends.computeIfAbsent(id, _ => crew.end(id, timeoutMs)).get(waitMs, TimeUnit.MILLISECONDS)
    ends.remove(id)
    report(id)
  } catch { case _: TimeoutException => "" }

  def cancel(id: String, reason: String): Unit = crew.cancel(id, reason)

  /** The path of the address file of the channel to the coordinators on the driver. */
  def coordinationAddressFile(): String = crew.coordination.addressFile.toString

  /** Requests that the stored partitions of a dataset (a Dataset or a JavaRDD) are kept when the topology ends. */
  def keep(id: String, dataset: AnyRef): Unit = crew.partitions.keep(id, dataset)

  /** What does not work with this Spark, as a JSON list. */
  def problems(): String = Json.write(crew.partitions.problems)

  def stopQueries(id: String): Unit = crew.stopQueries(id)

  /** A streaming query of a session with these tags has started. Called if Spark's event of the start has no tags. */
  def queryStarted(tags: Set[String], run: String): Unit = crew.queryStarted(tags, run)

  /** How many tasks the current executors can run at the same time. */
  def slots(): Int = crew.slots

  def drain(timeoutMs: Long): Unit = crew.drain(timeoutMs)

  def activity(id: String): String = {
    val activity = crew.activity(id)
    Json.write(activity.copy(queries = activity.queries.map(StagecrewSql.queryName)))
  }

  /** Whether a batch of the streaming query with this id may be running. */
  def queryRuns(id: String): Boolean = StagecrewSql.queryRun(id).nonEmpty

  /** Enqueues the content of a STATISTICS frame. The driver handles the frame before any later call from Python. */
  def statistics(frame: Array[Byte]): Unit = crew.recordStatistics(Frames.decodeMessage(frame))

  /** Sets the state of the stored job that Python runs. `body` is the JSON of a `RecoveryView`. */
  def setStoredJob(body: String): Unit = crew.setStoredJob(Json.read[RecoveryView](body))

  /** Removes ended spans, at most `most`, and returns them as the JSON of `EndedSpans`. */
  def takeSpans(most: Int): String = Json.write(crew.traces.fold(EndedSpans(Vector.empty, 0))(_.take(most)))

  /** The JSON of one topology, or of all if `id` is empty. Timelines and processes are left out, because they can be
    * long. */
  def report(id: String): String = {
    val snapshot = crew.snapshot
    val chosen = snapshot.topologies.filter(t => id.isEmpty || t.id == id).map(_.copy(spans = Vector.empty))
    Json.write(snapshot.copy(topologies = chosen, processes = Vector.empty).json)
  }
}
