package org.apache.spark.stagecrew
package driver

import java.io.File
import java.nio.file.Path
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.atomic.AtomicReference
import spark._, wire._

/**
 * The driver's side of coordination: forwards the frames of evaluations from executors to the driver's Python, and from
 * Python to executors. Coordination knows only the RPC endpoint of each executor. The evaluations and their states are
 * known only to Python.
 *
 * RPC threads never wait for Python (see `LinkChannel`).
 */
final class Coordination(settings: Settings, folder: () => File) extends LinkHandler {
  private val peers = new ConcurrentHashMap[String, Peer]()
  /** The ANNOUNCE message of each executor. Python gets it again when it reconnects. */
  private val announcements = new ConcurrentHashMap[String, Array[Byte]]()
  @volatile private var channels: Channels = _
  /** The connection from Python, or null if Python is not connected. */
  private val python = new AtomicReference[Link]

  /** The address file of the channel to the driver's Python. The first call creates the channel. */
  def addressFile: Path = synchronized {
    if (channels == null) channels = new Channels(folder, settings, Shim.version, "the driver", () => "{}", this)
    channels.addressFile
  }

  // -- From executors (RPC threads)

  private val endpoint = Rpc.endpoint(Coordination.EndpointName, new Handler {
    override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
      if (from.isEmpty) Hops.allPassed("driver-receives", Frames.decodeMessage(message).bytes("frames"))
      // Only the executor's id is read. The whole message is forwarded.
      from.foreach { peer =>
        val executor = Frames.decodeMessage(message).text("executor")
        peers.put(executor, peer)
        announcements.put(executor, message)
      }
      Option(python.get).fold(if (from.isEmpty) notConnected(Frames.decodeMessage(message).text("executor")))(
        _.write(message))
      if (from.isEmpty) Hops.allPassed("driver-written", Frames.decodeMessage(message).bytes("frames"))
    }
  })

  def lost(executor: String, reason: String): Unit = {
    peers.remove(executor)
    announcements.remove(executor)
    Option(python.get).foreach(_.send("LOST", executor, reason))
  }

  // -- From Python (its link's thread)

  override def connected(link: Link): Unit = {
    Option(python.get).foreach { before => disconnected(before); before.close() }
    python.set(link)
    announcements.values.forEach(link.write(_))
  }

  override def received(link: Link, frame: Frame): Unit = frame.kind match {
    // An executor without a peer is lost.
    case "TO" =>
      Hops.allPassed("driver-reads", frame.bytes("frames"))
      Option(peers.get(frame.text("executor"))).foreach(_.send(frame.bytes("frames")))
      Hops.allPassed("driver-sent", frame.bytes("frames"))
    case other => throw new FrameException(s"the driver's Python does not send $other")
  }

  /** Notifies the executors, so that their tasks stop waiting for coordinators. A second call does nothing. */
  override def disconnected(link: Link): Unit =
    if (python.compareAndSet(link, null)) peers.keySet.forEach(notConnected(_))

  /** Ends the evaluations of an executor. It may have sent their first frames after the connection ended. */
  private def notConnected(executor: String): Unit = Option(peers.get(executor)).foreach(
    _.send(Frames.encode("LOST", "driver", "the driver lost its connection to the coordinators")))

  def close(): Unit = synchronized {
    Log.contained("stopping the endpoint of the coordination")(Rpc.stopEndpoint(endpoint))
    if (channels != null) channels.close()
  }
}

object Coordination {
  val EndpointName = "stagecrew-coordination"
}
