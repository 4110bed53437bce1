package org.apache.spark.stagecrew
package executor

import java.nio.file.Path
import java.util.concurrent.{CompletableFuture, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkFiles
import spark._, wire._

/** The agent's reply about the listeners of one topology. `body` and `values` are for workers, which decode them;
  * `values` are the pickled copies of what executor-scoped listeners opened. */
final case class Opened(
    listeners: Map[Int, Opened.One] = Map.empty, error: Option[String] = None, body: String = "",
    values: Vector[Array[Byte]] = Vector.empty)

object Opened {
  final case class One(index: Int, scope: String, lifetime: String, name: String)
  final case class Answer(listeners: Vector[One], error: Option[String])

  def of(frame: Frame): Opened = {
    val answer = Json.read[Answer](frame.text("body"))
    Opened(answer.listeners.map(one => one.index -> one).toMap, answer.error, frame.text("body"), frame.blobs("blobs"))
  }
}

/**
 * The executor's agent: a Python process that owns the executor-scoped listeners. It starts when the first of them must
 * open, and ends by itself when its link is gone. It handles one request at a time.
 */
final class Agent(place: () => Path, settings: Settings, jar: String, log: String => Unit) {
  private val lock = new java.util.concurrent.locks.ReentrantLock()
  @volatile private var process: Option[Process] = None
  @volatile private var arrival = new CompletableFuture[Link]()
  @volatile private var link: Option[Link] = None
  @volatile private var answer = Option.empty[(String, CompletableFuture[Frame])]

  /** Opens the executor-scoped listeners of a topology. Throws if the agent cannot be started, or is lost meanwhile. */
  def open(description: Description)(touched: Link => Unit): Opened = {
    lock.lock()
    try request(description, touched) finally lock.unlock()
  }

  private def request(description: Description, touched: Link => Unit): Opened = {
    val agent = running(description)
    touched(agent)
    val reply = new CompletableFuture[Frame]()
    // Its process and the executor bound each hook. This bound is for an agent that does not respond at all.
    val bound = StartMs + (settings.openTimeoutMs + settings.closeTimeoutMs + PythonLinks.HookGraceMs) *
      (description.listeners.size + 1)
    answer = Some(description.id -> reply)
    try {
      if (!link.contains(agent)) throw new IllegalStateException(s"the agent (process ${agent.pid}) has ended")
      agent.send("OPEN", description.id, description.body, description.blobs)
      Opened.of(reply.get(bound, TimeUnit.MILLISECONDS))
    } catch {
      case _: TimeoutException => // it hangs outside of hooks: in an import, or while it unpickles
        ProcessHandle.of(agent.pid).ifPresent(process => process.destroyForcibly())
        throw new IllegalStateException(
          s"the agent (process ${agent.pid}) did not reply within $bound ms and was ended")
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
    } finally answer = None
  }

  /** An agent has connected. An agent that was given up meanwhile is disconnected: it closes its open
    * listeners and ends. */
  def connected(arrived: Link): Unit = if (process.exists(started => isOrDescends(arrived.pid, started.pid))) {
    link = Some(arrived)
    arrival.complete(arrived)
  } else arrived.close()

  def received(frame: Frame): Unit = answer.foreach { case (topology, reply) =>
    if (frame.text("topology") == topology) reply.complete(frame)
  }

  // The interpreter may be a script that starts the real one as its child.
  private def isOrDescends(pid: Long, ancestor: Long): Boolean = Iterator
    .iterate(ProcessHandle.of(pid))(_.flatMap(_.parent()))
    .takeWhile(_.isPresent).exists(_.get.pid == ancestor)

  /** The agent is gone: the waiting request fails with the reason. Returns whether the agent was lost, not retired. */
  def disconnected(gone: Link, why: Option[String]): Boolean = link.contains(gone) && {
    link = None
    answer.foreach(_._2.completeExceptionally(
      new IllegalStateException(why.getOrElse(s"the agent (process ${gone.pid}) ended while it opened a listener"))))
    true
  }

  def current: Option[Link] = link

  /** Ends the agent if nothing needs it. A running request needs it. */
  def retire(needed: Link => Boolean): Unit = if (lock.tryLock()) {
    try link.filterNot(needed).foreach { unneeded =>
      link = None // at once: the next request starts another agent
      unneeded.close()
    } finally lock.unlock()
  }

  /** Ends the agent, which closes its listeners. */
  def stop(): Unit = link.foreach(_.close())

  /** Waits for the end of the process, and kills it at the timeout. */
  def await(timeoutMs: Long): Unit = process.foreach { running =>
    if (!running.waitFor(math.max(1, timeoutMs), TimeUnit.MILLISECONDS)) running.destroyForcibly()
  }

  private val StartMs = 60000L

  private def running(python: Description): Link = link.getOrElse {
    val awaited = new CompletableFuture[Link]()
    arrival = awaited
    val root = SparkFiles.getRootDirectory()
    val folders = root +: python.files.map(name => s"$root/$name")
    val command = Seq(python.executable, "-m", "stagecrew.worker.agent", place().toString) ++ folders
    val builder = new ProcessBuilder(command.asJava)
    val environment = builder.environment
    environment.putAll(python.environment.asJava)
    environment.put("PYTHONPATH", SparkInternals.pythonPath(
      jar, python.environment.getOrElse("PYTHONPATH", ""), sys.env.getOrElse("PYTHONPATH", "")))
    environment.put("PYTHONUNBUFFERED", "YES")
    builder.redirectInput(ProcessBuilder.Redirect.from(new java.io.File("/dev/null")))
    builder.redirectOutput(ProcessBuilder.Redirect.INHERIT)
    builder.redirectError(ProcessBuilder.Redirect.INHERIT)
    val started = builder.start()
    process = Some(started)
    log(s"started the agent, process ${started.pid}")
    started.onExit().thenAccept { ended =>
      awaited.completeExceptionally(new IllegalStateException(
        s"the agent (${python.executable} -m stagecrew.worker.agent) ended with exit code ${ended.exitValue}; the " +
          "executor's stderr says why"))
    }
    try awaited.get(StartMs, TimeUnit.MILLISECONDS) catch {
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
      case _: TimeoutException =>
        started.destroyForcibly()
        throw new IllegalStateException(s"the agent (process ${started.pid}) did not connect within $StartMs ms")
    }
  }
}
