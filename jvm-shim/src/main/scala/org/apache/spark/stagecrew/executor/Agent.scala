package org.apache.spark.stagecrew
package executor

import java.nio.file.Path
import java.util.concurrent.{CompletableFuture, ExecutionException, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkFiles
import spark._, wire._

/** The agent's reply for the listeners of one topology. Workers decode `body` and `values`: `values` are the pickled
  * values that `get()` returns for the executor-scoped listeners. */
final case class Opened(listeners: Vector[Opened.Listener] = Vector.empty, error: Option[String] = None)(
    val body: String = "", val values: Vector[Array[Byte]] = Vector.empty)

object Opened {
  final case class Listener(index: Int, scope: String, lifetime: String)

  def of(frame: Frame): Opened =
    Json.read[Opened](frame.text("body")).copy()(frame.text("body"), frame.blobs("blobs"))
}

/**
 * The executor's agent: a Python process that owns the executor-scoped listeners. It is started when the first of them
 * must open, and exits when its link is closed. It handles one request at a time.
 */
final class Agent(executor: String, addressFile: () => Path, settings: Settings) {
  private val lock = new java.util.concurrent.locks.ReentrantLock()
  @volatile private var process: Option[Process] = None
  @volatile private var connecting = new CompletableFuture[Link]()
  @volatile private var link: Option[Link] = None
  @volatile private var pendingRequest = Option.empty[(String, CompletableFuture[Frame])]

  /** Opens the executor-scoped listeners of a topology. `addTopology` is called with the agent's link before that.
    * Throws if the agent cannot be started, or is lost before it replies. */
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
      // At the timeout the agent hangs outside of hooks: in an import, or while it unpickles.
      Opened.of(await(reply, agent.pid, "reply", timeoutMs))
    } finally pendingRequest = None
  }

  /** An agent has connected. If its process is not the last one that was started, the link is closed: the agent then
    * closes its open listeners and exits. */
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

  /** The link to an agent is closed. A pending request fails with the reason. Returns true if the agent was lost, and
    * false if it was retired. */
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
      link = None // immediately, because the next request must start another agent
      unneeded.close()
    } finally lock.unlock()
  }

  /** Closes the agent's link. The agent then closes its listeners and exits. */
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
    val command = Seq(description.executable, "-m", "stagecrew.worker.agent", addressFile().toString) ++ folders
    val builder = new ProcessBuilder(command.asJava)
    val environment = builder.environment
    environment.putAll(description.environment.asJava)
    environment.put("PYTHONPATH", SparkInternals.pythonPath(
      Shim.jar, description.environment.getOrElse("PYTHONPATH", ""), sys.env.getOrElse("PYTHONPATH", "")))
    environment.put("PYTHONUNBUFFERED", "YES")
    builder.redirectInput(ProcessBuilder.Redirect.from(new java.io.File("/dev/null")))
    builder.redirectOutput(ProcessBuilder.Redirect.INHERIT)
    builder.redirectError(ProcessBuilder.Redirect.INHERIT)
    val started = builder.start()
    process = Some(started)
    Log.log.info(s"executor $executor started the agent, process ${started.pid}")
    started.onExit().thenAccept { ended =>
      connection.completeExceptionally(new IllegalStateException(
        s"the agent (${description.executable} -m stagecrew.worker.agent) ended with exit code ${ended.exitValue}; " +
          "see the executor's stderr for the cause"))
    }
    await(connection, started.pid, "connect", StartMs)
  }

  /** Waits for an action of the agent. At the timeout, kills its process. */
  private def await[T](outcome: CompletableFuture[T], pid: Long, action: String, timeoutMs: Long): T =
    try outcome.get(timeoutMs, TimeUnit.MILLISECONDS) catch {
      case failed: ExecutionException => throw failed.getCause
      case _: TimeoutException =>
        ProcessHandle.of(pid).ifPresent(process => process.destroyForcibly())
        throw new IllegalStateException(s"the agent (process $pid) did not $action within $timeoutMs ms and was killed")
    }
}
