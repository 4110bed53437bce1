package org.apache.spark.stagecrew
package wire

import scala.collection.immutable.VectorMap
import partitions._

/**
 * One registered listener. Its pickled bytes are never read by the JVM.
 *
 * @param kind "pickle", "name" or "jvm"
 * @param target module:name, or a class
 * @param scope unknown for a name until an executor has imported it
 * @param blob the position of its pickled bytes in `Description.blobs`
 */
final case class Entry(
    index: Int, kind: String, name: String, target: String, scope: Option[String], lifetime: Option[String],
    required: Boolean, blob: Option[Int]) {

  def python: Boolean = kind != "jvm"
  def forExecution: Boolean = lifetime.contains("execution")
}

/**
 * What an executor needs to know about a topology: a header, which is JSON of these fields, and the pickled listeners
 * as opaque bytes. `executable`, `environment` and `files` say how PySpark starts Python here, for the agent: the
 * executor's JVM cannot find them out.
 *
 * @param coordinated whether tasks of no named topology may call functions that are bound to the application's
 * operators
 * @param release the release policy of `DriverPartitions`. Spark manages the application's own partitions
 */
final case class Description(
    id: String, name: String, parent: Option[String], listeners: Vector[Entry], executable: String = "python3",
    environment: VectorMap[String, String] = VectorMap.empty, files: Vector[String] = Vector.empty,
    coordinated: Boolean = false, release: String = DriverPartitions.KeepsAll)(
    val blobs: Vector[Array[Byte]] = Vector.empty) {

  /** The JSON of the header, encoded once. */
  lazy val body: String = Json.write(this)

  /** The lifetime of the listeners that open in it; None if all open in it. */
  def lifetime: Option[String] =
    if (id.startsWith(Description.ExecutionPrefix)) Some("execution")
    else if (id == Description.Application) Some("application")
    else None

  /** Adds listeners after its own, whose indexes and positions stay. */
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

  /** The first part of the ids of executions' topologies. */
  val ExecutionPrefix = "execution-"

  def decode(frame: Frame): Description = Json.read[Description](frame.text("body")).copy()(frame.blobs("blobs"))
}
