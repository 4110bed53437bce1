package org.apache.spark.stagecrew

import java.io.{EOFException, IOException}
import java.net.{InetAddress, InetSocketAddress, StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.ByteBuffer
import java.nio.channels.SocketChannel
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Path}
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec
import org.apache.spark.stagecrew.wire.{Frame, FrameReader, Frames, Json}

/** The content of an address file, as a client reads it. */
final case class ClientAddress(path: Option[String], port: Option[Int], token: String) {
  def connect(): SocketChannel = path match {
    case Some(socket) =>
      val channel = SocketChannel.open(StandardProtocolFamily.UNIX)
      channel.connect(UnixDomainSocketAddress.of(socket))
      channel
    case None => SocketChannel.open(new InetSocketAddress(InetAddress.getLoopbackAddress, port.get))
  }
}

object ClientAddress {
  def read(file: Path): ClientAddress = {
    val address = Json.parse(Files.readString(file))
    ClientAddress(Option(address.get("path")).map(_.asText), Option(address.get("port")).map(_.asInt),
      address.get("token").asText)
  }
}

/** A client of a channel, with each step of the handshake under the test's control. */
final class ChannelClient(address: ClientAddress) {
  val channel: SocketChannel = address.connect()
  private val reader = new FrameReader(channel)
  private val nonce = Array.fill(32)(7.toByte)
  val connect: Array[Byte] = Frames.encode("CONNECT", nonce)

  def send(data: Array[Byte]): Unit = {
    val buffer = ByteBuffer.wrap(data)
    while (buffer.hasRemaining) channel.write(buffer)
  }

  def read(): Frame = reader.read(1 << 20)

  /** The reply to a challenge. A test can change the token, the version, and the role that the proof is for. */
  def hello(
      challenge: Frame, token: String = address.token, version: String = "1.0", provenRole: String = "worker",
      side: String = "client"): Array[Byte] = {
    val proof = ChannelClient.proof(
      token, nonce, challenge.bytes("nonce"), Seq(side, provenRole, "p1", "42", version))
    Frames.encode("HELLO", proof, "worker", "p1", 42L, version)
  }

  /** Sends CONNECT, and returns the challenge. */
  def challenged(): Frame = {
    send(connect)
    read()
  }

  /** Whether the server's challenge proves that it knows the token. */
  def isProved(challenge: Frame): Boolean = challenge.bytes("proof").toSeq ==
    ChannelClient.proof(address.token, nonce, challenge.bytes("nonce"), Seq("server")).toSeq

  /** The whole handshake. Returns the server's last frame. */
  def greet(): Frame = {
    send(hello(challenged()))
    read()
  }

  def served(attempt: Long): Boolean = {
    send(Frames.encode("BEGIN", attempt))
    read().text("topology") == attempt.toString
  }

  /** Reads up to the end of the stream, or until the connection breaks. */
  def refused(): Boolean = try { while (true) read(); false } catch { case _: EOFException | _: IOException => true }

  def endOutput(): Unit = { channel.shutdownOutput(); () }
  def close(): Unit = channel.close()
}

object ChannelClient {
  def proof(token: String, clientNonce: Array[Byte], serverNonce: Array[Byte], said: Seq[String]): Array[Byte] = {
    val mac = Mac.getInstance("HmacSHA256")
    mac.init(new SecretKeySpec(token.getBytes(UTF_8), "HmacSHA256"))
    mac.doFinal(said.mkString("\u0000").getBytes(UTF_8) ++ clientNonce ++ serverNonce)
  }
}
