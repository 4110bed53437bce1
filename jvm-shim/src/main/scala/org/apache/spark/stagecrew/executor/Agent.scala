package org.apache.spark.stagecrew
package executor

import java.nio.file.Path
import java.util.concurrent.{CompletableFuture, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkFiles
import spark._, wire._

/** The agent's reply for the listeners of one topology. Workers decode `body` and `values`: `values` are the pickled
  * values that the executor-scoped listeners returned from `open`. */
final case class Opened(
    listeners: Map[Int, Opened.Listener] = Map.empty, error: Option[String] = None, body: String = "",
    values: Vector[Array[Byte]] = Vector.empty)

object Opened {
  final case class Listener(index: Int, scope: String, lifetime: String, name: String)
  final case class Reply(listeners: Vector[Listener], error: Option[String])

  def of(frame: Frame): Opened = {
    val reply = Json.read[Reply](frame.text("body"))
    Opened(reply.listeners.map(it => it.index -> it).toMap, reply.error, frame.text("body"), frame.blobs("blobs"))
  }
}

/**
 * The executor's agent: a Python process that owns the executor-scoped listeners. It starts when the first of them must
 * open, and exits when its link is closed. It handles one request at a time.
 */
final class Agent(place: () => Path, settings: Settings, jar: String, log: String => Unit) {
  private val lock = new java.util.concurrent.locks.ReentrantLock()
  @volatile private var process: Option[Process] = None
  @volatile private var connecting = new CompletableFuture[Link]()
  @volatile private var link: Option[Link] = None
  @volatile private var pendingRequest = Option.empty[(String, CompletableFuture[Frame])]

  /** Opens the executor-scoped listeners of a topology. Throws if the agent cannot be started, or is lost before it
    * replies. */
  def open(description: Description)(addTopology: Link => Unit): Opened = {
    lock.lock()
    try request(description, addTopology) finally lock.unlock()
  }

  private def request(description: Description, addTopology: Link => Unit): Opened = {
    val agent = startIfNeeded(description)
    addTopology(agent)
    val reply = new CompletableFuture[Frame]()
    // The agent and the executor limit the time of each hook. This timeout is for an agent that does not respond.
    val timeoutMs = StartMs + (settings.openTimeoutMs + settings.closeTimeoutMs + PythonLinks.HookGraceMs) *
      (description.listeners.size + 1)
    pendingRequest = Some(description.id -> reply)
    try {
      if (!link.contains(agent)) throw new IllegalStateException(s"the agent (process ${agent.pid}) has ended")
      agent.send("OPEN", description.id, description.body, description.blobs)
      Opened.of(reply.get(timeoutMs, TimeUnit.MILLISECONDS))
    } catch {
      case _: TimeoutException => // the agent hangs outside of hooks: in an import, or while it unpickles
        ProcessHandle.of(agent.pid).ifPresent(process => process.destroyForcibly())
        throw new IllegalStateException(
          s"the agent (process ${agent.pid}) did not reply within $timeoutMs ms and was ended")
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
    } finally pendingRequest = None
  }

  /** An agent has connected. If this class no longer waits for its process, the link is closed: the agent then closes
    * its open listeners and exits. */
  def connected(newLink: Link): Unit = if (process.exists(started => isOrDescends(newLink.pid, started.pid))) {
    link = Some(newLink)
    connecting.complete(newLink)
  } else newLink.close()

  def received(frame: Frame): Unit = pendingRequest.foreach { case (topology, reply) =>
    if (frame.text("topology") == topology) reply.complete(frame)
  }

  // The interpreter may be a script that starts the real one as its child.
  private def isOrDescends(pid: Long, ancestor: Long): Boolean = Iterator
    .iterate(ProcessHandle.of(pid))(_.flatMap(_.parent())).takeWhile(_.isPresent).exists(_.get.pid == ancestor)

  /** The agent's link is closed: a pending request fails with the reason. Returns whether the agent was lost, not
    * retired. */
  def disconnected(closed: Link, reason: Option[String]): Boolean = link.contains(closed) && {
    link = None
    pendingRequest.foreach(_._2.completeExceptionally(new IllegalStateException(
      reason.getOrElse(s"the agent (process ${closed.pid}) ended while it opened a listener"))))
    true
  }

  def current: Option[Link] = link

  /** Ends the agent if neither a topology nor a pending request needs it. */
  def retire(isNeeded: Link => Boolean): Unit = if (lock.tryLock()) {
    try link.filterNot(isNeeded).foreach { unneeded =>
      link = None // now, because the next request must start another agent
      unneeded.close()
    } finally lock.unlock()
  }

  /** Ends the agent, which closes its listeners. */
  def stop(): Unit = link.foreach(_.close())

  /** Waits until the process has exited, and kills it at the timeout. */
  def await(timeoutMs: Long): Unit = process.foreach { running =>
    if (!running.waitFor(math.max(1, timeoutMs), TimeUnit.MILLISECONDS)) running.destroyForcibly()
  }

  private val StartMs = 60000L

  private def startIfNeeded(description: Description): Link = link.getOrElse {
    val connection = new CompletableFuture[Link]()
    connecting = connection
    val root = SparkFiles.getRootDirectory()
    val folders = root +: description.files.map(name => s"$root/$name")
    val command = Seq(description.executable, "-m", "stagecrew.worker.agent", place().toString) ++ folders
    val builder = new ProcessBuilder(command.asJava)
    val environment = builder.environment
    environment.putAll(description.environment.asJava)
    environment.put("PYTHONPATH", SparkInternals.pythonPath(
      jar, description.environment.getOrElse("PYTHONPATH", ""), sys.env.getOrElse("PYTHONPATH", "")))
    environment.put("PYTHONUNBUFFERED", "YES")
    builder.redirectInput(ProcessBuilder.Redirect.from(new java.io.File("/dev/null")))
    builder.redirectOutput(ProcessBuilder.Redirect.INHERIT)
    builder.redirectError(ProcessBuilder.Redirect.INHERIT)
    val started = builder.start()
    process = Some(started)
    log(s"started the agent, process ${started.pid}")
    started.onExit().thenAccept { ended =>
      connection.completeExceptionally(new IllegalStateException(
        s"the agent (${description.executable} -m stagecrew.worker.agent) ended with exit code ${ended.exitValue}; " +
          "see the executor's stderr for the cause"))
    }
    try connection.get(StartMs, TimeUnit.MILLISECONDS) catch {
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
      case _: TimeoutException =>
        started.destroyForcibly()
        throw new IllegalStateException(s"the agent (process ${started.pid}) did not connect within $StartMs ms")
    }
  }
}
