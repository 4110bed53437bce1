package org.apache.spark.stagecrew

import java.nio.file.Path
import java.util.concurrent.{CompletableFuture, TimeUnit, TimeoutException}
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkFiles

/** What the agent said of the listeners of one topology. */
final case class Opened(listeners: Map[Int, Opened.One], error: Option[String])

object Opened {
  /** `value`: the pickled copy of what an executor-scoped listener opened; `problem`: why there is none. */
  final case class One(name: String, scope: String, lifetime: String, value: Option[Array[Byte]], problem: Option[String])

  def of(frame: Frame): Opened = {
    val body = Json.parse(frame.text("body"))
    val blobs = frame.blobs("blobs")
    val listeners = Json.items(body.get("listeners")).map { entry =>
      def optional(name: String) = Option(entry.get(name)).filterNot(_.isNull)
      entry.get("index").asInt -> One(
        optional("name").map(_.asText).getOrElse(""), entry.get("scope").asText, entry.get("lifetime").asText,
        optional("value").map(at => blobs(at.asInt)), optional("problem").map(_.asText))
    }
    Opened(listeners.toMap, Option(body.get("error")).filterNot(_.isNull).map(_.asText))
  }
}

/**
 * The executor's agent: a Python process that owns its executor-scoped listeners, started when the first is to be opened.
 * It ends by itself when its link is gone. One request at a time.
 */
final class Agent(place: () => Path, settings: Settings, jar: String, log: String => Unit) {
  private val lock = new java.util.concurrent.locks.ReentrantLock()
  @volatile private var process: Option[Process] = None
  @volatile private var arrival = new CompletableFuture[Link]()
  @volatile private var link: Option[Link] = None
  @volatile private var answer = Option.empty[(String, CompletableFuture[Frame])]

  /** Opens what is the executor's among these listeners. Throws when the agent cannot be started, or is lost meanwhile. */
  def open(description: Description, lifetime: Option[String])(touched: Link => Unit): Opened = {
    lock.lock()
    try request(description, lifetime, touched) finally lock.unlock()
  }

  private def request(description: Description, lifetime: Option[String], touched: Link => Unit): Opened = {
    val agent = running(description.python)
    touched(agent)
    val reply = new CompletableFuture[Frame]()
    // Each hook is bounded by its process and by the executor; this bound is for an agent that says nothing at all.
    val bound = StartMs + (settings.openTimeoutMs + settings.closeTimeoutMs + ExecutorCrew.HookGraceMs) * (description.listeners.size + 1)
    answer = Some(description.id -> reply)
    try {
      if (!link.contains(agent)) throw new IllegalStateException(s"the agent (process ${agent.pid}) has ended")
      val (body, blobs) = description.encoded
      val request = Json.parse(body)
      lifetime.foreach(request.put("lifetime", _))
      agent.send("OPEN", description.id, Json.write(request), blobs)
      Opened.of(reply.get(bound, TimeUnit.MILLISECONDS))
    } catch {
      case _: TimeoutException => // it hangs where no hook's timeout counts: in an import, or while it unpickles
        ProcessHandle.of(agent.pid).ifPresent(process => { process.destroyForcibly(); () })
        throw new IllegalStateException(s"the agent (process ${agent.pid}) did not answer within $bound ms and was ended")
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
    } finally answer = None
  }

  /** An agent has connected. One that was given up meanwhile is sent away: it closes what it has open and ends. */
  def connected(arrived: Link): Unit =
    if (process.exists(started => isOrDescends(arrived.pid, started.pid))) {
      link = Some(arrived)
      arrival.complete(arrived)
      ()
    } else arrived.close()

  def received(frame: Frame): Unit = answer.foreach { case (topology, reply) =>
    if (frame.text("topology") == topology) reply.complete(frame)
  }

  // The interpreter may be a script that starts the real one as its child.
  private def isOrDescends(pid: Long, ancestor: Long): Boolean = Iterator
    .iterate(ProcessHandle.of(pid))(_.flatMap(_.parent()))
    .takeWhile(_.isPresent).exists(_.get.pid == ancestor)

  /** The agent is gone; whoever waits for it learns why. Answers whether it was lost, not retired. */
  def disconnected(gone: Link, why: Option[String]): Boolean = link.contains(gone) && {
    link = None
    answer.foreach(_._2.completeExceptionally(
      new IllegalStateException(why.getOrElse(s"the agent (process ${gone.pid}) ended while it opened a listener"))))
    true
  }

  def current: Option[Link] = link

  /** Ends the agent when nothing needs it. While a request runs, it is needed. */
  def retire(needed: Link => Boolean): Unit = if (lock.tryLock()) {
    try link.filterNot(needed).foreach { unneeded =>
      link = None // at once: the next request starts another
      unneeded.close()
    } finally lock.unlock()
  }

  /** Ends the agent; it closes what is open. */
  def stop(): Unit = link.foreach(_.close())

  /** Waits for the process to be gone, and ends it when it does not go. */
  def await(timeoutMs: Long): Unit = process.foreach { running =>
    if (!running.waitFor(math.max(1, timeoutMs), TimeUnit.MILLISECONDS)) running.destroyForcibly()
  }

  private val StartMs = 60000L

  private def running(python: PythonCommand): Link = link.getOrElse {
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
        s"the agent (${python.executable} -m stagecrew.worker.agent) ended with exit code ${ended.exitValue}; the executor's stderr " +
          "says why"))
      ()
    }
    try awaited.get(StartMs, TimeUnit.MILLISECONDS) catch {
      case failed: java.util.concurrent.ExecutionException => throw failed.getCause
      case _: TimeoutException =>
        started.destroyForcibly()
        throw new IllegalStateException(s"the agent (process ${started.pid}) did not connect within $StartMs ms")
    }
  }
}
