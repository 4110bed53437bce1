package org.apache.spark.stagecrew

import com.fasterxml.jackson.annotation.JsonIgnoreProperties
import org.apache.spark.scheduler.SparkListenerEvent

/**
 * An event of the event log: the whole state of one topology, or of the application beside its topologies, at this
 * time. A later event replaces an earlier one of the same `kind` and `id`. Fields are added, never changed. A newer
 * version, or another program, may leave out anything.
 *
 * @param number the number of this event among those of the same `kind` and `id`
 * @param capped nothing more is stored until the end; in the last event: changes before the end were not stored
 * @param trimmed the body was too large, and something was left out
 */
@JsonIgnoreProperties(ignoreUnknown = true)
final case class StagecrewState(
    version: Int, kind: String, id: String, time: Long, number: Int, capped: Boolean, trimmed: Boolean, body: String)
  extends SparkListenerEvent

private[stagecrew] object StagecrewState {
  val Topology = "topology"
  val Application = "application" // processes and the stored job

  /** The maximum size of a body in UTF-8. From a larger one something is left out. */
  val MaxBytes: Int = 256 * 1024
}
