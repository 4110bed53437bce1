package org.apache.spark.stagecrew
package wire

import scala.collection.immutable.VectorMap
import partitions._

/**
 * One registered listener. The JVM never reads its pickled bytes.
 *
 * @param kind "pickle", "name" or "jvm"
 * @param target "module:name", or a class name
 * @param scope if the listener is registered by name, unknown until an executor has imported it
 * @param blob the index of its pickled bytes in `Description.blobs`
 */
final case class Entry(
    index: Int, kind: String, name: String, target: String, scope: Option[String], lifetime: Option[String],
    required: Boolean, blob: Option[Int]) {

  def python: Boolean = kind != "jvm"
  def forExecution: Boolean = lifetime.contains("execution")
}

/**
 * Describes a topology to executors: a header, which is the JSON of these fields, and the pickled listeners as opaque
 * bytes. `executable`, `environment` and `files` are needed to start the agent as PySpark starts Python. The executor's
 * JVM has no other way to find them.
 *
 * @param coordinated whether the application has operators. Tasks without a named topology may then call bound
 * functions
 * @param release the release policy of `DriverPartitions`. Spark manages the partitions of the application
 * @param traceparent the topology's trace context, as in the W3C header of this name. Empty if it is not traced
 */
final case class Description(
    id: String, name: String, parent: Option[String], listeners: Vector[Entry], executable: String = "python3",
    environment: VectorMap[String, String] = VectorMap.empty, files: Vector[String] = Vector.empty,
    coordinated: Boolean = false, release: String = DriverPartitions.KeepsAll, traceparent: String = "")(
    val blobs: Vector[Array[Byte]] = Vector.empty) {

  /** The JSON of the header, encoded once. */
  lazy val body: String = Json.write(this)

  /** Only listeners with this lifetime open in this topology. None if all listeners open. */
  def lifetime: Option[String] =
    if (id.startsWith(Description.ExecutionPrefix)) Some("execution")
    else if (id == Description.Application) Some("application")
    else None

  /** Appends listeners. The indexes of the existing ones do not change. */
  def and(more: Description): Description = {
    val renumbered = more.listeners.zipWithIndex.map { case (entry, i) =>
      entry.copy(index = listeners.size + i, blob = entry.blob.map(_ + blobs.size))
    }
    copy(listeners = listeners ++ renumbered)(blobs ++ more.blobs)
  }
}

object Description {
  /** The id and the name of the topology that spans the whole application. */
  val Application = "application"

  /** The prefix of the ids of executions' topologies. */
  val ExecutionPrefix = "execution-"

  def decode(frame: Frame): Description = Json.read[Description](frame.text("body")).copy()(frame.blobs("blobs"))
}
