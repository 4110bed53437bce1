package org.apache.spark.stagecrew

import java.nio.file.Path
import java.util.concurrent.ConcurrentHashMap

/**
 * The driver's side of coordination: frames of evaluations go from executors to the driver's Python and back. It knows which
 * executor is where, and nothing else: what an evaluation is, and whether it lives, Python knows.
 *
 * RPC threads never wait for Python: they write as much as certainly fits its socket, and enqueue the rest for a thread that
 * may wait. What waits there is bounded by what evaluations may have unhandled (their window).
 */
final class Coordination(settings: Settings, folder: () => java.io.File) extends LinkHandler {
  private val peers = new ConcurrentHashMap[String, Peer]()
  @volatile private var channels: Channels = _
  @volatile private var python: Outlet = _
  private var made: java.io.File = _

  /** Where driver Python finds its channel; made at the first call. */
  def place: Path = synchronized {
    if (channels == null) {
      made = folder()
      channels = new Channels(made.toPath, settings, Shim.version, () => "{}", this)
    }
    channels.place
  }

  // -- From executors (RPC threads)

  private val endpoint = SparkInternals.endpoint(Coordination.EndpointName, new Handler {
    override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
      // Only the executor's name is read here.
      from.foreach(peers.put(Frames.decodeMessage(message).text("executor"), _))
      if (python != null) python.put(message)
    }
  })

  def lost(executor: String, reason: String): Unit = {
    peers.remove(executor)
    if (python != null) python.put(Frames.encode("LOST", executor, reason))
  }

  // -- From Python (its link's thread)

  override def connected(link: Link): Unit = python = new Outlet(link)

  override def received(link: Link, frame: Frame): Unit = frame.kind match {
    case "READ" => python.wasRead(frame.long("messages"))
    case "TO" => Option(peers.get(frame.text("executor"))).foreach(_.send(frame.bytes("frames"))) // one that is lost was told of
    case other => throw new FrameException(s"the driver's Python does not send $other")
  }

  override def disconnected(link: Link): Unit = if (python != null) python.close()

  def close(): Unit = synchronized {
    Log.contained("stopping the coordination's endpoint")(SparkInternals.stopEndpoint(endpoint))
    if (python != null) python.close()
    if (channels != null) {
      channels.close()
      SparkInternals.delete(made)
    }
  }

  /**
   * Writes to Python: at once while little of what was written is unread, so that it cannot have to wait (the sockets'
   * buffers have room), else on a thread of its own, as much as there is at once. RPC threads put.
   */
  private final class Outlet(link: Link) {
    private val waiting = new java.util.ArrayDeque[Array[Byte]]()
    private val unread = new java.util.ArrayDeque[Integer]()
    private var written = 0L
    private var unreadBytes = 0
    private var draining = false
    private var open = true
    private val thread = ExecutorCrew.daemon("stagecrew-coordination").newThread(() => run())
    thread.start()

    def put(bytes: Array[Byte]): Unit = synchronized {
      if (!draining && unread.size < Coordination.AtOnce && unreadBytes + bytes.length <= Coordination.AtOnceBytes) {
        note(bytes)
        link.write(bytes)
      } else {
        draining = true
        waiting.add(bytes)
        notifyAll()
      }
    }

    /** Python has read so many messages since its connection began. */
    def wasRead(messages: Long): Unit = synchronized {
      while (unread.size > written - messages) unreadBytes -= unread.poll()
    }

    def close(): Unit = synchronized {
      open = false
      notifyAll()
    }

    private def note(bytes: Array[Byte]): Unit = {
      written += 1
      unread.add(bytes.length)
      unreadBytes += bytes.length
    }

    private def run(): Unit = {
      var batch = next()
      while (batch != null) {
        link.write(batch) // not while holding the lock: it waits while Python does not read
        batch = next()
      }
    }

    private def next(): Array[Byte] = synchronized {
      while (open && waiting.isEmpty) {
        draining = false
        wait()
      }
      if (!open) null
      else {
        val some = new java.io.ByteArrayOutputStream
        while (!waiting.isEmpty && some.size < Coordination.BatchBytes) {
          note(waiting.peek())
          some.write(waiting.poll())
        }
        some.toByteArray
      }
    }
  }
}

object Coordination {
  val EndpointName = "stagecrew-coordination"

  /** What may be unread when an RPC thread itself writes: well below what the buffers of a loopback socket hold. */
  private val AtOnce = 32
  private val AtOnceBytes = 1 << 15
  private val BatchBytes = 1 << 18
}
