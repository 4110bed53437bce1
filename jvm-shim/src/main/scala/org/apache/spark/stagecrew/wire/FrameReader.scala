package org.apache.spark.stagecrew
package wire

import java.io.EOFException
import java.nio.ByteBuffer
import java.nio.channels.ReadableByteChannel

/**
 * Reads frames from a socket into a buffer of its own. Not thread-safe.
 *
 * The streams of `java.nio.channels.Channels` cannot be used: their `available` is always 0, and while one thread waits
 * in a read, no other thread can write.
 */
final class FrameReader(source: ReadableByteChannel) {
  private val buffer = ByteBuffer.allocate(1 << 16).flip()

  /** Whether another frame has begun to arrive. Bytes that the operating system still holds do not count. */
  def hasMore: Boolean = buffer.hasRemaining

  /** Reads the next frame. Throws `EOFException` at the end of the stream, even within a frame. */
  def read(limit: Int): Frame = Frames.decode(ByteBuffer.wrap(readBytes(limit)))

  /** Reads the bytes of the next frame, without its length. */
  def readBytes(limit: Int): Array[Byte] = {
    fill(4)
    val length = buffer.getInt()
    if (length < 0 || length > limit) throw new FrameException(
      s"a frame of ${Integer.toUnsignedString(length)} bytes is larger than the $limit bytes allowed")
    // The array grows with the received data, so an announced length alone allocates no memory.
    var bytes = new Array[Byte](math.min(length, buffer.capacity))
    var at = 0
    while (at < length) {
      if (at == bytes.length) bytes = java.util.Arrays.copyOf(bytes, math.min(length.toLong, 8L * at).toInt)
      fill(1)
      val n = math.min(buffer.remaining, bytes.length - at)
      buffer.get(bytes, at, n)
      at += n
    }
    bytes
  }

  private def fill(least: Int): Unit = while (buffer.remaining < least) {
    buffer.compact()
    try if (source.read(buffer) < 0) throw new EOFException("the stream ended inside a frame") finally buffer.flip()
  }
}
