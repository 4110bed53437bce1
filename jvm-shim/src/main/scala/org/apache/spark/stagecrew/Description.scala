package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.node.ObjectNode

/** One listener as it was registered. Its pickled bytes are never looked into. */
final case class Entry(
    index: Int,
    kind: String, // "pickle", "name" or "jvm"
    name: String,
    target: String, // module:name, or a class
    scope: Option[String], // unknown for a name until an executor has imported it
    lifetime: Option[String],
    required: Boolean,
    blob: Option[Array[Byte]]) {

  def python: Boolean = kind != "jvm"
  def forExecution: Boolean = lifetime.contains("execution")

  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj()
    node.put("index", index).put("kind", kind).put("name", name).put("target", target).put("required", required)
    scope.foreach(node.put("scope", _))
    lifetime.foreach(node.put("lifetime", _))
    node
  }
}

/** How the agent's process is started: as PySpark starts workers. The JVM of an executor cannot know it otherwise. */
final case class PythonCommand(executable: String, environment: Map[String, String], files: Seq[String])

/** What an executor needs to know of a topology. */
final case class Description(
    id: String,
    name: String,
    parent: Option[String],
    listeners: Vector[Entry],
    python: PythonCommand,
    /** Whether tasks of no named topology may call functions that are bound to operators of the application. */
    coordinated: Boolean = false,
    /** What is released when it ends: a policy of `DriverPartitions`. The application's partitions are Spark's own affair. */
    release: String = DriverPartitions.KeepsAll) {

  /** Body and blobs for a frame; each pickled listener says where among the blobs its bytes are. */
  def encoded: (String, Vector[Array[Byte]]) = {
    val node = Json.obj()
    node.put("id", id).put("name", name).put("executable", python.executable).put("coordinated", coordinated)
    parent.foreach(node.put("parent", _))
    val environment = node.putObject("environment")
    python.environment.foreach { case (key, value) => environment.put(key, value) }
    node.set[ObjectNode]("files", Json.arr(python.files))
    val entries = node.putArray("listeners")
    var blobs = Vector.empty[Array[Byte]]
    listeners.foreach { listener =>
      val entry = listener.json
      listener.blob.foreach { blob =>
        entry.put("blob", blobs.size)
        blobs = blobs :+ blob
      }
      entries.add(entry)
    }
    (Json.write(node), blobs)
  }
}

object Description {
  /** The id and the name of the topology that spans everything. */
  val Application = "application"

  /** The topologies of executions: their ids begin so. */
  val ExecutionPrefix = "execution-"

  def decode(body: String, blobs: Vector[Array[Byte]]): Description = {
    val node = Json.parse(body)
    def optional(from: ObjectNode, name: String): Option[String] = Option(from.get(name)).filterNot(_.isNull).map(_.asText)
    Description(
      id = node.get("id").asText,
      name = node.get("name").asText,
      parent = optional(node, "parent"),
      listeners = Json.items(node.get("listeners")).map { entry =>
        Entry(
          index = entry.get("index").asInt,
          kind = entry.get("kind").asText,
          name = entry.get("name").asText,
          target = optional(entry, "target").getOrElse(""),
          scope = optional(entry, "scope"),
          lifetime = optional(entry, "lifetime"),
          required = entry.get("required").asBoolean,
          blob = Option(entry.get("blob")).filterNot(_.isNull).map(at => blobs(at.asInt)))
      }.toVector,
      python = PythonCommand(
        node.get("executable").asText, Json.fields(node.get("environment")), Json.strings(node.get("files"))),
      coordinated = node.path("coordinated").asBoolean,
      release = optional(node, "release").getOrElse(DriverPartitions.KeepsAll))
  }
}
