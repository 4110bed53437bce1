package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.databind.node.{ArrayNode, ObjectNode}
import scala.jdk.CollectionConverters._

/** JSON by Spark's own Jackson: what travels between Python and the shim as text. */
private[stagecrew] object Json {
  private val mapper = new ObjectMapper()

  def parse(text: String): ObjectNode = mapper.readTree(text).asInstanceOf[ObjectNode]
  def obj(): ObjectNode = mapper.createObjectNode()
  def arr(values: Iterable[String] = Nil): ArrayNode = {
    val node = mapper.createArrayNode()
    values.foreach(value => node.add(value))
    node
  }
  def numbers(values: Iterable[Int]): ArrayNode = {
    val node = mapper.createArrayNode()
    values.foreach(value => node.add(value))
    node
  }
  def integers(node: JsonNode): Seq[Int] = if (node == null) Nil else node.elements.asScala.map(_.asInt).toSeq
  def put(node: ObjectNode, name: String, items: Iterable[ObjectNode]): Unit = {
    val array = node.putArray(name)
    items.foreach(array.add(_))
  }
  def write(node: JsonNode): String = mapper.writeValueAsString(node)
  def items(node: JsonNode): Seq[ObjectNode] =
    if (node == null) Nil else node.elements.asScala.map(_.asInstanceOf[ObjectNode]).toSeq
  def strings(node: JsonNode): Seq[String] = if (node == null) Nil else node.elements.asScala.map(_.asText).toSeq
  /** A field under its name, or under an earlier one: event logs that were written before a rename stay readable. */
  def renamed(node: JsonNode, name: String, earlier: String): JsonNode = if (node.has(name)) node.get(name) else node.path(earlier)
  def fields(node: JsonNode): Map[String, String] =
    if (node == null) Map.empty else node.properties.asScala.map(entry => entry.getKey -> entry.getValue.asText).toMap
}
