package org.apache.spark.stagecrew

import java.io.IOException
import java.nio.file.{Files, Path}
import java.nio.file.attribute.{FileTime, PosixFilePermissions}
import org.apache.spark.SparkConf
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import org.apache.spark.stagecrew.spark.SparkInternals
import org.apache.spark.stagecrew.wire.ChannelAddress

/** Where a channel listens: beside its address file if possible, else in a short folder, else on a loopback port. */
class ChannelAddressSuite extends AnyFunSuite {
  private val Private = PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------"))

  /** A short temporary directory, and a folder in it whose path is too long for a socket. */
  private def withFolders(body: (Path, Path) => Any): Unit = {
    val temporary = Files.createTempDirectory(Path.of("/tmp"), "t", Private)
    val deep = Files.createDirectories(temporary.resolve("d" * 60).resolve("e" * 60), Private)
    try body(temporary, deep) finally SparkInternals.delete(temporary.toFile)
    ()
  }

  private def open(kind: String, folder: Path, temporary: Path*): ChannelAddress =
    ChannelAddress.open(kind, () => folder.toFile, temporary)

  private def short(temporary: Path): Seq[Path] =
    Files.list(temporary).iterator.asScala.filter(_.getFileName.toString.startsWith(ChannelAddress.Prefix)).toSeq

  private def kind(settings: (String, String)*): String =
    new Settings(settings.foldLeft(new SparkConf(false))((conf, setting) => conf.set(setting._1, setting._2))).channel

  test("a Unix socket is the default, except where Spark's own are switched off explicitly") {
    val unixInSpark = "spark.python.unix.domain.socket.enabled"
    assert(kind() == "auto" && kind(unixInSpark -> "true") == "auto" && kind(unixInSpark -> "false") == "tcp")
    assert(kind(unixInSpark -> "false", Settings.Channel -> "unix") == "unix")
    assert(kind(Settings.Channel -> "tcp") == "tcp")
    val wrong = intercept[IllegalArgumentException](kind(Settings.Channel -> "udp"))
    assert(wrong.getMessage == "spark.stagecrew.channel=udp: it must be auto, unix or tcp")
  }

  test("the socket is beside the address file if its path is short") {
    withFolders { (temporary, _) =>
      val folder = Files.createTempDirectory(temporary, "c", Private)
      val address = open("auto", folder)
      assert(address.folder == folder && address.field == ("path" -> folder.resolve("channel.sock").toString))
      address.close()
      assert(!Files.exists(folder))
    }
  }

  test("if the path is too long, socket and address file are in a private folder of the temporary directory") {
    withFolders { (temporary, deep) =>
      val address = open("auto", deep, temporary)
      assert(address.folder.getParent == temporary && address.field._1 == "path")
      assert(address.field._2.length <= ChannelAddress.MaxPath)
      assert(PosixFilePermissions.toString(Files.getPosixFilePermissions(address.folder)) == "rwx------")
      assert(!Files.exists(deep)) // it is not needed
      address.close()
      assert(short(temporary).isEmpty)
    }
  }

  test("without a folder that is short enough, the channel uses TCP, or refuses to if it must use a Unix socket") {
    withFolders { (_, deep) =>
      val address = open("auto", deep, deep, deep.resolve("missing"))
      assert(address.folder == deep && address.field._1 == "port")
      assert(short(deep).isEmpty)
      address.close()
    }
    withFolders { (_, deep) =>
      val refused = intercept[IOException](open("unix", deep, deep))
      assert(refused.getMessage.startsWith("spark.stagecrew.channel=unix: no Unix domain socket can be made here ("))
      assert(refused.getMessage.contains("longer than 100 bytes"))
      assert(!Files.exists(deep))
    }
  }

  test("the folders of killed processes are removed, and no others") {
    withFolders { (temporary, deep) =>
      def folder(name: String): Path = Files.createDirectory(temporary.resolve(ChannelAddress.Prefix + name), Private)
      def age(path: Path): Unit = { Files.setLastModifiedTime(path, FileTime.fromMillis(0)); () }
      val living = open("auto", deep, temporary)
      val (killed, listens) = (folder("killed"), folder("not yet listening"))
      Seq(killed, listens).foreach { one =>
        val server = java.nio.channels.ServerSocketChannel.open(java.net.StandardProtocolFamily.UNIX)
        server.bind(java.net.UnixDomainSocketAddress.of(one.resolve("channel.sock")))
        server.close() // the file of the socket stays; a process that has bound it, but does not listen yet, looks alike
      }
      Files.writeString(killed.resolve("channel.json"), "{}")
      val (starting, neverStarted) = (folder("starting"), folder("never"))
      val target = Files.createDirectory(temporary.resolve("target"), Private)
      val link = Files.createSymbolicLink(temporary.resolve(ChannelAddress.Prefix + "link"), target)
      val shared = folder("shared")
      Files.setPosixFilePermissions(shared, PosixFilePermissions.fromString("rwxrwxrwx"))
      val foreign = folder("foreign") // another program uses the same prefix
      Files.writeString(foreign.resolve("data"), "x")
      Seq(killed, neverStarted, target, shared, foreign).foreach(age)
      Files.createDirectories(deep)
      val next = open("auto", deep, temporary)
      assert(Seq(living.folder, starting, listens, target, link, shared, foreign).forall(Files.exists(_)))
      assert(!Files.exists(killed) && !Files.exists(neverStarted))
      next.close()
      living.close()
    }
  }

  test("a folder of another user is not removed, and a socket is not made in it") {
    assume(System.getProperty("user.name") == "root", "only root can make folders of other users")
    withFolders { (temporary, deep) =>
      val other = Files.createDirectory(temporary.resolve(ChannelAddress.Prefix + "other"), Private)
      Files.setLastModifiedTime(other, FileTime.fromMillis(0))
      Files.setOwner(other, other.getFileSystem.getUserPrincipalLookupService.lookupPrincipalByName("65534"))
      val address = open("auto", deep, temporary)
      assert(Files.exists(other) && address.folder != other)
      address.close()
    }
  }
}
