package org.apache.spark.stagecrew
package wire

import java.io.{BufferedInputStream, DataInputStream, EOFException, IOException}
import java.net.{InetAddress, ServerSocket, Socket, SocketException}
import java.nio.charset.StandardCharsets
import java.nio.file.{Files, Path}
import java.nio.file.attribute.PosixFilePermissions
import java.security.{MessageDigest, SecureRandom}
import java.util.concurrent.{ConcurrentHashMap, Semaphore}
import scala.util.control.NonFatal

/** A connected Python process. */
final class Link(socket: Socket, hello: Frame, input: DataInputStream) {
  val process: String = hello.text("process")
  val role: String = hello.text("role")
  val pid: Long = hello.long("pid")
  private val output = socket.getOutputStream

  /** Sends one frame. The reader of the link notices a broken connection. */
  def send(kind: String, values: Any*): Unit = write(Frames.encode(kind, values: _*))

  /** Sends encoded frames with their lengths. */
  def write(frames: Array[Byte]): Unit = try synchronized(output.write(frames)) catch { case _: IOException => close() }

  private[stagecrew] def read(limit: Int): Frame = Frames.read(input, limit)
  private[stagecrew] def readBytes(limit: Int): Array[Byte] = Frames.readBytes(input, limit)

  /** Whether another frame has begun to arrive. */
  private[stagecrew] def moreIsThere: Boolean = input.available() > 0

  def close(): Unit = try socket.close() catch { case _: IOException => () }

  override def toString: String = s"$role process $pid"
}

/** Handles links. Called on the link's own thread, in the order of its frames. */
trait LinkHandler {
  def connected(link: Link): Unit
  def received(link: Link, frame: Frame): Unit
  /** Reads the link's frames until an exception ends it. */
  def serve(link: Link, limit: Int): Unit = while (true) received(link, link.read(limit))
  /** Called once, after the last frame. */
  def disconnected(link: Link): Unit
}

/**
 * The executor's side of the channels to its Python processes: a server on a loopback port.
 *
 * A connection must send the token within the deadline. Other connections are refused, and delay nobody. Port and token
 * are in a file that only this user can read: a local property could reach the event log, because in local mode tasks
 * share their properties with the job.
 */
final class Channels(folder: Path, settings: Settings, version: String, welcome: () => String, handler: LinkHandler) {
  import Channels._

  private val token: String = {
    val bytes = new Array[Byte](32)
    new SecureRandom().nextBytes(bytes)
    bytes.map(b => f"${b & 0xff}%02x").mkString
  }
  // The address to which Python connects, also where Java prefers IPv6.
  private val server = new ServerSocket(0, 128, InetAddress.getByName("127.0.0.1"))
  private val links = ConcurrentHashMap.newKeySet[Socket]()
  private val strangers = new Semaphore(MaxStrangers)
  @volatile private var closed = false

  /** The place file: it tells Python processes the port and the token. */
  val place: Path = {
    val file = Files.createFile(folder.resolve("channel.json"),
      PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rw-------")))
    val body = Json.obj().put("port", server.getLocalPort).put("token", token).put("maxFrame", settings.maxFrame)
      .put("timeout", settings.channelTimeoutMs / 1000.0)
    Files.write(file, Json.write(body).getBytes(StandardCharsets.UTF_8))
  }

  def port: Int = server.getLocalPort

  thread("stagecrew-accept") {
    while (!closed) {
      try {
        val socket = server.accept()
        if (strangers.tryAcquire()) thread(s"stagecrew-link-${socket.getPort}")(serve(socket))
        else socket.close() // more than any correct start opens
      } catch {
        case _: SocketException if closed => ()
        case NonFatal(error) => Log.log.warn("accepting a connection of a Python process failed", error)
      }
    }
  }

  private def serve(socket: Socket): Unit = {
    links.add(socket)
    val accepted = try greet(socket) catch {
      case NonFatal(error) =>
        val why = Option(error.getMessage).getOrElse("it ended too early")
        if (!closed) Log.log.warn(s"a connection to the executor's channel was refused: $why")
        None
    } finally strangers.release()
    accepted.foreach { link =>
      try {
        handler.connected(link)
        handler.serve(link, settings.maxFrame)
      } catch {
        case _: EOFException | _: SocketException => ()
        case NonFatal(error) => Log.log.warn(s"the channel of $link is closed: ${error.getMessage}")
      } finally Log.contained(s"the end of $link")(handler.disconnected(link))
    }
    links.remove(socket)
    try socket.close() catch { case _: IOException => () }
  }

  private def greet(socket: Socket): Option[Link] = {
    socket.setTcpNoDelay(true)
    val stream = new Stream(socket, System.nanoTime() + settings.channelTimeoutMs * 1000000L)
    val input = new DataInputStream(new BufferedInputStream(stream, 1 << 16))
    val hello = Frames.read(input, MaxHello)
    if (hello.kind != "HELLO") throw new FrameException(s"its first frame is ${hello.kind}, not HELLO")
    if (!MessageDigest.isEqual(bytes(hello.text("token")), bytes(token))) throw new FrameException("wrong token")
    stream.known()
    val link = new Link(socket, hello, input)
    if (hello.text("version") != version) {
      link.send("REFUSED", s"it has stagecrew ${hello.text("version")}, this executor's jar $version")
      None
    } else {
      link.send("WELCOME", welcome())
      Some(link)
    }
  }

  /** Closes the port and every connection, and removes the place file. */
  def close(): Unit = {
    closed = true
    try server.close() catch { case _: IOException => () }
    links.forEach(socket => try socket.close() catch { case _: IOException => () })
    Files.deleteIfExists(place)
    ()
  }
}

object Channels {
  /** The maximum length of the first frame. */
  val MaxHello = 4096

  /** How many connections may not be authenticated yet. */
  val MaxStrangers = 256

  private def bytes(text: String): Array[Byte] = text.getBytes(StandardCharsets.UTF_8)

  private def thread(name: String)(body: => Unit): Unit = {
    val thread = new Thread(() => body, name)
    thread.setDaemon(true)
    thread.start()
  }

  /**
   * A socket's stream whose reads end at a deadline (in nanoseconds) until the other side is authenticated. The
   * deadline is for the whole first frame: a trickle of bytes does not extend it.
   */
  private final class Stream(socket: Socket, deadline: Long) extends java.io.InputStream {
    private val in = socket.getInputStream
    private var stranger = true

    def known(): Unit = {
      stranger = false
      socket.setSoTimeout(0)
    }

    private def limit(): Unit = if (stranger) {
      val ms = (deadline - System.nanoTime()) / 1000000L
      if (ms <= 0) throw new java.net.SocketTimeoutException("it was not authenticated in time")
      socket.setSoTimeout(ms.toInt)
    }

    override def read(): Int = {
      limit()
      in.read()
    }

    override def read(b: Array[Byte], off: Int, len: Int): Int = {
      limit()
      in.read(b, off, len)
    }
  }
}
