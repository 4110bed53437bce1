package org.apache.spark.stagecrew
package wire

import executor._

/**
 * Writes messages to a socket for threads that must not block. The reader reports how many messages it has read. If the
 * unread messages surely fit into the buffers of the socket, `put` writes immediately. Otherwise it enqueues the
 * message, and the writer's own thread writes it, which may block. The order of messages is kept.
 *
 * The queue is bounded, because each evaluation may only have a limited number of unhandled messages (its window).
 */
final class NonBlockingWriter(write: Array[Byte] => Unit) {
  import NonBlockingWriter._

  private val waiting = new java.util.ArrayDeque[Array[Byte]]()
  private val unread = new java.util.ArrayDeque[Integer]()
  private var written = 0L
  private var unreadBytes = 0
  private var draining = false
  private var open = true
  private val thread = ExecutorCrew.daemon("stagecrew-coordination").newThread(() => run())
  thread.start()

  def put(bytes: Array[Byte]): Unit = synchronized {
    if (!draining && unread.size < MaxUnreadMessages && unreadBytes + bytes.length <= MaxUnreadBytes) {
      recordWritten(bytes)
      write(bytes)
    } else if (open) {
      draining = true
      waiting.add(bytes)
      notifyAll()
    }
  }

  /** The reader has read this number of messages since the connection began. */
  def wasRead(messages: Long): Unit = synchronized {
    while (unread.size > written - messages) unreadBytes -= unread.poll()
  }

  /** Stops the thread, and drops the queue. */
  def close(): Unit = synchronized {
    open = false
    waiting.clear()
    notifyAll()
  }

  private def recordWritten(bytes: Array[Byte]): Unit = {
    written += 1
    unread.add(bytes.length)
    unreadBytes += bytes.length
  }

  private def run(): Unit = {
    var batch = next()
    while (batch != null) {
      write(batch) // without the lock, because it blocks while the reader does not read
      batch = next()
    }
  }

  private def next(): Array[Byte] = synchronized {
    while (open && waiting.isEmpty) {
      draining = false
      wait()
    }
    if (!open) null
    else if (waiting.size == 1) {
      recordWritten(waiting.peek())
      waiting.poll()
    } else {
      val batch = new java.io.ByteArrayOutputStream
      while (!waiting.isEmpty && batch.size < BatchBytes) {
        recordWritten(waiting.peek())
        batch.write(waiting.poll())
      }
      batch.toByteArray
    }
  }
}

object NonBlockingWriter {
  /** Up to these limits of unread messages and bytes, `put` writes immediately. They are much smaller than the buffers
    * of a loopback socket. */
  val MaxUnreadMessages = 32
  val MaxUnreadBytes: Int = 1 << 15
  private val BatchBytes = 1 << 18
}
