package org.apache.spark.stagecrew

import java.nio.file.Path
import java.util.concurrent._
import java.util.concurrent.atomic.AtomicBoolean
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal
import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import org.apache.spark.util.{TaskCompletionListener, TaskFailureListener, TaskInterruptListener}

/**
 * One executor's part: books attempts, opens and closes listeners, and obeys the driver.
 *
 * Task threads book attempts and wait for opens; links have a thread each; `loop` is the one thread that closes. RPC threads
 * only hand over. Everything is made at first use, so that an executor without listeners has none of it.
 */
final class ExecutorCrew(conf: SparkConf, executor: String, version: String, jar: String) extends Handler with LinkHandler {
  import ExecutorCrew._

  val settings = new Settings(conf)
  private val table = new TopologyTable
  val ledger = new Ledger
  private val descriptions = new ConcurrentHashMap[String, CompletableFuture[Option[Description]]]()
  private val executions = new ConcurrentHashMap[String, String]()
  private val sides = new ConcurrentHashMap[String, CompletableFuture[Side]]()
  private val problems = new ConcurrentHashMap[Long, String]() // attempt -> why its worker was ended
  private val interrupted = ConcurrentHashMap.newKeySet[Long]() // attempts that Spark asked to end
  private val failures = new ConcurrentHashMap[String, Integer]() // topology -> failed opens in a row, for the back-off
  private val processes = new Processes(ledger, nameOf, () => System.nanoTime())
  private val ending = new AtomicBoolean(false)

  private val loop = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-executor"))
  private val pool = Executors.newCachedThreadPool(daemon("stagecrew-hook"))
  private val self: Peer = SparkInternals.endpoint(s"stagecrew-$executor", this)
  private lazy val driver: Peer = SparkInternals.driver(DriverCrew.EndpointName)
  private lazy val host: String = Option(SparkEnv.get).flatMap(env => Option(env.blockManager.blockManagerId)).map(_.host).getOrElse("")
  private lazy val application: String = SparkEnv.get.conf.getAppId
  private lazy val configuration: Map[String, String] = {
    val secret = SparkInternals.redactionPattern(conf)
    SparkEnv.get.conf.getAll.toMap.filter { case (key, _) => secret.findFirstIn(key).isEmpty }
  }

  private val lock = new Object
  @volatile private var server = Option.empty[(Channels, java.io.File)]
  private val agent = new Agent(() => place, settings, jar, text => Log.log.info(s"executor $executor $text"))
  private val closings = scala.collection.mutable.LinkedHashMap.empty[String, Closing] // of the loop's thread

  loop.scheduleWithFixedDelay(() => Log.contained("a report to the driver")(report()), settings.reportIntervalMs,
    settings.reportIntervalMs, TimeUnit.MILLISECONDS)

  // -- A task begins (its own thread, TaskContext set)

  def taskStarted(task: TaskContext): Unit = {
    val topology = task.getLocalProperty(TopologyProperty)
    val wanted = try chain(task, topology) catch {
      case NonFatal(error) => return refuse(task, Description.Application, "", error)
    }
    val attempt = task.taskAttemptId()
    val booked = table.begin(attempt, wanted.map(_.id))
    val described = wanted.filter(description => booked.contains(description.id))
    val withListeners = described.exists(_.listeners.nonEmpty)
    var decorations = List.empty[(JvmListeners, List[(Entry, AutoCloseable)])]
    task.addTaskCompletionListener(new TaskCompletionListener {
      override def onTaskCompletion(context: TaskContext): Unit = {
        decorations.foreach { case (listeners, scopes) => listeners.leave(scopes) }
        problems.remove(attempt)
        if (interrupted.contains(attempt)) schedule(RememberMs)(interrupted.remove(attempt))
        if (table.finish(attempt).nonEmpty) inLoop(progress())
        if (processes.running(attempt).nonEmpty) endIfCut(attempt)
      }
    })
    val properties = SparkInternals.localProperties(task)
    if (!withListeners) {
      if (properties.containsKey(ChainProperty)) properties.remove(ChainProperty)
    } else try {
      if ("true" == task.getLocalProperty(UnifiedProperty)) throw new UnsupportedOperationException(UnifiedMessage)
      described.foreach { description =>
        try {
          val side = opened(description)
          side.jvm.foreach(listeners => decorations = (listeners -> listeners.decorate(task)) :: decorations)
        } catch { case NonFatal(error) => throw new SideFailed(description, error) }
      }
      if (described.exists(_.listeners.exists(_.python))) {
        properties.setProperty(ChainProperty, booked.mkString(" "))
        properties.setProperty(PlaceProperty, place.toString)
        watch(task, attempt)
      } else properties.remove(ChainProperty)
    } catch {
      case failed: SideFailed => refuse(task, failed.description.id, failed.listener, failed.getCause)
      case NonFatal(error) => refuse(task, Description.Application, "", error)
    }
  }

  /** The topologies of a task, outermost first: the application's, its execution's, the named ones. */
  private def chain(task: TaskContext, topology: String): Seq[Description] = {
    val application = describe(Description.Application).getOrElse(
      throw new IllegalStateException("the driver's plugin has ended"))
    val execution =
      if (!forExecutions(application)) None
      else executionOf(task).flatMap(id => describe(id))
    val named = if (topology == null) Nil else ancestors(topology, Nil)
    application +: (execution.toSeq ++ named)
  }

  private def ancestors(id: String, inner: List[Description]): List[Description] = describe(id) match {
    case None => Nil // it has ended: the task runs under the application's topology
    case Some(description) => description.parent match {
      case None => description :: inner
      case Some(parent) => ancestors(parent, description :: inner)
    }
  }

  private def executionOf(task: TaskContext): Option[String] = {
    def asked(key: String): Option[String] = Option(executions.computeIfAbsent(key, _ => {
      val reply = Frames.decodeMessage(ask(Frames.encode("ASK_EXECUTION", executor, key)))
      reply.text("topology") match { case "" => null; case id => id }
    }))
    Option(task.getLocalProperty(QueryProperty)).map(id => asked(s"query:$id"))
      .orElse(Option(task.getLocalProperty(RootExecutionProperty)).map(id => Some(Description.ExecutionPrefix + "sql-" + id)))
      .getOrElse(asked(s"stage:${task.stageId()}"))
  }

  /** Asks the driver once; None for a topology that has ended. */
  private def describe(id: String): Option[Description] = {
    val before = descriptions.get(id)
    if (before != null && before.isDone && !before.isCompletedExceptionally) return before.get()
    if (!table.active(id)) return None
    val mine = new CompletableFuture[Option[Description]]()
    val first = descriptions.putIfAbsent(id, mine)
    if (first != null) first.get(settings.channelTimeoutMs + AskMs, TimeUnit.MILLISECONDS)
    else try {
      val reply = Frames.decodeMessage(ask(Frames.encode("ASK_DESCRIPTION", executor, host, id)))
      val found = if (reply.text("body").isEmpty) None else Some(Description.decode(reply.text("body"), reply.blobs("blobs")))
      mine.complete(found)
      if (found.isEmpty) table.end(id)
      found
    } catch {
      case error: Throwable =>
        descriptions.remove(id, mine)
        mine.completeExceptionally(error)
        throw error
    }
  }

  private def ask(bytes: Array[Byte]): Array[Byte] = driver.askSync(SparkInternals.withSender(self, bytes), AskMs)

  private def known(id: String): Option[Description] =
    Option(descriptions.get(id)).filter(_.isDone).flatMap(future => try future.get() catch { case NonFatal(_) => None })

  private def forExecutions(application: Description): Boolean = application.listeners.exists { entry =>
    entry.forExecution || (entry.kind == "name" && lifetimeOf(application, entry) == "execution")
  }

  private def lifetimeOf(application: Description, entry: Entry): String = entry.lifetime.getOrElse {
    // A name's lifetime is known when an executor has imported it; the application's side does that.
    opened(application).agent.listeners.get(entry.index).map(_.lifetime).getOrElse("application")
  }

  // -- What is opened once per executor: JVM listeners, and Python ones in the agent

  /** Opens the executor's side of a topology, or shares the outcome of whoever opens it now. */
  private def opened(description: Description): Side = {
    if (description.listeners.forall(entry => entry.kind == "pickle" && entry.scope.contains("worker"))) return NoSide
    val mine = new CompletableFuture[Side]()
    val first = sides.putIfAbsent(description.id, mine)
    val side = if (first != null) first else {
      // Not in the task's thread: a task that is killed meanwhile must not take the open of all others with it.
      pool.execute(() => {
        try {
          mine.complete(openSide(description))
          failures.remove(description.id)
        } catch {
          case error: Throwable =>
            sides.remove(description.id, mine)
            failures.merge(description.id, 1, (a, b) => a + b)
            mine.completeExceptionally(error)
        }
        ()
      })
      mine
    }
    try side.get() catch { case failed: ExecutionException => throw failed.getCause }
  }

  private def openSide(description: Description): Side = {
    val execution = description.id.startsWith(Description.ExecutionPrefix)
    val lifetime =
      if (execution) Some("execution") else if (description.id == Description.Application) Some("application") else None
    val where = Where(application, description.name, description.id, executor, host, configuration.asJava)
    val jvm = description.listeners.filter(_.kind == "jvm")
    val listeners = if (jvm.isEmpty) None else Some(new JvmListeners(jvm, where, settings, ledger, pool))
    listeners.foreach(_.open())
    try {
      val forAgent = description.listeners.exists(e => e.kind == "name" || (e.kind == "pickle" && e.scope.contains("executor")))
      val answer = if (!forAgent) Opened(Map.empty, None) else openInAgent(description, lifetime)
      new Side(listeners, answer)
    } catch {
      case error: Throwable =>
        listeners.foreach(_.close())
        throw error
    }
  }

  private def openInAgent(description: Description, lifetime: Option[String]): Opened = {
    val answer = agent.open(description, lifetime)(processes.touched(_, description.id))
    if (answer.error.nonEmpty || !answer.listeners.values.exists(one => one.scope == "executor" && lifetime.forall(_ == one.lifetime))) {
      agent.current.foreach(processes.closed(_, description.id))
      if (answer.error.isEmpty) agent.retire(processes.touchesAny) // after a failure the next attempt wants it again
    }
    answer.error.foreach(error => throw new AgentFailed(error))
    answer
  }

  /** A listener of the executor's side failed: the body of this attempt does not run, and the driver is told. */
  private def refuse(task: TaskContext, topology: String, listener: String, cause: Throwable): Unit = {
    val error = cause match {
      case said: AgentFailed => said.getMessage
      case failed: OpenFailedException => s"${failed.getMessage}\n${trace(failed.getCause)}"
      case other => trace(other)
    }
    val name = known(topology).map(_.name).getOrElse(topology)
    val text = s"stagecrew: a listener of topology '$name' could not be opened on executor $executor:\n$error"
    SparkInternals.markInterrupted(task, text)
    Log.log.warn(s"attempt ${task.taskAttemptId()} of stage ${task.stageId()} does not run: $text")
    driver.send(SparkInternals.withSender(self, Frames.encode("OPEN_FAILED", executor, topology, listener,
      task.stageId().toLong, task.partitionId().toLong, task.taskAttemptId(), text)))
    // Spark does not count such attempts and would start 100 a second.
    val doublings = math.min(5, Option(failures.get(topology)).map(_.intValue).getOrElse(1) - 1).max(0)
    try Thread.sleep(math.min(BackOffMs << doublings, MaxBackOffMs)) catch {
      case _: InterruptedException => Thread.currentThread().interrupt()
    }
  }

  // -- A worker's task that fails or is killed

  private def watch(task: TaskContext, attempt: Long): Unit = {
    task.addTaskFailureListener(new TaskFailureListener {
      override def onTaskFailure(context: TaskContext, error: Throwable): Unit =
        Option(problems.remove(attempt)).foreach(text => error.addSuppressed(new HookTimeoutException(text)))
    })
    task.addTaskInterruptListener(new TaskInterruptListener {
      override def onTaskInterrupted(context: TaskContext, reason: String): Unit = {
        // First politely: Spark kills the worker after spark.python.task.killTimeout.
        interrupted.add(attempt)
        processes.running(attempt).foreach(terminate)
      }
    })
    ()
  }

  /** Spark has dropped an evaluation that still runs (cut short, or killed): it would go on until it writes. */
  private def endIfCut(attempt: Long): Unit = schedule(CutGraceMs)(processes.running(attempt).foreach(terminate))

  private def terminate(link: Link): Unit = ProcessHandle.of(link.pid).ifPresent(process => { process.destroy(); () })

  // -- Links: Python processes (their own threads)

  override def connected(link: Link): Unit = {
    processes.connected(link)
    if (link.role == "agent") agent.connected(link)
  }

  override def received(link: Link, frame: Frame): Unit = frame.kind match {
    case "BEGIN" =>
      val attempt = frame.long("attempt")
      processes.began(link, attempt)
      // While its worker was starting it may have been interrupted, or be over: cut short. A short task may also be over
      // before this thread hears of its begin; then its end is on the way.
      if (interrupted.contains(attempt)) terminate(link)
      else if (table.chainOf(attempt).isEmpty) endIfCut(attempt)
    case "END" =>
      processes.ended(link)
      if (closing) inLoop(progress())
    case "DESCRIBE" => describeTo(link, frame.text("topology"))
    case "HOOK" =>
      val timeoutMs = frame.long("timeout") + HookGraceMs
      processes.hookBegan(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"),
        System.nanoTime() + timeoutMs * 1000000L)
      schedule(timeoutMs + 10)(endOverdue())
    case "HOOK_DONE" =>
      val failed = frame.text("outcome") != "ok"
      processes.hookEnded(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"), failed,
        frame.long("micros"), frame.text("error"))
    case "OPENED" => agent.received(frame)
    case "CLOSED" =>
      processes.closed(link, frame.text("topology"))
      inLoop(progress())
    case "GOODBYE" => Log.log.debug(s"$link ended: ${frame.text("reason")}")
    case other => throw new FrameException(s"a process does not send $other")
  }

  override def disconnected(link: Link): Unit = {
    processes.disconnected(link)
    if (link.role == "agent") {
      // What it had open is gone: the next task opens it again.
      sides.forEach((topology, side) =>
        if (side.isDone && !side.isCompletedExceptionally && side.get().agent.listeners.values.exists(_.scope == "executor")) {
          sides.remove(topology, side)
          side.get().jvm.foreach(listeners => pool.execute(() => listeners.close()))
        })
      agent.disconnected(link, Option(agentProblem))
      agentProblem = null
    }
    inLoop(progress())
  }

  @volatile private var agentProblem: String = _
  @volatile private var closing = false

  private def describeTo(link: Link, topology: String): Unit = known(topology) match {
    case None => link.send("REFUSED", s"topology $topology is not known on executor $executor")
    case Some(description) =>
      processes.touched(link, topology)
      val (body, blobs) = description.encoded
      val node = Json.parse(body)
      val side = Option(sides.get(topology)).filter(_.isDone).map(_.get().agent.listeners).getOrElse(Map.empty)
      val execution = topology.startsWith(Description.ExecutionPrefix)
      val entries = node.putArray("listeners")
      var all = blobs
      Json.items(Json.parse(body).get("listeners")).foreach { entry =>
        val said = side.get(entry.get("index").asInt)
        val lifetime = said.map(_.lifetime).orElse(Option(entry.get("lifetime")).map(_.asText)).getOrElse("application")
        val here = topology != Description.Application && !execution || (lifetime == "execution") == execution
        if (entry.get("kind").asText != "jvm" && here) {
          said.foreach { one =>
            one.value.foreach { value =>
              entry.put("value", all.size)
              all = all :+ value
            }
            one.problem.foreach(entry.put("problem", _))
          }
          entries.add(entry)
        }
      }
      link.send("DESCRIPTION", topology, Json.write(node), all)
  }

  private def nameOf(topology: String, index: Int): (String, String) =
    known(topology).flatMap(_.listeners.find(_.index == index)).map { entry =>
      val said = Option(sides.get(topology)).filter(s => s.isDone && !s.isCompletedExceptionally)
        .flatMap(_.get().agent.listeners.get(index))
      (entry.name, entry.scope.orElse(said.map(_.scope)).getOrElse("worker"))
    }.getOrElse((s"listener $index", "worker"))

  /** Ends processes whose hook ignores its timeout; the error names listener and executor. */
  private def endOverdue(): Unit = processes.overdue().foreach { case (link, hook, attempt) =>
    val (name, _) = nameOf(hook.topology, hook.index)
    val limit = if (hook.name == "open") settings.openTimeoutMs else settings.closeTimeoutMs
    val topology = known(hook.topology).map(_.name).getOrElse(hook.topology)
    val text = s"${hook.name} of listener '$name' (topology '$topology', executor $executor, host $host) took longer than " +
      s"$limit ms and ignored its interruption; process ${link.pid} was ended"
    Log.log.warn(text)
    attempt.foreach(problems.put(_, text))
    if (link.role == "agent") agentProblem = text
    ProcessHandle.of(link.pid).ifPresent(process => { process.destroyForcibly(); () })
  }

  private def place: Path = lock.synchronized {
    if (server.isEmpty) {
      val folder = SparkInternals.temporaryFolder(conf)
      server = Some(new Channels(folder.toPath, settings, version, () => welcome, this) -> folder)
    }
    server.get._1.place
  }

  private def welcome: String = {
    val node = Json.obj().put("application", application).put("executor", executor).put("host", host)
      .put("openTimeout", settings.openTimeoutMs / 1000.0).put("closeTimeout", settings.closeTimeoutMs / 1000.0)
    val entries = node.putObject("configuration")
    configuration.foreach { case (key, value) => entries.put(key, value) }
    Json.write(node)
  }

  // -- The driver's messages (RPC threads)

  override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
    val frame = Frames.decodeMessage(message)
    frame.kind match {
      case "END_TOPOLOGY" => inLoop(end(frame.text("topology"), frame.long("timeout"), Some(reply)))
      case other => reply.fail(new FrameException(s"the driver does not send $other"))
    }
  }

  // -- Closing (the loop's thread)

  private def end(topology: String, timeoutMs: Long, reply: Option[Reply]): Unit = {
    table.end(topology)
    val closing = closings.getOrElseUpdate(topology, new Closing(topology))
    reply.foreach(closing.replies ::= _)
    this.closing = true
    schedule(timeoutMs + ReportGraceMs)(closing.giveUp())
    progress()
  }

  private def progress(): Unit = {
    closings.values.toSeq.foreach(closing => Log.contained(s"closing topology ${closing.topology}")(closing.advance()))
    closing = closings.nonEmpty
  }

  /** One topology on its way to be closed here: attempts, then workers, then the agent, then JVM listeners. */
  private final class Closing(val topology: String) {
    var replies: List[Reply] = Nil
    private var asked = Set.empty[Link]
    private var jvm: Option[CompletableFuture[Void]] = None

    def advance(): Unit = {
      val workers = processes.touching(topology).filter(_._1.role == "worker")
      if (table.attemptsOf(topology).isEmpty) {
        workers.foreach { case (link, busy) =>
          askToClose(link)
          if (busy) processes.defer(link, topology)
        }
        if (workers.forall(_._2)) closeAgent()
      }
    }

    private def closeAgent(): Unit = processes.touching(topology).find(_._1.role == "agent") match {
      case Some((link, _)) => askToClose(link)
      case None => closeJvm()
    }

    private def closeJvm(): Unit = jvm match {
      case Some(future) => if (future.isDone) finish()
      case None =>
        val side = Option(sides.remove(topology)).filter(s => s.isDone && !s.isCompletedExceptionally).flatMap(_.get().jvm)
        val closed = CompletableFuture.runAsync(
          () => side.foreach(listeners => Log.contained(s"closing JVM listeners of $topology")(listeners.close())), pool)
        jvm = Some(closed)
        closed.whenComplete((_, _) => inLoop(progress())) // only now is it done, when the loop looks
        ()
    }

    private def askToClose(link: Link): Unit = if (!asked(link)) {
      asked += link
      link.send("CLOSE", topology)
    }

    private def finish(): Unit = {
      closings.remove(topology)
      table.forget(topology)
      failures.remove(topology)
      executions.values.remove(topology)
      if (replies.nonEmpty) answer(Nil)
      descriptions.remove(topology)
      toForget += topology
      agent.retire(processes.touchesAny)
      onceClosed.remove(topology).foreach(_.countDown())
    }

    /** The time is over: says who has not closed, and goes on. */
    def giveUp(): Unit = if (closings.contains(topology) && replies.nonEmpty) {
      val attempts = table.attemptsOf(topology).toSeq.sorted.map(attempt => s"attempt $attempt on executor $executor still runs")
      val held = processes.touching(topology).collect { case (link, busy) if !busy =>
        val names = processes.unclosed(link, topology)
        s"${if (names.isEmpty) "" else names.mkString("listener ", ", ", " in ")}$link on executor $executor"
      }
      val late = jvm.filterNot(_.isDone).map(_ => s"JVM listeners on executor $executor")
      answer(attempts ++ (if (attempts.isEmpty) held ++ late else Nil))
    }

    private def answer(unclosed: Seq[String]): Unit = {
      val (sequence, counts) = ledger.full(topology)
      val body = Json.parse(counts)
      body.set[com.fasterxml.jackson.databind.JsonNode]("unclosed", Json.arr(unclosed))
      val bytes = Frames.encode("REPORT", executor, sequence, Json.write(body))
      replies.foreach(_.answer(bytes))
      replies = Nil
    }
  }

  private val onceClosed = scala.collection.concurrent.TrieMap.empty[String, CountDownLatch]

  private val toForget = scala.collection.mutable.LinkedHashSet.empty[String] // of the loop's thread

  private def report(): Unit = {
    // What is closed everywhere and reported is not remembered; deferred workers close later.
    toForget.filterInPlace(topology => processes.touching(topology).nonEmpty || !ledger.forget(topology))
    ledger.report().foreach { case (sequence, counts) =>
      driver.ask(SparkInternals.withSender(self, Frames.encode("REPORT", executor, sequence, counts)), AskMs) {
        case Right(_) => ()
        case Left(_) => ledger.notDelivered(counts)
      }
    }
  }

  // -- The end of the executor

  /** Closes everything that is open, and waits for it at most so long. A second call waits for the first. */
  def shutdown(timeoutMs: Long): Unit = if (ending.compareAndSet(false, true)) {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def left: Long = math.max(0L, (deadline - System.nanoTime()) / 1000000L)
    val ids = descriptions.keySet.asScala.toSeq
    val latches = ids.map { id =>
      val latch = new CountDownLatch(1)
      onceClosed(id) = latch
      id -> latch
    }
    val inner = latches.filterNot(_._1 == Description.Application)
    // Attempts are being killed, or will never end: their workers are asked to end, which closes what they have open.
    processes.busy.foreach(terminate)
    inner.foreach { case (id, _) => inLoop(end(id, left, None)) }
    inner.foreach(_._2.await(left, TimeUnit.MILLISECONDS))
    inLoop(end(Description.Application, left, None))
    latches.filter(_._1 == Description.Application).foreach(_._2.await(left, TimeUnit.MILLISECONDS))
    agent.stop()
    agent.await(left)
    loop.shutdownNow()
    pool.shutdown()
    server.foreach { case (channels, folder) =>
      channels.close()
      Log.contained(s"deleting $folder")(SparkInternals.delete(folder))
    }
    Log.contained("stopping the endpoint")(SparkInternals.stopEndpoint(self))
  }

  private def inLoop(f: => Unit): Unit =
    try loop.execute(() => Log.contained("the executor's loop")(f)) catch { case _: RejectedExecutionException => () }

  private def schedule(ms: Long)(f: => Unit): Unit =
    try { loop.schedule((() => Log.contained("the executor's loop")(f)): Runnable, ms, TimeUnit.MILLISECONDS); () }
    catch { case _: RejectedExecutionException => () }
}

object ExecutorCrew {
  /** Set by Python in the thread that runs a topology; Spark copies it to all that is started there. */
  val TopologyProperty = "spark.stagecrew.topology"
  val ChainProperty = "spark.stagecrew.chain"
  val PlaceProperty = "spark.stagecrew.place"
  private val QueryProperty = "sql.streaming.queryId"
  private val RootExecutionProperty = "spark.sql.execution.root.id"
  private val UnifiedProperty = "spark.sql.execution.udf.unified.execution.enabled"

  val UnifiedMessage: String = s"$UnifiedProperty=true starts Python processes that bypass stagecrew; set it to false"

  /** How long after its timeout a hook has to heed the timer signal before its process is ended. */
  val HookGraceMs = 1000L

  /** A hook that heeds its timeout says so a moment later: then it is counted, and nobody is waited for. */
  private val ReportGraceMs = 300L

  /** How long after an attempt its worker has to say that it has ended. */
  private val CutGraceMs = 2000L

  /** How long an interrupted attempt is remembered after its end, for a worker that begins it late. */
  private val RememberMs = 60000L
  private val AskMs = 30000L
  private val BackOffMs = 100L
  private val MaxBackOffMs = 5000L

  /** What one topology has open once per executor. */
  private final class Side(val jvm: Option[JvmListeners], val agent: Opened)
  private val NoSide = new Side(None, Opened(Map.empty, None))

  private final class AgentFailed(text: String) extends Exception(text)
  private final class HookTimeoutException(text: String) extends Exception(text)
  private final class SideFailed(val description: Description, cause: Throwable) extends Exception(cause) {
    def listener: String = cause match { case failed: OpenFailedException => failed.listener; case _ => "" }
  }

  private def trace(error: Throwable): String = {
    val out = new java.io.StringWriter
    error.printStackTrace(new java.io.PrintWriter(out))
    out.toString
  }

  private[stagecrew] def daemon(name: String): ThreadFactory = body => {
    val thread = new Thread(body, name)
    thread.setDaemon(true)
    thread
  }
}
