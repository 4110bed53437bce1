package org.apache.spark.stagecrew
package driver

import java.nio.file.Path
import java.util.concurrent.ConcurrentHashMap
import spark._, wire._

/**
 * The driver's side of coordination: frames of evaluations go from executors to the driver's Python and back. It knows
 * which executor is where, and nothing else: what an evaluation is, and whether it lives, Python knows.
 *
 * RPC threads never wait for Python (see `NonBlockingWriter`).
 */
final class Coordination(settings: Settings, folder: () => java.io.File) extends LinkHandler {
  private val peers = new ConcurrentHashMap[String, Peer]()
  @volatile private var channels: Channels = _
  /** By connection of Python. There is one, except while Python reconnects; the last one is written to. */
  private val outlets = new ConcurrentHashMap[Link, NonBlockingWriter]()
  @volatile private var python: NonBlockingWriter = _
  private var made: java.io.File = _

  /** The place file of the channel to the driver's Python, which is made at the first call. */
  def place: Path = synchronized {
    if (channels == null) {
      made = folder()
      channels = new Channels(made.toPath, settings, Shim.version, () => "{}", this)
    }
    channels.place
  }

  // -- From executors (RPC threads)

  private val endpoint = Rpc.endpoint(Coordination.EndpointName, new Handler {
    override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
      // Only the executor's name is read.
      from.foreach(peers.put(Frames.decodeMessage(message).text("executor"), _))
      if (python != null) python.put(message)
    }
  })

  def lost(executor: String, reason: String): Unit = {
    peers.remove(executor)
    if (python != null) python.put(Frames.encode("LOST", executor, reason))
  }

  // -- From Python (its link's thread)

  override def connected(link: Link): Unit = {
    outlets.keySet.forEach(disconnected(_))
    val outlet = new NonBlockingWriter(link.write)
    outlets.put(link, outlet)
    python = outlet
  }

  override def received(link: Link, frame: Frame): Unit = frame.kind match {
    case "READ" => Option(outlets.get(link)).foreach(_.wasRead(frame.long("messages")))
    case "TO" => Option(peers.get(frame.text("executor"))).foreach(_.send(frame.bytes("frames"))) // others are lost
    case other => throw new FrameException(s"the driver's Python does not send $other")
  }

  /** Tells executors, so that their tasks do not wait for coordinators. A second call does nothing. */
  override def disconnected(link: Link): Unit = Option(outlets.remove(link)).foreach { outlet =>
    outlet.close()
    peers.values.forEach(_.send(Frames.encode("LOST", "driver", "the way from coordinators to executors broke")))
  }

  def close(): Unit = synchronized {
    Log.contained("stopping the coordination's endpoint")(Rpc.stopEndpoint(endpoint))
    outlets.values.forEach(_.close())
    if (channels != null) {
      channels.close()
      SparkInternals.delete(made)
    }
  }
}

object Coordination {
  val EndpointName = "stagecrew-coordination"
}
