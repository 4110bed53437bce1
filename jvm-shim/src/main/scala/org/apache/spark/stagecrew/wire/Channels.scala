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
import executor._

/** The connection to one Python process. */
final class Link(socket: Socket, hello: Frame, input: DataInputStream) {
  val process: String = hello.text("process")
  val role: String = hello.text("role")
  val pid: Long = hello.long("pid")
  private val output = socket.getOutputStream

  /** Sends one frame. If the connection is broken, closes it, and the thread that reads it ends. */
  def send(kind: String, values: Any*): Unit = write(Frames.encode(kind, values: _*))

  /** Sends encoded frames, each with its length prefix. */
  def write(frames: Array[Byte]): Unit = try synchronized(output.write(frames)) catch { case _: IOException => close() }

  private[stagecrew] def read(limit: Int): Frame = Frames.read(input, limit)
  private[stagecrew] def readBytes(limit: Int): Array[Byte] = Frames.readBytes(input, limit)

  /** Whether another frame has begun to arrive. */
  private[stagecrew] def hasMore: Boolean = input.available() > 0

  def close(): Unit = try socket.close() catch { case _: IOException => () }

  override def toString: String = s"$role process $pid"
}

/** Handles links. Each link has its own thread, which calls these methods in the order of the frames. */
trait LinkHandler {
  def connected(link: Link): Unit
  def received(link: Link, frame: Frame): Unit
  /** Reads the link's frames until an exception ends it. */
  def serve(link: Link, limit: Int): Unit = while (true) received(link, link.read(limit))
  /** Called once, after the last frame. */
  def disconnected(link: Link): Unit
}

/**
 * A server on a loopback port for the channels to Python processes. `owner`, for messages, is the side that it serves:
 * the driver or an executor.
 *
 * A connection must send the token before the deadline. Other connections are refused, and do not delay anything. Port
 * and token are in a file that only this user can read. A local property could not hold them: in local mode tasks share
 * their properties with the job, so it could reach the event log.
 */
final class Channels(
    folder: Path, settings: Settings, version: String, owner: String, welcome: () => String, handler: LinkHandler) {
  import Channels._

  private val token: String = {
    val bytes = new Array[Byte](32)
    new SecureRandom().nextBytes(bytes)
    bytes.map(b => f"${b & 0xff}%02x").mkString
  }
  // Python connects to this address, even if Java prefers IPv6.
  private val server = new ServerSocket(0, 128, InetAddress.getByName("127.0.0.1"))
  private val links = ConcurrentHashMap.newKeySet[Socket]()
  private val unauthenticated = new Semaphore(MaxUnauthenticated)
  @volatile private var closed = false

  /** The place file, which contains the port and the token for Python processes. */
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
        if (unauthenticated.tryAcquire()) thread(s"stagecrew-link-${socket.getPort}")(serve(socket))
        else socket.close() // stagecrew's own processes never reach this limit
      } catch {
        case _: SocketException if closed => ()
        case NonFatal(error) => Log.log.warn(s"the channel of $owner could not accept a connection", error)
      }
    }
  }

  private def serve(socket: Socket): Unit = {
    links.add(socket)
    val accepted = try handshake(socket) catch {
      case NonFatal(error) =>
        val reason = Option(error.getMessage).getOrElse("the connection was closed too early")
        if (!closed) Log.log.warn(s"a connection to the channel of $owner was refused: $reason")
        None
    } finally unauthenticated.release()
    accepted.foreach { link =>
      try {
        handler.connected(link)
        handler.serve(link, settings.maxFrame)
      } catch {
        case _: EOFException | _: SocketException => ()
        case NonFatal(error) => Log.log.warn(s"closed the channel to $link: ${error.getMessage}")
      } finally Log.contained(s"handling the end of $link")(handler.disconnected(link))
    }
    links.remove(socket)
    try socket.close() catch { case _: IOException => () }
  }

  private def handshake(socket: Socket): Option[Link] = {
    socket.setTcpNoDelay(true)
    val stream = new Stream(socket, System.nanoTime() + settings.channelTimeoutMs * 1000000L)
    val input = new DataInputStream(new BufferedInputStream(stream, 1 << 16))
    val hello = Frames.read(input, MaxHello)
    if (hello.kind != "HELLO") throw new FrameException(s"the first frame is ${hello.kind}, not HELLO")
    if (!MessageDigest.isEqual(bytes(hello.text("token")), bytes(token))) throw new FrameException("wrong token")
    stream.authenticated()
    val link = new Link(socket, hello, input)
    if (hello.text("version") != version) {
      link.send("REFUSED", s"this process has stagecrew ${hello.text("version")}, but $owner has $version")
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
  /** The maximum length of the first frame in bytes. */
  val MaxHello = 4096

  /** The maximum number of connections that are not authenticated yet. */
  val MaxUnauthenticated = 256

  private def bytes(text: String): Array[Byte] = text.getBytes(StandardCharsets.UTF_8)

  private def thread(name: String)(body: => Unit): Unit = ExecutorCrew.daemon(name).newThread(() => body).start()

  /**
   * A socket's input stream. Until the other side is authenticated, each read fails at the deadline (in nanoseconds).
   * The deadline applies to the whole first frame: slowly arriving bytes do not extend it.
   */
  private final class Stream(socket: Socket, deadline: Long) extends java.io.InputStream {
    private val in = socket.getInputStream
    private var unauthenticated = true

    def authenticated(): Unit = {
      unauthenticated = false
      socket.setSoTimeout(0)
    }

    private def applyDeadline(): Unit = if (unauthenticated) {
      val ms = (deadline - System.nanoTime()) / 1000000L
      if (ms <= 0) throw new java.net.SocketTimeoutException("it did not authenticate within the deadline")
      socket.setSoTimeout(ms.toInt)
    }

    override def read(): Int = throw new UnsupportedOperationException // BufferedInputStream reads arrays

    override def read(b: Array[Byte], off: Int, len: Int): Int = {
      applyDeadline()
      in.read(b, off, len)
    }
  }
}
