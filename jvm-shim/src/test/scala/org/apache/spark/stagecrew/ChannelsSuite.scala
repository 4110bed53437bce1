package org.apache.spark.stagecrew

import java.io.{DataInputStream, EOFException, IOException}
import java.net.{ConnectException, InetAddress, InetSocketAddress, Socket, SocketException}
import java.nio.ByteBuffer
import java.nio.file.{Files, Path}
import java.nio.file.attribute.PosixFilePermissions
import java.util.concurrent.{ConcurrentLinkedQueue, CountDownLatch}
import java.util.concurrent.atomic.AtomicInteger
import org.apache.spark.SparkConf
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import scala.util.Random
import org.apache.spark.stagecrew.wire.{Channels, Frame, FrameException, Frames, Json, Link, LinkHandler}

/** The server of channels, with real sockets. Whatever one connection sends, the server keeps serving the others. */
class ChannelsSuite extends AnyFunSuite {
  private val TimeoutMs = 400L

  /** Replies to each BEGIN with CLOSED, so that a client can check that it is served. */
  private final class Echo extends LinkHandler {
    val connections = new AtomicInteger
    val ends = new AtomicInteger
    val frames = new ConcurrentLinkedQueue[String]()
    override def connected(link: Link): Unit = { connections.incrementAndGet(); () }
    override def received(link: Link, frame: Frame): Unit = {
      frames.add(frame.kind)
      if (frame.kind == "BEGIN") link.send("CLOSED", frame.long("attempt").toString)
      if (frame.kind == "GOODBYE") throw new FrameException("the handler refuses it")
    }
    override def disconnected(link: Link): Unit = { ends.incrementAndGet(); () }
  }

  private final class Client(port: Int) {
    val socket = new Socket()
    socket.connect(new InetSocketAddress(InetAddress.getLoopbackAddress, port), 5000)
    socket.setSoTimeout(10000)
    private val in = new DataInputStream(socket.getInputStream)

    def send(data: Array[Byte]): Unit = socket.getOutputStream.write(data)
    def read(): Frame = Frames.read(in, 1 << 20)

    def served(attempt: Long): Boolean = {
      send(Frames.encode("BEGIN", attempt))
      read().text("topology") == attempt.toString
    }

    /** Reads up to the end of the stream or a connection reset. */
    def refused(): Boolean =
      try { while (true) read(); false } catch { case _: EOFException | _: SocketException => true }
  }

  private def hello(token: String, version: String = "1.0") =
    Frames.encode("HELLO", token, "worker", "p1", 42L, version)

  private def withChannels(body: (Channels, Echo, String) => Any): Unit = withDeadline(TimeoutMs)(body)

  private def withDeadline(timeoutMs: Long)(body: (Channels, Echo, String) => Any): Unit = {
    val folder = Files.createTempDirectory("channels")
    val settings = new Settings(new SparkConf(false)
      .set(Settings.ChannelTimeout, s"${timeoutMs}ms").set(Settings.MaxFrame, "64k"))
    val echo = new Echo
    val channels = new Channels(folder, settings, "1.0", "executor 1", () => "welcome", echo)
    try {
      val token = Json.parse(Files.readString(channels.place)).get("token").asText
      body(channels, echo, token)
    } finally {
      channels.close()
      Files.delete(folder) // fails if the folder is not empty
    }
    eventually(assert(echo.connections.get == echo.ends.get))
    ()
  }

  private def known(port: Int, token: String): Client = {
    val client = new Client(port)
    client.send(hello(token))
    assert(client.read().text("body") == "welcome")
    assert(client.served(0))
    client
  }

  private def eventually(check: => Any): Unit = {
    val deadline = System.nanoTime() + 10000000000L
    def attempt(): Unit = try { check; () } catch {
      case failed: Throwable =>
        if (System.nanoTime() > deadline) throw failed
        Thread.sleep(10)
        attempt()
    }
    attempt()
  }

  /** An existing link and a new one are served. */
  private def stillServes(channels: Channels, token: String, before: Client): Unit = {
    assert(before.served(1))
    val after = known(channels.port, token)
    assert(after.served(2))
    after.socket.close()
  }

  /** The connection is refused long before the authentication deadline. */
  private def refusedAtOnce(first: Array[Byte]): Unit = withDeadline(60000) { (channels, echo, token) =>
    val good = known(channels.port, token)
    val bad = new Client(channels.port)
    bad.send(first)
    assert(bad.refused())
    assert(echo.connections.get == 1)
    stillServes(channels, token, good)
  }

  test("only this user can read the place file, which has the port and the token") {
    withChannels { (channels, _, token) =>
      assert(PosixFilePermissions.toString(Files.getPosixFilePermissions(channels.place)) == "rw-------")
      val place = Json.parse(Files.readString(channels.place))
      assert(place.get("port").asInt == channels.port)
      assert(place.get("maxFrame").asInt == 65536)
      assert(place.get("timeout").asDouble == TimeoutMs / 1000.0)
      assert(token.matches("[0-9a-f]{64}"))
    }
  }

  test("a wrong token, a prefix of the token and an empty token are refused") {
    withChannels { (channels, echo, token) =>
      val good = known(channels.port, token)
      Seq("", "x", token.drop(1), token + "0", token.toUpperCase + "x").foreach { wrong =>
        val bad = new Client(channels.port)
        bad.send(hello(wrong))
        assert(bad.refused())
      }
      assert(echo.connections.get == 1)
      stillServes(channels, token, good)
    }
  }

  test("another version is refused with the reason") {
    withChannels { (channels, echo, token) =>
      val other = new Client(channels.port)
      other.send(hello(token, "0.9"))
      val answer = other.read()
      assert(answer.kind == "REFUSED" && answer.text("reason").contains("0.9") && answer.text("reason").contains("1.0"))
      assert(other.refused() && echo.connections.get == 0)
    }
  }

  test("a silent connection is refused at the deadline, and slowly sent bytes do not extend it") {
    withChannels { (channels, echo, token) =>
      val good = known(channels.port, token)
      val silent = new Client(channels.port)
      val trickle = new Client(channels.port)
      val started = System.nanoTime()
      val message = hello(token)
      var sent = 0
      try while (sent < message.length) {
        trickle.send(message.slice(sent, sent + 1))
        sent += 1
        Thread.sleep(20)
      } catch { case _: IOException => () }
      assert(sent < message.length && trickle.refused() && silent.refused())
      val ms = (System.nanoTime() - started) / 1000000L
      assert(ms >= TimeoutMs - 50 && ms < TimeoutMs + 3000)
      assert(echo.connections.get == 1)
      stillServes(channels, token, good)
      Thread.sleep(TimeoutMs) // an authenticated link has no deadline
      assert(good.served(3))
    }
  }

  test("garbage is refused immediately") {
    refusedAtOnce("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".getBytes)
  }

  test("a first frame that is too long is refused immediately, whatever its token") {
    refusedAtOnce(ByteBuffer.allocate(4).putInt(Channels.MaxHello + 1).array)
    refusedAtOnce(ByteBuffer.allocate(4).putInt(-1).array)
  }

  test("a first frame of another kind is refused immediately") {
    refusedAtOnce(Frames.encode("BEGIN", 7L))
  }

  test("a truncated first frame is refused at the end of the stream, or at the deadline") {
    withChannels { (channels, echo, token) =>
      val good = known(channels.port, token)
      val message = hello(token)
      (0 until message.length by 7).foreach { end =>
        val bad = new Client(channels.port)
        bad.send(message.take(end))
        bad.socket.shutdownOutput()
        assert(bad.refused())
      }
      val open = new Client(channels.port)
      open.send(message.dropRight(1))
      assert(open.refused() && echo.connections.get == 1)
      stillServes(channels, token, good)
    }
  }

  test("only a link that sends an oversized frame, garbage or an unexpected frame is closed") {
    withChannels { (channels, echo, token) =>
      val good = known(channels.port, token)
      val bad = Seq(ByteBuffer.allocate(4).putInt(65537).array, ByteBuffer.allocate(8).putInt(4).put(77.toByte).array,
        Frames.encode("GOODBYE", "x"))
      bad.foreach { data =>
        val link = known(channels.port, token)
        assert(link.served(5))
        link.send(data)
        assert(link.refused())
      }
      eventually(assert(echo.ends.get == bad.size))
      stillServes(channels, token, good)
    }
  }

  test("more unauthenticated connections than the limit are refused, and closed ones do not count") {
    withChannels { (channels, _, token) =>
      val good = known(channels.port, token)
      val strangers = Vector.fill(Channels.MaxUnauthenticated + 20)(new Client(channels.port))
      assert(good.served(1))
      strangers.foreach(stranger => assert(stranger.refused()))
      stillServes(channels, token, good)
    }
  }

  test("500 connections with random bytes do not disturb the port or another link") {
    withChannels { (channels, echo, token) =>
      val good = known(channels.port, token)
      val done = new CountDownLatch(1)
      val served = new AtomicInteger
      val talker = new Thread(() =>
        while (done.getCount > 0 && good.served(served.get.toLong)) { served.incrementAndGet(); () })
      talker.start()
      val random = new Random(20260722)
      val message = hello(token)
      (1 to 500).foreach { _ =>
        val data = random.nextInt(6) match {
          case 0 => random.nextBytes(random.nextInt(300))
          case 1 => message.take(random.nextInt(message.length))
          case 2 => message.updated(random.nextInt(message.length), random.nextInt().toByte)
          case 3 => message ++ random.nextBytes(random.nextInt(300))
          case 4 => ByteBuffer.allocate(4).putInt(random.nextInt()).array ++ random.nextBytes(random.nextInt(50))
          case _ => message ++ Frames.encode("BEGIN", 1L) ++
            Frames.encode("OPENED", "t", "b", Vector(random.nextBytes(99))).drop(random.nextInt(9))
        }
        val client = new Client(channels.port)
        try {
          client.send(data)
          if (random.nextBoolean()) {
            client.socket.shutdownOutput()
            client.refused()
          }
        } catch { case _: IOException | _: FrameException => () } // refused while sending
        client.socket.close()
      }
      done.countDown()
      talker.join(10000)
      assert(!talker.isAlive && served.get > 100)
      stillServes(channels, token, good)
      eventually(assert(echo.ends.get >= echo.connections.get - 1))
    }
  }

  test("close removes the port and the place file, and ends every link and every thread") {
    var port = 0
    var place: Path = null
    var links = Seq.empty[Client]
    withChannels { (channels, _, token) =>
      links = Seq.fill(3)(known(channels.port, token)) :+ new Client(channels.port)
      port = channels.port
      place = channels.place
    }
    assert(!Files.exists(place))
    links.foreach(link => assert(link.refused()))
    intercept[ConnectException](new Client(port))
    def threads = Thread.getAllStackTraces.keySet.asScala.map(_.getName).filter(_.startsWith("stagecrew-"))
    eventually(assert(threads.isEmpty))
  }

  test("frames are handled in order") {
    withChannels { (channels, echo, token) =>
      val link = known(channels.port, token)
      link.send(Seq("END", "BEGIN", "END", "BEGIN").map(kind => Frames.encode(kind, 1L)).reduce(_ ++ _))
      link.read()
      link.read()
      assert(echo.frames.asScala.toSeq.tail == Seq("END", "BEGIN", "END", "BEGIN"))
    }
  }
}
