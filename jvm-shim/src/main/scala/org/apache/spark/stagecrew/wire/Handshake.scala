package org.apache.spark.stagecrew
package wire

import java.nio.charset.StandardCharsets.UTF_8
import java.security.{MessageDigest, SecureRandom}
import javax.crypto.Mac
import javax.crypto.spec.SecretKeySpec

/** The server's part of the handshake for one connection: both sides prove that they know the token, and neither sends
  * it. `handshake.py` has the client's part, and describes both. Pure, except for the server's random nonce. */
final class Handshake(token: String, connect: Frame) {
  import Handshake._

  if (connect.kind != "CONNECT") throw new FrameException(s"the first frame is ${connect.kind}, not CONNECT")
  private val clientNonce = connect.bytes("nonce")
  if (clientNonce.length != NonceBytes) throw new FrameException("the nonce has a wrong length")
  private val serverNonce = random(NonceBytes)

  /** The frame that proves to the client that this is the server. */
  val challenge: Array[Byte] = Frames.encode("CHALLENGE", serverNonce, proof("server"))

  /** Throws unless the client has proved that it knows the token. */
  def check(hello: Frame): Unit = {
    if (hello.kind != "HELLO") throw new FrameException(s"the second frame is ${hello.kind}, not HELLO")
    val said = Seq(hello.text("role"), hello.text("process"), hello.long("pid").toString, hello.text("version"))
    if (!MessageDigest.isEqual(hello.bytes("proof"), proof("client", said: _*))) throw new FrameException("wrong token")
  }

  private def proof(side: String, said: String*): Array[Byte] = {
    val mac = Mac.getInstance("HmacSHA256")
    mac.init(new SecretKeySpec(token.getBytes(UTF_8), "HmacSHA256"))
    mac.update((side +: said).mkString("\u0000").getBytes(UTF_8))
    mac.update(clientNonce)
    mac.doFinal(serverNonce)
  }
}

object Handshake {
  val NonceBytes = 32
  private lazy val source = new SecureRandom()

  def random(size: Int): Array[Byte] = {
    val bytes = new Array[Byte](size)
    source.nextBytes(bytes)
    bytes
  }
}
