package org.apache.spark.stagecrew
package wire

import java.io.{File, IOException}
import java.net.{ConnectException, InetAddress, InetSocketAddress, StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.channels.{ServerSocketChannel, SocketChannel}
import java.nio.file.{Files, LinkOption, Path}
import java.nio.file.attribute.{PosixFileAttributes, PosixFilePermissions, UserPrincipal}
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.util.Using
import jdk.net.ExtendedSocketOptions.SO_PEERCRED
import spark._

/**
 * Where a channel listens, and the private folder that contains its address file.
 *
 * A Unix domain socket is in the same folder, which no other user can enter. Otherwise the channel listens on a
 * loopback port, to which every user of the host can connect.
 */
private[stagecrew] final class ChannelAddress(val server: ServerSocketChannel, val folder: Path, socket: Option[Path]) {
  val addressFile: Path = folder.resolve(ChannelAddress.FileName)

  /** The name and the value of the field of the address file that says where a client connects. */
  val field: (String, String) = socket match {
    case Some(path) => "path" -> path.toString
    case None => "port" -> server.getLocalAddress.asInstanceOf[InetSocketAddress].getPort.toString
  }

  /** Throws if a process of another user has connected. Only root may do that. The user of a TCP peer is unknown. */
  def checkPeer(connection: SocketChannel): Unit =
    if (socket.nonEmpty && connection.supportedOptions.contains(SO_PEERCRED)) {
      val user = connection.getOption(SO_PEERCRED).user
      if (user != Files.getOwner(folder) && user != ChannelAddress.root) throw new IOException(s"its user is $user")
    }

  def close(): Unit = {
    Log.contained("closing the address of a channel")(server.close())
    Log.contained(s"deleting $folder")(SparkInternals.delete(folder.toFile))
  }
}

private[stagecrew] object ChannelAddress {
  /** The longest path of a socket in bytes. Operating systems allow 104 to 108. */
  val MaxPath = 100
  /** The names of the folders in the temporary directory that are used when the path of a socket would be too long. */
  val Prefix = "stagecrew-channel-"
  private val SocketName = "channel.sock"
  private val FileName = "channel.json"
  private val Private = PosixFilePermissions.fromString("rwx------")
  private val StaleMs = 60000L // a younger folder may be that of a process that is starting

  private def root: UserPrincipal =
    Path.of("/").getFileSystem.getUserPrincipalLookupService.lookupPrincipalByName("0")

  /** Starts to listen. `kind` is a value of `spark.stagecrew.channel`, and `newFolder` makes a private folder. */
  def open(kind: String, newFolder: () => File, temporary: Seq[Path] = temporaryDirectories): ChannelAddress = {
    val folder = newFolder().toPath
    try {
      if (kind == "tcp") tcp(folder)
      else {
        val problems = mutable.ArrayBuffer.empty[String]
        unix(folder, problems).orElse(temporary.iterator.flatMap(inTemporary(_, folder, problems)).nextOption()) match {
          case Some(address) =>
            if (address.folder != folder) SparkInternals.delete(folder.toFile)
            address
          case None if kind == "unix" => throw new IOException(
            s"${Settings.Channel}=unix: no Unix domain socket can be made here (${problems.mkString("; ")})")
          case None =>
            Log.log.info(s"the channel uses TCP, because ${problems.mkString("; ")}")
            tcp(folder)
        }
      }
    } catch {
      case error: Throwable =>
        Log.contained(s"deleting $folder")(SparkInternals.delete(folder.toFile))
        throw error
    }
  }

  // "/tmp" is tried too, because resource managers set java.io.tmpdir to a folder with a long path.
  private def temporaryDirectories: Seq[Path] =
    Seq(System.getProperty("java.io.tmpdir"), "/tmp").distinct.map(Path.of(_))

  private def tcp(folder: Path): ChannelAddress = {
    val server = ServerSocketChannel.open(StandardProtocolFamily.INET) // even if Java prefers IPv6
    listen(server)(server.bind(new InetSocketAddress(InetAddress.getByName("127.0.0.1"), 0), Backlog))
    new ChannelAddress(server, folder, None)
  }

  private def unix(folder: Path, problems: mutable.Buffer[String]): Option[ChannelAddress] = {
    val socket = folder.resolve(SocketName)
    try {
      if (socket.toString.getBytes.length > MaxPath)
        throw new IOException(s"the path is longer than $MaxPath bytes")
      val server = ServerSocketChannel.open(StandardProtocolFamily.UNIX)
      listen(server)(server.bind(UnixDomainSocketAddress.of(socket), Backlog))
      Some(new ChannelAddress(server, folder, Some(socket)))
    } catch {
      case error @ (_: IOException | _: UnsupportedOperationException) =>
        problems += s"$socket: ${error.getMessage}"
        None
    }
  }

  private def listen(server: ServerSocketChannel)(bind: => Any): Unit =
    try { bind; () } catch { case error: Throwable => server.close(); throw error }

  private def inTemporary(parent: Path, like: Path, problems: mutable.Buffer[String]): Option[ChannelAddress] = try {
    removeStale(parent, Files.getOwner(like))
    val folder = Files.createTempDirectory(parent, Prefix, PosixFilePermissions.asFileAttribute(Private))
    if (!isPrivate(folder, Files.getOwner(like))) throw new IOException(s"$folder belongs to another user")
    unix(folder, problems).orElse {
      SparkInternals.delete(folder.toFile)
      None
    }
  } catch { case error: IOException => problems += s"$parent: ${error.getMessage}"; None }

  /** Removes folders of processes that were killed. A folder of another user is not even read. */
  private def removeStale(parent: Path, owner: UserPrincipal): Unit =
    Using.resource(Files.newDirectoryStream(parent, s"$Prefix*"))(_.asScala.toList).foreach { folder =>
      Log.contained(s"checking the old folder $folder") {
        val isOurs = isPrivate(folder, owner) && folder.toFile.list.forall(Set(SocketName, FileName))
        if (isOurs && isStale(folder)) SparkInternals.delete(folder.toFile)
      }
    }

  private def isPrivate(folder: Path, owner: UserPrincipal): Boolean = {
    val is = Files.readAttributes(folder, classOf[PosixFileAttributes], LinkOption.NOFOLLOW_LINKS)
    is.isDirectory && is.owner == owner && is.permissions == Private
  }

  private def isStale(folder: Path): Boolean = {
    val socket = folder.resolve(SocketName)
    Files.getLastModifiedTime(folder).toMillis < System.currentTimeMillis() - StaleMs && (!Files.exists(socket) ||
      Using.resource(SocketChannel.open(StandardProtocolFamily.UNIX)) { connection =>
        connection.configureBlocking(false) // a server that does not accept connections is alive
        try { connection.connect(UnixDomainSocketAddress.of(socket)); false } catch { case _: ConnectException => true }
      })
  }

  /** The longest queue of connections that are not accepted yet. Linux may limit it further. */
  private val Backlog = 1024
}
