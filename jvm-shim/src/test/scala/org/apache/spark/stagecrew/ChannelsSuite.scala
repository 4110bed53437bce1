package org.apache.spark.stagecrew

import java.io.IOException
import java.nio.ByteBuffer
import java.nio.file.{Files, Path}
import java.nio.file.attribute.PosixFilePermissions
import java.util.concurrent.{ConcurrentLinkedQueue, CountDownLatch}
import java.util.concurrent.atomic.{AtomicBoolean, AtomicInteger}
import org.apache.spark.SparkConf
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import scala.util.Random
import org.apache.spark.stagecrew.executor.ExecutorCrew
import org.apache.spark.stagecrew.wire.{Channels, Frame, FrameException, Frames, Link, LinkHandler}

/** The server of channels, with real Unix sockets and real ports. Whatever one connection sends, the server keeps
  * serving the others. */
class ChannelsSuite extends AnyFunSuite {
  private val TimeoutMs = 60000L
  private val ShortMs = 400L // for tests in which the deadline passes

  /** Replies to each BEGIN with CLOSED, so that a client can check that it is served. */
  private final class Echo extends LinkHandler {
    val connections = new AtomicInteger
    val ends = new AtomicInteger
    val frames = new ConcurrentLinkedQueue[String]()
    @volatile var last: Link = _
    /** Each BEGIN waits for this. */
    @volatile var continues = new CountDownLatch(0)
    override def connected(link: Link): Unit = {
      last = link
      connections.incrementAndGet()
      ()
    }
    override def received(link: Link, frame: Frame): Unit = {
      frames.add(frame.kind)
      if (frame.kind == "BEGIN") continues.await()
      if (frame.kind == "BEGIN") link.send("CLOSED", frame.long("attempt").toString)
      if (frame.kind == "GOODBYE") throw new FrameException("the handler refuses it")
      if (frame.kind == "DESCRIBE") throw new StackOverflowError("on purpose") // fatal, as an OutOfMemoryError
    }
    override def disconnected(link: Link): Unit = { ends.incrementAndGet(); () }
  }

  private final class Server(val channels: Channels, val echo: Echo, val kind: String) {
    val address: ClientAddress = ClientAddress.read(channels.addressFile)
    def client(): ChannelClient = new ChannelClient(address)

    def known(): ChannelClient = {
      val known = client()
      assert(known.greet().text("body") == "welcome")
      assert(known.served(0))
      known
    }

    /** An existing link and a new one are served. */
    def stillServes(before: ChannelClient): Unit = {
      assert(before.served(1))
      val after = known()
      assert(after.served(2))
      after.close()
    }
  }

  /** Registers the test once for each kind of channel. */
  private def onEach(name: String, timeoutMs: Long = TimeoutMs)(body: Server => Any): Unit =
    Seq("unix", "tcp").foreach(kind => test(s"$name ($kind)")(withServer(kind, timeoutMs)(body)))

  private def withServer(
      kind: String, timeoutMs: Long = TimeoutMs,
      newThread: (String, Runnable) => Thread = ExecutorCrew.daemon(_).newThread(_),
      warnings: LimitedWarnings = new LimitedWarnings)(body: Server => Any): Unit = {
    val folder = Files.createTempDirectory("channels",
      PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------")))
    val settings = new Settings(new SparkConf(false).set(Settings.Channel, kind)
      .set(Settings.ChannelTimeout, s"${timeoutMs}ms").set(Settings.MaxFrame, "64k"))
    val echo = new Echo
    val channels = new Channels(
      () => folder.toFile, settings, "1.0", "executor 1", () => "welcome", echo, newThread, warnings)
    try body(new Server(channels, echo, kind)) finally channels.close()
    assert(!Files.exists(folder))
    eventually(assert(echo.connections.get == echo.ends.get))
    ()
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

  /** The connection is refused long before the deadline. */
  private def refusedAtOnce(name: String)(first: ChannelClient => Array[Byte]): Unit =
    onEach(name) { server =>
      val good = server.known()
      val bad = server.client()
      bad.send(first(bad))
      assert(bad.refused())
      assert(server.echo.connections.get == 1)
      server.stillServes(good)
    }

  onEach("only this user can read the address file, which says where to connect, and has the token") { server =>
    import server.channels
    assert(PosixFilePermissions.toString(Files.getPosixFilePermissions(channels.addressFile)) == "rw-------")
    assert(PosixFilePermissions.toString(Files.getPosixFilePermissions(channels.addressFile.getParent)) == "rwx------")
    val address = wire.Json.parse(Files.readString(channels.addressFile))
    assert(address.get("maxFrame").asInt == 65536)
    assert(address.get("timeout").asDouble == TimeoutMs / 1000.0)
    assert(server.address.token.matches("[0-9a-f]{64}"))
    assert(server.address.path.isDefined == (server.kind == "unix"))
    assert(server.address.port.isDefined == (server.kind == "tcp"))
  }

  onEach("the server proves that it knows the token, with another proof for each connection") { server =>
    val challenges = Seq.fill(3)(server.client()).map { client =>
      val challenge = client.challenged()
      assert(challenge.kind == "CHALLENGE" && client.isProved(challenge))
      challenge.bytes("proof").toSeq
    }
    assert(challenges.distinct.size == 3)
  }

  onEach("a proof with another token, for another role or side, or for another connection is refused") { server =>
    val good = server.known()
    val old = server.client().challenged()
    val token = server.address.token
    val wrong = Seq[(ChannelClient, Frame) => Array[Byte]](
      _.hello(_, token = "x"), _.hello(_, token = token.drop(1)), _.hello(_, token = token + "0"),
      _.hello(_, provenRole = "agent"), _.hello(_, side = "server"),
      (client, _) => client.hello(old),
      (_, challenge) => Frames.encode("HELLO", challenge.bytes("proof"), "worker", "p1", 42L, "1.0"))
    wrong.foreach { forge =>
      val bad = server.client()
      bad.send(forge(bad, bad.challenged()))
      assert(bad.refused())
    }
    assert(server.echo.connections.get == 1)
    server.stillServes(good)
  }

  onEach("another version is refused with the reason") { server =>
    val other = server.client()
    other.send(other.hello(other.challenged(), version = "0.9"))
    val reply = other.read()
    assert(reply.kind == "REFUSED" && reply.text("reason").contains("0.9") && reply.text("reason").contains("1.0"))
    assert(other.refused() && server.echo.connections.get == 0)
  }

  onEach("a silent connection is refused at the deadline, and slowly sent bytes do not extend it", ShortMs) { server =>
    val good = server.known()
    val silent = server.client()
    val trickle = server.client()
    val started = System.nanoTime()
    val message = trickle.connect
    var sent = 0
    try while (sent < message.length) {
      trickle.send(message.slice(sent, sent + 1))
      sent += 1
      Thread.sleep(20)
    } catch { case _: IOException => () }
    assert(sent < message.length && trickle.refused() && silent.refused())
    val ms = (System.nanoTime() - started) / 1000000L
    assert(ms >= ShortMs - 50 && ms < ShortMs + 3000)
    assert(server.echo.connections.get == 1)
    server.stillServes(good)
    Thread.sleep(ShortMs) // an authenticated link has no deadline
    assert(good.served(3))
  }

  refusedAtOnce("garbage is refused immediately")(_ => "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".getBytes)

  refusedAtOnce("a first frame that is too long is refused immediately")(_ =>
    ByteBuffer.allocate(4).putInt(Channels.MaxHello + 1).array)

  refusedAtOnce("a first frame of negative length is refused immediately")(_ => ByteBuffer.allocate(4).putInt(-1).array)

  refusedAtOnce("a first frame of another kind is refused immediately")(_ => Frames.encode("BEGIN", 7L))

  refusedAtOnce("a nonce of a wrong length is refused immediately")(_ => Frames.encode("CONNECT", new Array[Byte](31)))

  refusedAtOnce("HELLO before the challenge is refused immediately")(client =>
    Frames.encode("HELLO", new Array[Byte](32), "worker", "p1", 42L, "1.0") ++ client.connect)

  onEach("a truncated handshake is refused at the end of the stream, or at the deadline", ShortMs) { server =>
    val good = server.known()
    (0 until good.connect.length by 7).foreach { end =>
      val bad = server.client()
      bad.send(bad.connect.take(end))
      bad.endOutput()
      assert(bad.refused())
    }
    (9 to 90 by 9).foreach { missing =>
      val bad = server.client()
      bad.send(bad.hello(bad.challenged()).dropRight(missing))
      bad.endOutput()
      assert(bad.refused())
    }
    val open = server.client()
    open.send(open.hello(open.challenged()).dropRight(1))
    assert(open.refused() && server.echo.connections.get == 1)
    server.stillServes(good)
  }

  onEach("only a link that sends an oversized frame, garbage or an unexpected frame is closed") { server =>
    val good = server.known()
    val bad = Seq(ByteBuffer.allocate(4).putInt(65537).array, ByteBuffer.allocate(8).putInt(4).put(127.toByte).array,
      Frames.encode("GOODBYE", "x"))
    bad.foreach { data =>
      val link = server.known()
      assert(link.served(5))
      link.send(data)
      assert(link.refused())
    }
    eventually(assert(server.echo.ends.get == bad.size))
    server.stillServes(good)
  }

  onEach("if there are too many strangers the oldest is closed, and known processes do not count") {
    server =>
      val known = Seq.fill(Channels.MaxStrangers + 10)(server.known())
      val strangers = Vector.fill(Channels.MaxStrangers + 20)(server.client())
      strangers.take(20).foreach(stranger => assert(stranger.refused()))
      assert(known.forall(_.served(1)))
      assert(strangers.last.greet().text("body") == "welcome") // the youngest was not closed
      known.foreach(_.close())
      server.stillServes(strangers.last)
  }

  onEach("500 connections with random bytes do not disturb the channel or another link") { server =>
    val good = server.known()
    val done = new CountDownLatch(1)
    val served = new AtomicInteger
    val talker = new Thread(() =>
      while (done.getCount > 0 && good.served(served.get.toLong)) { served.incrementAndGet(); () })
    talker.start()
    val random = new Random(20260722)
    (1 to 500).foreach { _ =>
      val client = server.client()
      val message = client.connect
      try {
        client.send(random.nextInt(6) match {
          case 0 => random.nextBytes(random.nextInt(300))
          case 1 => message.take(random.nextInt(message.length))
          case 2 => message.updated(random.nextInt(message.length), random.nextInt().toByte)
          case 3 => message ++ random.nextBytes(random.nextInt(300))
          case 4 => ByteBuffer.allocate(4).putInt(random.nextInt()).array ++ random.nextBytes(random.nextInt(50))
          case _ =>
            val hello = client.hello(client.challenged())
            hello ++ Frames.encode("BEGIN", 1L) ++
              Frames.encode("OPENED", "t", "b", Vector(random.nextBytes(99))).drop(random.nextInt(9))
        })
        if (random.nextBoolean()) {
          client.endOutput()
          client.refused()
        }
      } catch { case _: IOException | _: FrameException => () } // refused while sending
      client.close()
    }
    done.countDown()
    talker.join(10000)
    assert(!talker.isAlive && served.get > 100)
    server.stillServes(good)
    eventually(assert(server.echo.ends.get >= server.echo.connections.get - 1))
  }

  onEach("a process that does not read delays no thread that sends to it, and later gets everything in order") { server =>
    val client = server.known()
    val link = server.echo.last
    val texts = (0 until 300).map(n => s"$n " + "x" * 60000) // 18 MB: a socket has room for much less
    val began = System.nanoTime()
    texts.foreach(text => link.send("CLOSED", text))
    assert(System.nanoTime() - began < 5000000000L)
    texts.foreach(text => assert(client.read().text("topology") == text))
    assert(client.served(1))
  }

  onEach("frames of a process that writes and does not read are handled, also while much is sent to it") { server =>
    val client = server.known()
    server.echo.last.send("CLOSED", "y" * 60000)
    (0 until 2000).foreach { n =>
      server.echo.last.send("CLOSED", "x" * 10000)
      client.send(Frames.encode("BEGIN", n.toLong) ++ Frames.encode("CLOSED", "x" * 10000))
    }
    eventually(assert(server.echo.frames.asScala.count(_ == "BEGIN") == 2001)) // one is that of `known`
    assert(client.read().text("topology").length == 60000)
    val received = Iterator.continually(client.read().text("topology")).takeWhile(_ != "1999").toVector
    assert(received.filter(_.length < 10).map(_.toInt) == (0 until 1999))
  }

  onEach("the end of a process that has not read everything ends its link") { server =>
    val client = server.known()
    (0 until 300).foreach(_ => server.echo.last.send("CLOSED", "x" * 60000))
    client.close()
    eventually(assert(server.echo.ends.get == 1))
    server.known()
  }

  onEach("frames that a process sent before it ended are handled, although writes to it have failed") { server =>
    val client = server.known()
    server.echo.continues = new CountDownLatch(1)
    client.send(Frames.encode("BEGIN", 1L))
    eventually(assert(server.echo.frames.size == 2)) // the other one is that of `known`
    client.send((1 to 3).map(_ => Frames.encode("END", 1L)).reduce(_ ++ _))
    client.close()
    (1 to 1000).foreach(_ => server.echo.last.send("CLOSED", "x")) // with TCP, the second one fails at the earliest
    server.echo.continues.countDown()
    eventually(assert(server.echo.ends.get == 1))
    assert(server.echo.frames.asScala.toSeq == Seq("BEGIN", "BEGIN", "END", "END", "END"))
  }

  Seq("unix", "tcp").foreach { kind =>
    test(s"if no thread can be started for a connection, it is refused, and later ones are served ($kind)") {
      val fails = new AtomicBoolean(false)
      def newThread(name: String, run: Runnable): Thread = {
        if (fails.getAndSet(false)) throw new OutOfMemoryError("unable to create native thread")
        ExecutorCrew.daemon(name).newThread(run)
      }
      withServer(kind, newThread = newThread) { server =>
        val good = server.known()
        fails.set(true)
        assert(server.client().refused())
        server.stillServes(good)
      }
    }
  }

  test("a process of another user gets no challenge, even if it can reach the socket") {
    assume(System.getProperty("user.name") == "root", "only root can start a process of another user")
    withServer("unix") { server =>
      val socket = Path.of(server.address.path.get)
      Seq(socket, socket.getParent).foreach(path =>
        Files.setPosixFilePermissions(path, PosixFilePermissions.fromString("rwxrwxrwx")))
      val client = server.known()
      // The process changes its user after its imports: the other user may be unable to read the interpreter.
      val script = """import os, socket, sys
        |os.setuid(int(sys.argv[3]))
        |client = socket.socket(socket.AF_UNIX)
        |client.connect(sys.argv[1])
        |try:
        |    client.sendall(bytes.fromhex(sys.argv[2]))
        |    print(client.recv(100) != b"")
        |except OSError:
        |    print(False)""".stripMargin
      def getsChallenge(user: Int): Boolean = scala.sys.process.Process(Seq("python3", "-c", script, socket.toString,
        client.connect.map(byte => f"$byte%02x").mkString, user.toString)).!!.trim.toBoolean
      assert(getsChallenge(0) && !getsChallenge(65534))
      assert(client.served(1))
      Files.setPosixFilePermissions(socket.getParent, PosixFilePermissions.fromString("rwx------"))
    }
  }

  onEach("an interrupt of a thread that sends does not break the link") { server =>
    val client = server.known()
    val link = server.echo.last
    val task = new Thread("task") {
      override def run(): Unit = {
        Thread.currentThread.interrupt() // as Spark does when it kills the task
        link.send("CLOSED", "one")
        link.send("CLOSED", "two")
      }
    }
    task.start()
    task.join(10000)
    assert(client.read().text("topology") == "one" && client.read().text("topology") == "two")
    assert(client.served(1))
  }

  Seq("unix", "tcp").foreach { kind =>
    test(s"close removes the address and the address file, and ends every link and every thread ($kind)") {
      var address: ClientAddress = null
      var file: Path = null
      var links = Seq.empty[ChannelClient]
      withServer(kind) { server =>
        links = Seq.fill(3)(server.known()) :+ server.client()
        address = server.address
        file = server.channels.addressFile
      }
      assert(!Files.exists(file))
      links.foreach(link => assert(link.refused()))
      intercept[IOException](new ChannelClient(address))
      def threads = Thread.getAllStackTraces.keySet.asScala.map(_.getName).filter(_.startsWith("stagecrew-"))
      eventually(assert(threads.isEmpty))
    }
  }

  onEach("after a fatal error the connection is closed, and others are served") { server =>
    val (before, broken) = (server.known(), server.known())
    broken.send(Frames.encode("DESCRIBE", "t"))
    assert(broken.refused())
    server.stillServes(before)
  }

  onEach("frames are handled in order") { server =>
    val link = server.known()
    link.send(Seq("END", "BEGIN", "END", "BEGIN").map(kind => Frames.encode(kind, 1L)).reduce(_ ++ _))
    link.read()
    link.read()
    assert(server.echo.frames.asScala.toSeq.tail == Seq("END", "BEGIN", "END", "BEGIN"))
  }

  Seq("unix", "tcp").foreach { kind =>
    test(s"2,000 bad connections to a server produce at most 20 warnings, and a known link is served ($kind)") {
      val lines = new ConcurrentLinkedQueue[String]()
      withServer(kind, ShortMs, warnings = new LimitedWarnings(log = line => { lines.add(line); () })) { server =>
        val good = server.known()
        val silent = (1 to 2000).flatMap { n =>
          val bad = server.client()
          val stays = n % 4 == 0
          try n % 4 match {
            case 0 => ()
            case 1 => bad.send(bad.connect.take(10)); bad.close()
            case 2 => bad.send("GET / HTTP/1.1\r\n\r\n".getBytes); bad.close()
            case _ => bad.close()
          } catch { case _: IOException => () } // the server has closed it
          if (n % 100 == 0) assert(good.served(n.toLong))
          Option.when(stays)(bad)
        }
        silent.foreach(bad => assert(bad.refused()))
        assert(server.echo.connections.get == 1)
        server.stillServes(good)
      }
      assert(!lines.isEmpty && lines.size <= 20)
    }
  }

  test("a warning in a later minute says how many were left out") {
    var now = 1L
    val lines = scala.collection.mutable.Buffer.empty[String]
    val warnings = new LimitedWarnings(() => now, lines += _)
    (1 to 2000).foreach(i => warnings.warn(s"bad connection $i"))
    now += 61000000000L
    warnings.warn("a later one")
    assert(lines.size == 12 && lines.take(10) == (1 to 10).map(i => s"bad connection $i"))
    assert(lines(10).contains("1990 more warnings") && lines(11) == "a later one")
  }
}
