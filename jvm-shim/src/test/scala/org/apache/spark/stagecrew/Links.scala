package org.apache.spark.stagecrew

import java.io.{ByteArrayInputStream, ByteArrayOutputStream, DataInputStream, OutputStream}
import java.net.Socket
import org.apache.spark.stagecrew.wire.{Frame, Frames, Link}

/** Links to simulated Python processes. */
object Links {
  /** A link that reads the bytes in `arriving`. `sent` is called with each frame that is sent on the link. */
  def link(process: String, role: String, pid: Long, arriving: Array[Byte] = Array.emptyByteArray)(
    sent: Frame => Unit): Link = {
    val socket = new Socket {
      override def getOutputStream: OutputStream = new ByteArrayOutputStream {
        override def write(bytes: Array[Byte]): Unit = sent(Frames.decodeMessage(bytes))
      }
    }
    val hello = new Frame("HELLO", Map("process" -> process, "role" -> role, "pid" -> pid))
    new Link(socket, hello, new DataInputStream(new ByteArrayInputStream(arriving)))
  }
}
