package org.apache.spark.stagecrew

import com.fasterxml.jackson.annotation.JsonIgnoreProperties
import org.apache.spark.scheduler.SparkListenerEvent

/**
 * An event of the event log: the whole state of one topology at a point in time, or of the application without its
 * topologies. A later event replaces an earlier one of the same `kind` and `id`. New versions may add fields, but never
 * change existing ones. Readers must expect that any field is missing.
 *
 * @param number the number of this event among those with the same `kind` and `id`
 * @param capped the limit of events is reached, and no more are stored until the end. In the last event: some changes
 * before the end were not stored
 * @param trimmed the body was too large, so parts of it were left out
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
