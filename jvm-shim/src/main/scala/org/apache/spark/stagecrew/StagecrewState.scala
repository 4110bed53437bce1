package org.apache.spark.stagecrew

import com.fasterxml.jackson.annotation.JsonIgnoreProperties
import org.apache.spark.scheduler.SparkListenerEvent

/**
 * An event of the event log: the whole state of one topology at a point in time, or of the application without its
 * topologies. A later event replaces an earlier one of the same `kind` and `id`. New versions may add fields, but never
 * change existing ones. Readers must expect that any field is missing.
 *
 * @param number the number of this event among those with the same `kind` and `id`
 * @param capped whether the limit of events has been reached: no more events are stored until the last one. In the last
 * event: whether some changes before it were not stored
 * @param trimmed whether parts of the body were left out, because it was too large
 */
@JsonIgnoreProperties(ignoreUnknown = true)
final case class StagecrewState(
    version: Int, kind: String, id: String, time: Long, number: Int, capped: Boolean, trimmed: Boolean, body: String)
  extends SparkListenerEvent

private[stagecrew] object StagecrewState {
  val Topology = "topology"
  val Application = "application" // processes and the stored job

  /** The maximum size of a body in UTF-8. Larger bodies are trimmed. */
  val MaxBytes: Int = 256 * 1024
}
