package org.apache.spark.stagecrew

import java.io.{ByteArrayInputStream, EOFException}
import java.nio.ByteBuffer
import java.nio.channels.Channels
import java.nio.file.{Files, Path}
import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import scala.util.Random
import org.apache.spark.stagecrew.wire.{Frame, FrameException, FrameReader, Frames}

/** Checks the wire format with test vectors that Python created. */
class FramesSuite extends AnyFunSuite {
  private case class TestVector(kind: String, fields: Seq[(String, Char, Any)], frame: Array[Byte])

  private def bytes(hex: String): Array[Byte] = hex.grouped(2).map(Integer.parseInt(_, 16).toByte).toArray

  private val file: Path = Iterator.iterate(Path.of("").toAbsolutePath)(_.getParent).takeWhile(_ != null)
    .map(_.resolve("tests/frames-vectors.json")).find(Files.exists(_)).get

  private val vectors: Seq[TestVector] = new ObjectMapper().readTree(file.toFile).elements.asScala.toSeq.map { node =>
    val fields = node.get("fields").properties.asScala.toSeq.map(e => e.getKey -> e.getValue)
    TestVector(
      node.get("kind").asText,
      fields.zip(node.get("types").asText).map { case ((name, value), type_) => (name, type_, fieldOf(type_, value)) },
      bytes(node.get("frame").asText))
  }

  private def fieldOf(type_ : Char, value: JsonNode): Any = type_ match {
    case 'q' => value.asLong
    case 's' => value.asText
    case 'b' => bytes(value.asText)
    case _ => value.elements.asScala.map(item => bytes(item.asText)).toVector
  }

  private def small = vectors.filter(_.frame.length < 2000)

  private def check(frame: Frame, vector: TestVector): Unit = {
    assert(frame.kind == vector.kind)
    vector.fields.foreach {
      case (name, 'q', value) => assert(frame.long(name) == value)
      case (name, 's', value) => assert(frame.text(name) == value)
      case (name, 'b', value) => assert(frame.bytes(name).toSeq == value.asInstanceOf[Array[Byte]].toSeq)
      case (name, _, value) =>
        val items = value.asInstanceOf[Vector[Array[Byte]]]
        assert(frame.blobs(name).map(_.toSeq) == items.map(_.toSeq))
    }
  }

  private def stream(data: Array[Byte]) = new FrameReader(Channels.newChannel(new ByteArrayInputStream(data)))

  test("every kind of frame has vectors, and is encoded to the same bytes as in Python") {
    assert(vectors.map(_.kind).distinct.size == 48)
    vectors.foreach { vector =>
      assert(Frames.encode(vector.kind, vector.fields.map(_._3): _*).toSeq == vector.frame.toSeq, vector.kind)
    }
  }

  test("every vector is decoded to its fields, as a message and from a stream") {
    vectors.foreach { vector =>
      check(Frames.decodeMessage(vector.frame), vector)
      check(stream(vector.frame).read(vector.frame.length - 4), vector)
    }
  }

  test("a frame that is truncated at any byte is refused") {
    small.foreach { vector =>
      (4 until vector.frame.length).foreach { end =>
        intercept[FrameException](Frames.decode(ByteBuffer.wrap(vector.frame.slice(4, end))))
      }
      vector.frame.indices.foreach { end =>
        intercept[FrameException](Frames.decodeMessage(vector.frame.take(end)))
        intercept[EOFException](stream(vector.frame.take(end)).read(1 << 20))
      }
    }
  }

  test("a frame with bytes left over is refused") {
    small.foreach { vector =>
      intercept[FrameException](Frames.decode(ByteBuffer.wrap(vector.frame.drop(4) :+ 0.toByte)))
      intercept[FrameException](Frames.decodeMessage(vector.frame :+ 0.toByte))
    }
  }

  test("a frame larger than allowed is refused as soon as its length is known, without allocating memory") {
    val begin = Frames.encode("BEGIN", 7L)
    intercept[FrameException](stream(begin).read(begin.length - 5))
    Seq(1 << 20, Int.MaxValue, -1, Int.MinValue).foreach { length =>
      intercept[FrameException](stream(ByteBuffer.allocate(4).putInt(length).array).read(1000))
    }
    // An announced length within the limit, without data.
    intercept[EOFException](
      stream(ByteBuffer.allocate(4).putInt(Int.MaxValue - 16).array).read(Int.MaxValue - 16))
  }

  test("an unknown kind, an empty frame and text that is not UTF-8 are refused") {
    Seq(0, 15, 39, 255).foreach(number =>
      intercept[FrameException](Frames.decode(ByteBuffer.wrap(Array(number.toByte)))))
    intercept[FrameException](Frames.decode(ByteBuffer.allocate(0)))
    Seq("c328", "eda080", "f4908080", "80", "c080").map(bytes).foreach { text =>
      val frame = ByteBuffer.allocate(5 + text.length).put(3.toByte).putInt(text.length).put(text).flip()
      assert(intercept[FrameException](Frames.decode(frame)).getMessage.contains("UTF-8"))
    }
  }

  test("a count or a length beyond the frame is refused before memory is allocated") {
    val head = Frames.encode("DESCRIPTION", "", "", Vector.empty).drop(4).dropRight(4)
    Seq(1, 1 << 28, Int.MaxValue, -1).foreach { n =>
      intercept[FrameException](Frames.decode(ByteBuffer.wrap(head ++ ByteBuffer.allocate(4).putInt(n).array)))
      intercept[FrameException](
        Frames.decode(ByteBuffer.wrap(Array(3.toByte) ++ ByteBuffer.allocate(4).putInt(n).array)))
    }
  }

  test("garbage is either decoded or refused with a FrameException") {
    val random = new Random(20260721)
    (1 to 20000).foreach { _ =>
      val vector = small(random.nextInt(small.size)).frame.drop(4)
      val data = random.nextInt(3) match {
        case 0 => random.nextBytes(random.nextInt(64))
        case 1 => vector.updated(random.nextInt(vector.length), random.nextInt().toByte)
        case _ => vector.take(random.nextInt(vector.length + 1)) ++ random.nextBytes(random.nextInt(8))
      }
      try Frames.decode(ByteBuffer.wrap(data)) catch { case _: FrameException => () }
    }
  }

  test("values of a wrong type or number are refused, and `toString` of a frame contains no values") {
    intercept[FrameException](Frames.encode("NOTHING"))
    intercept[FrameException](Frames.encode("BEGIN"))
    intercept[FrameException](Frames.encode("BEGIN", "7"))
    intercept[FrameException](Frames.encode("CLOSE", 7L))
    val reason = Frames.decodeMessage(Frames.encode("REFUSED", "secret"))
    assert(!reason.toString.contains("secret"))
  }
}
