package org.apache.spark.stagecrew

import java.util.concurrent.{CountDownLatch, TimeUnit}
import org.scalatest.concurrent.Eventually
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.{Seconds, Span}
import scala.collection.mutable
import org.apache.spark.stagecrew.wire.NonBlockingWriter

class NonBlockingWriterSuite extends AnyFunSuite with Eventually {
  override implicit val patienceConfig: PatienceConfig = PatienceConfig(Span(10, Seconds))

  /** Records the written messages and the threads that wrote them. A message is one byte, except for large ones. */
  private final class Socket(blocksAfter: Int = Int.MaxValue) {
    private val bytes = mutable.Buffer.empty[Byte]
    private val writers = mutable.Set.empty[Thread]
    val blocked = new CountDownLatch(1)
    val room = new CountDownLatch(1)

    def write(some: Array[Byte]): Unit = {
      if (synchronized(bytes.size) >= blocksAfter) {
        blocked.countDown()
        room.await(10, TimeUnit.SECONDS)
      }
      synchronized {
        bytes ++= some
        writers += Thread.currentThread
      }
    }
    def all: Seq[Byte] = synchronized(bytes.toSeq)
    def threads: Set[Thread] = synchronized(writers.toSet)
    def forgetThreads(): Unit = synchronized(writers.clear())
  }

  private def message(n: Int) = Array(n.toByte)

  test("put writes immediately while little is unread") {
    val socket = new Socket
    val writer = new NonBlockingWriter(socket.write)
    (0 until NonBlockingWriter.MaxUnreadMessages).foreach(n => writer.put(message(n)))
    assert(socket.all == (0 until NonBlockingWriter.MaxUnreadMessages).map(_.toByte))
    assert(socket.threads == Set(Thread.currentThread))
    writer.close()
  }

  test("put never blocks on a slow reader, and the order is kept") {
    val socket = new Socket(blocksAfter = NonBlockingWriter.MaxUnreadMessages)
    val writer = new NonBlockingWriter(socket.write)
    (0 until 100).foreach(n => writer.put(message(n)))
    assert(socket.all.size == NonBlockingWriter.MaxUnreadMessages)
    socket.room.countDown()
    eventually(assert(socket.all == (0 until 100).map(_.toByte)))
    assert(socket.threads.size == 2)
    writer.close()
  }

  test("put writes immediately again when the reader has read, but not before") {
    val socket = new Socket
    val writer = new NonBlockingWriter(socket.write)
    (0 until NonBlockingWriter.MaxUnreadMessages + 1).foreach(n => writer.put(message(n)))
    eventually(assert(socket.all.size == NonBlockingWriter.MaxUnreadMessages + 1))
    socket.forgetThreads()
    writer.put(message(33))
    eventually(assert(socket.all.size == NonBlockingWriter.MaxUnreadMessages + 2))
    assert(!socket.threads(Thread.currentThread))
    eventually {
      writer.wasRead(socket.all.size)
      socket.forgetThreads()
      writer.put(message(34)) // once the writer's thread is idle
      assert(socket.threads(Thread.currentThread))
    }
    writer.close()
  }

  test("the limits apply to unread bytes and to unread messages") {
    val socket = new Socket
    val writer = new NonBlockingWriter(socket.write)
    writer.put(new Array[Byte](NonBlockingWriter.MaxUnreadBytes))
    assert(socket.threads == Set(Thread.currentThread))
    socket.forgetThreads()
    writer.put(message(1))
    eventually(assert(socket.all.size == NonBlockingWriter.MaxUnreadBytes + 1))
    assert(!socket.threads(Thread.currentThread))
    writer.close()
  }

  test("close stops the thread, and drops the queue") {
    val socket = new Socket(blocksAfter = NonBlockingWriter.MaxUnreadMessages)
    val writer = new NonBlockingWriter(socket.write)
    (0 until NonBlockingWriter.MaxUnreadMessages + 1).foreach(n => writer.put(message(n)))
    assert(socket.blocked.await(10, TimeUnit.SECONDS), "its thread has not begun to write")
    writer.put(message(98)) // enqueued, because the writer's thread is blocked in a write
    writer.close()
    writer.put(message(99))
    socket.room.countDown()
    eventually(assert(socket.all.size == NonBlockingWriter.MaxUnreadMessages + 1))
    eventually(assert(!(socket.threads - Thread.currentThread).exists(_.isAlive)))
    assert(socket.all == (0 to NonBlockingWriter.MaxUnreadMessages).map(_.toByte))
  }
}
