package org.apache.spark.stagecrew
package wire

import java.io.{BufferedWriter, FileWriter}
import java.nio.ByteBuffer

/** Records when requests and replies pass each hop, for `make bench`. Off unless the environment variable
  * STAGECREW_HOPS names a folder. `hops.py` describes the format. */
object Hops {
  private val folder = sys.env.get("STAGECREW_HOPS")
  private lazy val file = {
    val file = new BufferedWriter(new FileWriter(s"${folder.get}/jvm-${ProcessHandle.current.pid}"))
    Runtime.getRuntime.addShutdownHook(new Thread(() => synchronized(file.flush())))
    file
  }

  /** Records a frame without its length. */
  def passed(hop: String, frame: => Array[Byte]): Unit = if (folder.nonEmpty) record(hop, ByteBuffer.wrap(frame))

  /** Records the frames of a message, each with its length. */
  def allPassed(hop: String, frames: => Array[Byte]): Unit = if (folder.nonEmpty) {
    val all = ByteBuffer.wrap(frames)
    while (all.hasRemaining) {
      val end = 4 + all.getInt(all.position()) + all.position()
      record(hop, all.slice(all.position() + 4, end - all.position() - 4))
      all.position(end)
    }
  }

  private def record(hop: String, frame: ByteBuffer): Unit = {
    val now = System.nanoTime()
    Frames.nameOf(frame) match {
      case "REQUEST" | "REPLY" => synchronized(file.write(s"$hop ${frame.getLong(1)} ${frame.getLong(9)} $now\n"))
      case _ => ()
    }
  }
}
