package org.apache.spark.stagecrew

import java.io.ByteArrayInputStream
import java.nio.ByteBuffer
import java.nio.channels.{Channels, ReadableByteChannel, WritableByteChannel}
import org.apache.spark.stagecrew.wire.{Frame, FrameReader, Frames, Link}

/** Links to simulated Python processes. */
object Links {
  /** A link that reads the bytes in `arriving`. `sent` is called with each frame that is sent on the link. */
  def link(process: String, role: String, pid: Long, arriving: Array[Byte] = Array.emptyByteArray)(
    sent: Frame => Unit): Link =
    linkFrom(process, role, pid, Channels.newChannel(new ByteArrayInputStream(arriving)))(sent)

  /** A link that reads from this channel. `closed` is called when the link is closed. */
  def linkFrom(process: String, role: String, pid: Long, arriving: ReadableByteChannel, closed: () => Unit = () => ())(
    sent: Frame => Unit): Link = {
    val channel = new WritableByteChannel {
      override def write(buffer: ByteBuffer): Int = {
        val bytes = new Array[Byte](buffer.remaining)
        buffer.get(bytes)
        sent(Frames.decodeMessage(bytes))
        bytes.length
      }
      override def isOpen: Boolean = true
      override def close(): Unit = closed()
    }
    val hello = new Frame("HELLO", Map("process" -> process, "role" -> role, "pid" -> pid))
    new Link(channel, hello, new FrameReader(arriving))
  }
}
