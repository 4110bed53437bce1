package org.apache.spark.stagecrew
package wire

import java.nio.{BufferUnderflowException, ByteBuffer}
import java.nio.charset.{CharacterCodingException, StandardCharsets}

/** The bytes are not a valid frame, or the frame is too large. */
final class FrameException(message: String) extends Exception(message)

/** One decoded frame. */
final class Frame(val kind: String, fields: Map[String, Any]) {
  def text(name: String): String = fields(name).asInstanceOf[String]
  def long(name: String): Long = fields(name).asInstanceOf[Long]
  def bytes(name: String): Array[Byte] = fields(name).asInstanceOf[Array[Byte]]
  def blobs(name: String): Vector[Array[Byte]] = fields(name).asInstanceOf[Vector[Array[Byte]]]
  override def toString: String = s"$kind(${fields.keys.mkString(", ")})" // without values: they may be secrets
}

/**
 * The wire format of both channels and of messages between JVMs. `frames.py` implements the same format, and describes
 * it.
 */
object Frames {
  private final case class Kind(name: String, number: Int, fields: (String, Char)*)

  private val kinds = Vector(
    Kind("HELLO", 1, "proof" -> 'b', "role" -> 's', "process" -> 's', "pid" -> 'q', "version" -> 's'),
    Kind("WELCOME", 2, "body" -> 's'),
    Kind("DESCRIBE", 3, "topology" -> 's'),
    Kind("DESCRIPTION", 4, "topology" -> 's', "body" -> 's', "blobs" -> 'l'),
    Kind("BEGIN", 5, "attempt" -> 'q'),
    Kind("END", 6, "attempt" -> 'q'),
    Kind("HOOK", 7, "topology" -> 's', "listener" -> 'q', "hook" -> 's', "timeout" -> 'q'),
    Kind("HOOK_DONE", 8, "topology" -> 's', "listener" -> 'q', "hook" -> 's', "outcome" -> 's', "micros" -> 'q',
      "error" -> 's', "line" -> 's'),
    Kind("CLOSE", 9, "topology" -> 's'),
    Kind("CLOSED", 10, "topology" -> 's'),
    Kind("OPEN", 11, "topology" -> 's', "body" -> 's', "blobs" -> 'l'),
    Kind("OPENED", 12, "topology" -> 's', "body" -> 's', "blobs" -> 'l'),
    Kind("GOODBYE", 13, "reason" -> 's'),
    Kind("REFUSED", 14, "reason" -> 's'),
    Kind("SAMPLES", 16, "body" -> 's'),
    Kind("TOPOLOGY", 17, "topology" -> 's', "body" -> 's', "blobs" -> 'l', "opened" -> 's', "values" -> 'l'),
    Kind("CONNECT", 18, "nonce" -> 'b'),
    Kind("CHALLENGE", 19, "nonce" -> 'b', "proof" -> 'b'),
    Kind("ASK_DESCRIPTION", 32, "executor" -> 's', "host" -> 's', "topology" -> 's'),
    Kind("ASK_EXECUTION", 33, "executor" -> 's', "key" -> 's'),
    Kind("EXECUTION", 34, "topology" -> 's'),
    Kind("OPEN_FAILED", 35, "executor" -> 's', "topology" -> 's', "listener" -> 's', "stage" -> 'q', "partition" -> 'q',
      "attempt" -> 'q', "error" -> 's'),
    Kind("REPORT", 36, "executor" -> 's', "sequence" -> 'q', "body" -> 's'),
    Kind("END_TOPOLOGY", 37, "topology" -> 's', "timeout" -> 'q', "body" -> 's'),
    Kind("OK", 38),
    Kind("INVENTORY", 39, "executor" -> 's', "body" -> 's'),
    Kind("ORPHANS", 40, "body" -> 's'),
    Kind("UNPERSISTED", 41, "topology" -> 's', "body" -> 's'),
    Kind("READY", 64, "evaluation" -> 'q', "binding" -> 's', "subtask" -> 'q', "attempt" -> 'q', "number" -> 'q',
      "stage" -> 'q', "partition" -> 'q', "stage_attempt" -> 'q', "partitions" -> 'q'),
    Kind("EVENTS", 65, "evaluation" -> 'q', "first" -> 'q', "payloads" -> 'l'),
    Kind("REQUEST", 66, "evaluation" -> 'q', "sequence" -> 'q', "payload" -> 'b'),
    Kind("FINISH", 67, "evaluation" -> 'q', "sequence" -> 'q', "outcome" -> 's', "reason" -> 's'),
    Kind("REPLY", 68, "evaluation" -> 'q', "sequence" -> 'q', "outcome" -> 's', "payload" -> 'b'),
    Kind("HANDLED", 69, "evaluation" -> 'q', "sequence" -> 'q'),
    Kind("CREDIT", 70, "evaluation" -> 'q', "events" -> 'q', "bytes" -> 'q'),
    Kind("ACCEPTED", 71, "evaluation" -> 'q', "sequence" -> 'q'),
    Kind("OVERFLOWED", 72, "evaluation" -> 'q', "reason" -> 's'),
    Kind("ABORT", 73, "evaluation" -> 'q', "reason" -> 's'),
    Kind("ENDED", 74, "evaluation" -> 'q', "outcome" -> 's', "reason" -> 's'),
    Kind("ASK_HANDLED", 75, "evaluation" -> 'q'),
    Kind("ASK_LIVE", 76, "evaluation" -> 'q'),
    Kind("LIVE", 77, "evaluation" -> 'q'),
    Kind("FROM", 96, "executor" -> 's', "frames" -> 'b'),
    Kind("TO", 97, "executor" -> 's', "frames" -> 'b'),
    Kind("LOST", 98, "executor" -> 's', "reason" -> 's'),
    Kind("ANNOUNCE", 101, "executor" -> 's', "address_file" -> 's'),
    Kind("NO_DIRECT", 102),
    Kind("STATISTICS", 100, "sequence" -> 'q', "body" -> 's'))

  private val byName = kinds.map(k => k.name -> k).toMap
  private val byNumber = kinds.map(k => k.number -> k).toMap

  /** Encodes a frame with a length prefix. Values are `Long`, `String`, `Array[Byte]` or `Seq[Array[Byte]]`. */
  def encode(name: String, values: Any*): Array[Byte] = {
    val kind = byName.getOrElse(name, throw new FrameException(s"unknown kind of frame $name"))
    if (values.size != kind.fields.size)
      throw new FrameException(s"a $name frame has the fields ${kind.fields.map(_._1).mkString(", ")}")
    val parts: Seq[Array[Byte]] = kind.fields.zip(values).flatMap {
      case ((_, 'q'), value: Long) => Seq(ByteBuffer.allocate(8).putLong(value).array)
      case ((_, 's'), value: String) => sized(value.getBytes(StandardCharsets.UTF_8))
      case ((_, 'b'), value: Array[Byte]) => sized(value)
      case ((_, 'l'), values: Seq[_]) => u32(values.size) +: values.flatMap(v => sized(v.asInstanceOf[Array[Byte]]))
      case ((field, type_), value) =>
        throw new FrameException(
          s"field $field of a $name frame is of type $type_, not ${value.getClass.getSimpleName}")
    }
    val length = 1 + parts.map(_.length).sum
    val out = ByteBuffer.allocate(4 + length).putInt(length).put(kind.number.toByte)
    parts.foreach(out.put)
    out.array
  }

  /** Decodes a frame without a length prefix: `kind | fields`. */
  def decode(bytes: ByteBuffer): Frame = {
    val kind = kindOf(bytes)
    def chunk(): Array[Byte] = {
      val length = bytes.getInt()
      if (length < 0 || length > bytes.remaining) throw new FrameException(s"a ${kind.name} frame is cut short")
      val data = new Array[Byte](length)
      bytes.get(data)
      data
    }
    try {
      val fields = kind.fields.map { case (name, type_) =>
        val value: Any = type_ match {
          case 'q' => bytes.getLong()
          case 's' => utf8(chunk()).getOrElse(
            throw new FrameException(s"field $name of a ${kind.name} frame is not UTF-8"))
          case 'b' => chunk()
          case _ =>
            val count = bytes.getInt()
            if (count < 0 || count > bytes.remaining / 4) throw new FrameException(s"a ${kind.name} frame is cut short")
            Vector.fill(count)(chunk())
        }
        name -> value
      }
      if (bytes.hasRemaining)
        throw new FrameException(s"${bytes.remaining} bytes are left over after a ${kind.name} frame")
      new Frame(kind.name, fields.toMap)
    } catch { case _: BufferUnderflowException => throw new FrameException(s"a ${kind.name} frame is cut short") }
  }

  /** The name of the kind of an encoded frame. */
  def nameOf(frame: Array[Byte]): String = nameOf(ByteBuffer.wrap(frame))

  /** The same for a buffer, whose position stays. */
  def nameOf(frame: ByteBuffer): String = kindOf(frame.duplicate()).name

  private def kindOf(frame: ByteBuffer): Kind = {
    if (!frame.hasRemaining) throw new FrameException("an empty frame")
    val number = frame.get() & 0xff
    byNumber.getOrElse(number, throw new FrameException(s"unknown kind of frame $number"))
  }

  /** The evaluation of an encoded frame. It must be the first field. */
  def evaluationOf(frame: Array[Byte]): Long = longAt(frame, 1)

  /** The sequence number of an encoded frame. It must be the second field. */
  def sequenceOf(frame: Array[Byte]): Long = longAt(frame, 9)

  private def longAt(frame: Array[Byte], at: Int): Long =
    if (frame.length >= at + 8) ByteBuffer.wrap(frame).getLong(at) else throw new FrameException("a frame is cut short")

  /** Decodes a message between JVMs: a frame with a length prefix. */
  def decodeMessage(bytes: Array[Byte]): Frame = {
    val buffer = ByteBuffer.wrap(bytes)
    if (buffer.remaining < 4 || buffer.getInt() != buffer.remaining)
      throw new FrameException("a message has a wrong length")
    decode(buffer)
  }

  /** Adds the length prefix to an encoded frame. */
  def withLength(frame: Array[Byte]): Array[Byte] =
    ByteBuffer.allocate(4 + frame.length).putInt(frame.length).put(frame).array

  /** Removes the length prefix of an encoded frame. */
  def withoutLength(frame: Array[Byte]): Array[Byte] = java.util.Arrays.copyOfRange(frame, 4, frame.length)

  private def sized(data: Array[Byte]): Seq[Array[Byte]] = Seq(u32(data.length), data)

  private def u32(value: Int): Array[Byte] = ByteBuffer.allocate(4).putInt(value).array

  // A new decoder fails for invalid UTF-8, while the String constructor replaces it.
  private def utf8(data: Array[Byte]): Option[String] =
    try Some(StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(data)).toString)
    catch { case _: CharacterCodingException => None }
}
