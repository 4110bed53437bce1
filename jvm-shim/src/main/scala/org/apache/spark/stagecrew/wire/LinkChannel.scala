package org.apache.spark.stagecrew
package wire

import java.io.IOException
import java.nio.ByteBuffer
import java.nio.channels._
import java.util.ArrayDeque

/**
 * A socket that one thread reads, and that all threads write. A read waits for bytes. A write never waits: if the
 * socket has no room, the reading thread sends the rest as soon as it has.
 *
 * If writes waited, a Python process that does not read would stop the thread that serves all processes of an executor.
 * And two sides that both write would wait for each other. Unix sockets have room for about 200 kB only.
 *
 * The unsent bytes are bounded, because a process has credit for a limited number of events, and may have a limited
 * number of messages that are not handled.
 *
 * A process that ends may have sent frames that are not read yet. So after a write has failed, the thread that reads
 * still gets all bytes that have arrived.
 */
final class LinkChannel(val socket: SocketChannel) extends ByteChannel {
  import LinkChannel._

  socket.configureBlocking(false)
  private val selector =
    try Selector.open() catch { case error: IOException => socket.close(); throw error } // too many open files
  private val key = socket.register(selector, SelectionKey.OP_READ)
  private val unsent = new ArrayDeque[ByteBuffer]

  /** Reads at least one byte. Returns -1 at the end of the stream. Called by one thread. */
  override def read(to: ByteBuffer): Int = {
    var n = socket.read(to)
    while (n == 0) {
      selector.select()
      selector.selectedKeys.clear()
      sendUnsent()
      n = socket.read(to)
    }
    n
  }

  /** Sends all bytes of the buffer, now or later. The buffer belongs to this object afterwards. */
  override def write(from: ByteBuffer): Int = unsent.synchronized {
    val size = from.remaining
    if (unsent.isEmpty) send(from)
    if (from.hasRemaining) {
      unsent.add(from)
      changeKey(key.interestOpsOr(SelectionKey.OP_WRITE))
      selector.wakeup()
    }
    size
  }

  private def sendUnsent(): Unit = unsent.synchronized(if (!unsent.isEmpty) {
    try while (!unsent.isEmpty && send(unsent.peek)) unsent.poll() catch { case _: IOException => () }
    if (unsent.isEmpty) changeKey(key.interestOpsAnd(~SelectionKey.OP_WRITE))
  })

  /** Returns whether the socket had room for all bytes. */
  private def send(buffer: ByteBuffer): Boolean = try {
    val end = buffer.limit()
    do {
      buffer.limit(math.min(end, buffer.position() + PieceBytes))
      socket.write(buffer)
    } while (!buffer.hasRemaining && buffer.position() < end)
    buffer.limit(end)
    !buffer.hasRemaining
  } catch { case error: IOException =>
    unsent.clear()
    // Later writes fail, too. If the process still reads, it sees the end.
    try socket.shutdownOutput() catch { case _: IOException => close() }
    throw error
  }

  private def changeKey(change: => Unit): Unit =
    try change catch { case _: CancelledKeyException => throw new ClosedChannelException }

  override def isOpen: Boolean = socket.isOpen

  /** Closes the connection, and ends a read. The socket itself is closed when the reading thread calls `release`. */
  override def close(): Unit = try socket.close() catch { case _: IOException => () } finally selector.wakeup()

  /** Closes everything. Called by the reading thread. */
  def release(): Unit = try close() finally selector.close()
}

object LinkChannel {
  private val PieceBytes = 1 << 17 // the JDK copies each piece to a buffer that the thread keeps
}
