package org.apache.spark.stagecrew
package wire

import java.io.{EOFException, File, IOException}
import java.nio.ByteBuffer
import java.nio.channels.{ClosedChannelException, WritableByteChannel}
import java.nio.charset.StandardCharsets
import java.nio.file.{Files, Path}
import java.nio.file.attribute.PosixFilePermissions
import java.util.concurrent.{ConcurrentHashMap, Executors, TimeUnit}
import java.util.concurrent.atomic.AtomicLong
import scala.util.control.NonFatal
import executor._

/** A connection that has passed the handshake: the channel to one Python process. */
final class Link(channel: WritableByteChannel, hello: Frame, reader: FrameReader) {
  val process: String = hello.text("process")
  val role: String = hello.text("role")
  val pid: Long = hello.long("pid")

  /** Sends one frame. If the connection is broken, the thread that reads it ends after the last frame. */
  def send(kind: String, values: Any*): Unit = write(Frames.encode(kind, values: _*))

  /** Sends bytes that consist of frames with their length prefixes. Never waits. */
  def write(frames: Array[Byte]): Unit =
    try channel.write(ByteBuffer.wrap(frames)) catch { case _: IOException => () }

  private[stagecrew] def read(limit: Int): Frame = reader.read(limit)
  private[stagecrew] def readBytes(limit: Int): Array[Byte] = reader.readBytes(limit)
  private[stagecrew] def hasMore: Boolean = reader.hasMore

  def close(): Unit = try channel.close() catch { case _: IOException => () }

  override def toString: String = s"$role process $pid"
}

/** Handles links. Each link has its own thread, which calls these methods in the order of the frames. */
trait LinkHandler {
  def connected(link: Link): Unit
  def received(link: Link, frame: Frame): Unit
  /** Reads the link's frames in a loop, which only an exception ends. */
  def serve(link: Link, limit: Int): Unit = while (true) received(link, link.read(limit))
  /** Called once, after the last frame. */
  def disconnected(link: Link): Unit
}

/**
 * The server of the channels to Python processes. `owner` names this JVM in log lines: the driver or an executor.
 * `newFolder` makes a private folder for the address file, which contains the server's address and the token. Only this
 * user can read it.
 *
 * Both sides of a connection must prove that they know the token (`Handshake`). A connection is a stranger until its
 * client has proved this. A stranger is closed at its deadline. If there are too many, the oldest is closed. Strangers
 * do not delay other connections. The token is not in a Spark local property, because Spark may write these to the
 * event log in local mode.
 */
final class Channels(newFolder: () => File, settings: Settings, version: String, owner: String, welcome: () => String,
    handler: LinkHandler, newThread: (String, Runnable) => Thread = ExecutorCrew.daemon(_).newThread(_),
    warnings: LimitedWarnings = new LimitedWarnings) {
  import Channels._

  private val token: String = Handshake.random(32).map(b => f"${b & 0xff}%02x").mkString
  private val address = ChannelAddress.open(settings.channel, newFolder)
  private val connections = ConcurrentHashMap.newKeySet[LinkChannel]()
  /** The strangers, oldest first. If there are too many, the oldest is closed. Guarded by itself. */
  private val strangers = new Bounded[Long, LinkChannel](MaxStrangers)((_, connection) => connection.close())
  private val deadlines = Executors.newSingleThreadScheduledExecutor(ExecutorCrew.daemon("stagecrew-deadlines"))
  @volatile private var closed = false

  /** The address file, which says where Python processes connect. */
  val addressFile: Path = try {
    val file = Files.createFile(address.addressFile,
      PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rw-------")))
    val body = Json.obj().put(address.field._1, address.field._2).put("token", token)
      .put("maxFrame", settings.maxFrame).put("timeout", settings.channelTimeoutMs / 1000.0)
    Files.write(file, Json.write(body).getBytes(StandardCharsets.UTF_8))
  } catch { case error: Throwable => address.close(); throw error }

  newThread("stagecrew-accept", () => while (!closed) {
    try accept(new LinkChannel(address.server.accept())) catch {
      case _: ClosedChannelException if closed => ()
      case error: Throwable => // also an OutOfMemoryError, because no thread can be started now
        try warnings.warn(s"the channel of $owner could not accept a connection: $error")
        catch { case _: Throwable => () }
        Thread.sleep(AcceptPauseMs)
    }
  }).start()

  private def accept(connection: LinkChannel): Unit = {
    val number = numbers.incrementAndGet()
    connections.add(connection)
    strangers.synchronized(strangers(number) = connection)
    try newThread(s"stagecrew-link-$number", () => serve(number, connection)).start()
    catch { case error: Throwable => release(number, connection); throw error }
  }

  private def serve(number: Long, connection: LinkChannel): Unit = try {
    val accepted = try handshake(number, connection) catch {
      case _: EOFException => None // the client closed the connection
      case NonFatal(error) =>
        // If this side closed the connection, the exception has no message.
        val reason = Option(error.getMessage).getOrElse("it did not prove in time that it knows the token")
        if (!closed) warnings.warn(s"a connection to the channel of $owner was refused: $reason")
        None
    }
    accepted.foreach { link =>
      try {
        handler.connected(link)
        handler.serve(link, settings.maxFrame)
      } catch {
        case _: IOException => () // the connection has ended
        case NonFatal(error) => Log.log.warn(s"closed the connection to $link: ${error.getMessage}")
      } finally Log.contained(s"handling the end of $link")(handler.disconnected(link))
    }
  } finally release(number, connection) // also after a fatal error: otherwise the process would wait for replies

  private def release(number: Long, connection: LinkChannel): Unit = {
    strangers.synchronized(strangers.remove(number))
    connections.remove(connection)
    Log.contained("closing a connection")(connection.release())
  }

  private def handshake(number: Long, connection: LinkChannel): Option[Link] = {
    val deadline = deadlines.schedule((() => strangers.synchronized(strangers.evict(number))): Runnable,
      settings.channelTimeoutMs, TimeUnit.MILLISECONDS)
    try {
      address.checkPeer(connection.socket)
      val reader = new FrameReader(connection)
      val handshake = new Handshake(token, reader.read(MaxHello))
      connection.write(ByteBuffer.wrap(handshake.challenge))
      val hello = reader.read(MaxHello)
      handshake.check(hello)
      val link = new Link(connection, hello, reader)
      if (hello.text("version") != version) {
        link.send("REFUSED", s"this process has stagecrew ${hello.text("version")}, but $owner has $version: " +
          "use the same version on both sides")
        None
      } else if (strangers.synchronized(strangers.remove(number)).isEmpty) None // it was closed meanwhile
      else {
        link.send("WELCOME", welcome())
        Some(link)
      }
    } finally deadline.cancel(false)
  }

  /** Stops listening, closes every connection, and removes the address file. */
  def close(): Unit = {
    closed = true
    address.close()
    deadlines.shutdownNow()
    connections.forEach(_.close())
  }
}

object Channels {
  /** The maximum length of a frame of the handshake in bytes. */
  val MaxHello = 4096

  /** The maximum number of strangers. */
  val MaxStrangers = 64

  private val AcceptPauseMs = 50L // a failure, such as too many open files, may last
  private val numbers = new AtomicLong
}
