package org.apache.spark.stagecrew
package wire

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.databind.node.{ArrayNode, JsonNodeFactory, ObjectNode}
import java.lang.reflect.{Constructor, ParameterizedType, Type}
import scala.collection.immutable.VectorMap
import scala.jdk.CollectionConverters._
import scala.reflect.ClassTag

/**
 * Reads and writes JSON with Spark's Jackson. A case class becomes an object with one field for each parameter.
 *
 * `None` is not written. A missing field is read as 0, false, "", an empty collection or `None`, and an unknown field
 * is ignored. So event logs of older and newer versions are readable.
 */
private[stagecrew] object Json {
  private val mapper = new ObjectMapper()

  /** Former names of fields, for event logs that were written before the rename. */
  private val earlierNames = Map("abandoned" -> "cut")

  // A search for the constructor takes longer than reading an object. A constructor remembers its parameters.
  private val constructors = new ClassValue[Constructor[_]] {
    override def computeValue(product: Class[_]): Constructor[_] = product.getConstructors.head
  }

  def parse(text: String): ObjectNode = mapper.readTree(text).asInstanceOf[ObjectNode]
  def obj(): ObjectNode = mapper.createObjectNode()

  def write(value: Any): String = mapper.writeValueAsString(node(value))
  def list(values: Iterable[Any]): JsonNode = node(values)
  def tree(value: Product): ObjectNode = node(value).asInstanceOf[ObjectNode]
  def read[T: ClassTag](text: String): T = as[T](parse(text))
  def as[T](node: JsonNode)(implicit tag: ClassTag[T]): T = value(node, tag.runtimeClass).asInstanceOf[T]

  private def node(value: Any): JsonNode = value match {
    case node: JsonNode => node
    case text: String => JsonNodeFactory.instance.textNode(text)
    case number: Long => JsonNodeFactory.instance.numberNode(number)
    case number: Int => JsonNodeFactory.instance.numberNode(number)
    case flag: Boolean => JsonNodeFactory.instance.booleanNode(flag)
    case map: scala.collection.Map[_, _] => fields(map.iterator.map { case (key, value) => key.toString -> value })
    case items: Iterable[_] =>
      items.foldLeft(mapper.createArrayNode())((array: ArrayNode, item) => array.add(node(item)))
    case product: Product => fields(product.productElementNames.zip(product.productIterator))
    case other => throw new IllegalArgumentException(s"a ${other.getClass.getName} cannot be written as JSON")
  }

  private def fields(values: Iterator[(String, Any)]): ObjectNode = values.foldLeft(obj()) {
    case (node, (_, None)) => node
    case (into, (name, Some(value))) => into.set[ObjectNode](name, node(value))
    case (into, (name, value)) => into.set[ObjectNode](name, node(value))
  }

  private def value(node: JsonNode, target: Type): Any = target match {
    case generic: ParameterizedType => elements(node, generic.getRawType, generic.getActualTypeArguments)
    case java.lang.Long.TYPE => node.asLong
    case java.lang.Integer.TYPE => node.asInt
    case java.lang.Boolean.TYPE => node.asBoolean
    case text if text == classOf[String] => if (node.isNull) "" else node.asText
    case number if number == classOf[Object] => node.asInt // Int is the only primitive type in our collections
    case product: Class[_] =>
      if (!node.isObject && !node.isMissingNode)
        throw new IllegalArgumentException(s"a ${product.getSimpleName} must be a JSON object, not $node")
      val constructor = constructors.get(product)
      constructor.newInstance(constructor.getParameters.map { parameter =>
        val name = if (node.has(parameter.getName)) parameter.getName
          else earlierNames.getOrElse(parameter.getName, parameter.getName)
        value(node.path(name), parameter.getParameterizedType).asInstanceOf[Object]
      }: _*)
    case other => throw new IllegalArgumentException(s"JSON cannot be read as $other")
  }

  private def elements(node: JsonNode, rawType: Type, arguments: Array[Type]): Any = {
    def items = node.elements.asScala.map(value(_, arguments.head))
    if (rawType == classOf[Option[_]]) Option.when(!node.isMissingNode && !node.isNull)(value(node, arguments.head))
    else if (rawType == classOf[VectorMap[_, _]])
      node.properties.iterator.asScala.map { field =>
        val key = if (arguments.head == classOf[Object]) field.getKey.toInt else field.getKey
        key -> value(field.getValue, arguments(1))
      }.to(VectorMap)
    else if (rawType == classOf[Set[_]]) items.toSet
    else items.toVector
  }
}
