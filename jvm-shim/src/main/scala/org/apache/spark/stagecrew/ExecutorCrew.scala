package org.apache.spark.stagecrew

import java.nio.file.Path
import java.util.concurrent._
import java.util.concurrent.atomic.AtomicBoolean
import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.ObjectNode
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal
import org.apache.spark.{SparkConf, SparkEnv, TaskContext}
import org.apache.spark.util.{TaskCompletionListener, TaskFailureListener, TaskInterruptListener}

/**
 * One executor's part: books attempts, has listeners opened and closed, and obeys the driver.
 *
 * Task threads book attempts and wait for opens; links have a thread each; `loop` is the one thread that closes. RPC threads
 * only hand over. Everything is made at first use, so that an executor without listeners has none of it.
 */
final class ExecutorCrew(conf: SparkConf, executor: String, version: String, jar: String, timelines: Boolean) extends Handler with LinkHandler with Loop {
  import ExecutorCrew._

  val settings = new Settings(conf)
  val ledger = new Ledger(timelines = timelines)
  private val table = new TopologyTable
  private val problems = new ConcurrentHashMap[Long, String]() // attempt -> why its worker was ended
  private val interrupted = ConcurrentHashMap.newKeySet[Long]() // attempts that Spark asked to end
  private val failures = new ConcurrentHashMap[Long, String]() // attempts that might talk, and failed -> why
  private val stages = new ConcurrentHashMap[Long, (Int, Int)]() // attempts that may talk -> the attempt at their stage, its partitions
  private val ending = new AtomicBoolean(false)
  private val ended = new CountDownLatch(1)

  private val loop = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-executor"))
  private val pool = Executors.newCachedThreadPool(daemon("stagecrew-hook"))
  private lazy val watchdog = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-watchdog"))
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
  private val descriptions = new Descriptions(executor, () => host, settings, table,
    bytes => driver.askSync(SparkInternals.withSender(self, bytes), AskMs))
  private val processes = new Processes(ledger, nameOf, () => System.nanoTime())
  private val agent = new Agent(() => place, settings, jar, text => Log.log.info(s"executor $executor $text"))
  private val sides = new ExecutorListeners(settings, ledger, processes, agent, pool,
    description => Where(application, description.name, description.id, executor, host, configuration.asJava))
  private val partitions = new Partitions(ownerOf, ledger, pool, new Partitions.Disk {
    override def delete(output: Output): Boolean = SparkInternals.deleteOutput(output)
    override def has(block: CachedBlock): Boolean = SparkInternals.hasBlock(block)
    override def outputsOf(shuffles: Set[Int]): Seq[Output] = SparkInternals.outputsOf(shuffles)
  })
  private val closings = new Closings(executor, table, processes, sides, pool, this)(release, closingReport, closed)
  private val migrates = SparkInternals.migrates(conf)
  private val strays = ConcurrentHashMap.newKeySet[Long]() // attempts with the mark of a topology that had ended
  private val releases = scala.collection.mutable.HashMap.empty[String, Map[Int, Long]] // of the loop's thread
  @volatile private var abandoned = false // the driver is gone
  private lazy val evaluations = Evaluations.on(executor, settings, new Evaluations.Attempts {
    override def runs(attempt: Long): Boolean = table.chainOf(attempt).nonEmpty
    override def failed(attempt: Long): Option[String] =
      if (interrupted.contains(attempt)) Some(Evaluations.Killed) else Option(failures.get(attempt))
    override def stageOf(attempt: Long): (Int, Int) = stages.getOrDefault(attempt, (0, 0))
  })
  @volatile private var coordinated = false // whether a bound function ever ran here
  private val toForget = scala.collection.mutable.LinkedHashSet.empty[String] // of the loop's thread

  private val sampling = if (settings.processesIntervalMs == 0) None else {
    val log = new SampleLog(executor, () => host)
    ledger.samples = Some(log)
    val sampler = new Sampler(log, () => agent.current.map(_.pid))
    val thread = Executors.newSingleThreadScheduledExecutor(daemon("stagecrew-samples"))
    thread.scheduleWithFixedDelay(() => Log.contained("a look at Python processes")(sampler.look()),
      math.min(FirstLookMs, settings.processesIntervalMs), settings.processesIntervalMs, TimeUnit.MILLISECONDS)
    Some(thread)
  }

  Partitions.serve(partitions)
  loop.scheduleWithFixedDelay(() => Log.contained("a report to the driver")(report()), settings.reportIntervalMs,
    settings.reportIntervalMs, TimeUnit.MILLISECONDS)

  // -- A task begins (its own thread, TaskContext set)

  /** Whatever fails here fails the attempt with its cause: Spark would swallow it, and run the body. */
  def taskStarted(task: TaskContext): Unit = try {
    val topology = task.getLocalProperty(TopologyProperty)
    if (topology != null || !nothingForAll) begin(task, topology)
  } catch {
    // Spark has asked the attempt to end: so its body does not run, and nothing is to be said of it.
    case error: Throwable if task.isInterrupted() => Log.log.debug(s"attempt ${task.taskAttemptId()} was ended while it began", error)
    case failed: SideFailed => listenerFailed(task, failed)
    case error: Throwable => refuse(task, error)
  }

  private def begin(task: TaskContext, topology: String): Unit = {
    val wanted = chain(task, topology)
    val attempt = task.taskAttemptId()
    val booked = table.begin(attempt, wanted.map(_.id))
    val began = System.nanoTime()
    if (topology != null && !booked.contains(topology)) strays.add(attempt)
    val described = wanted.filter(description => booked.contains(description.id))
    val withListeners = described.exists(_.listeners.nonEmpty)
    var decorations = List.empty[(JvmListeners, List[(Entry, AutoCloseable)])]
    var watched = false
    task.addTaskCompletionListener(new TaskCompletionListener {
      override def onTaskCompletion(context: TaskContext): Unit = {
        decorations.foreach { case (listeners, scopes) => listeners.leave(scopes) }
        if (topology != null) partitions.over(attempt, SparkInternals.updatedBlocks(context))
        strays.remove(attempt)
        val talked = stages.remove(attempt) != null
        val failed = if (context.isInterrupted()) Some(Evaluations.Killed) else if (context.isFailed()) Some(Evaluations.Failed) else None
        if (talked) failed.foreach(failures.put(attempt, _)) // before it is over: what its worker said may not have been read yet
        // Before it is over: then its topologies may be reported for the last time.
        booked.lastOption.foreach(ledger.span(_, "task", ExecutorCrew.nameOf(context), (System.nanoTime() - began) / 1000, failed.nonEmpty))
        val quiescent = table.finish(attempt)
        if (coordinated) evaluations.attemptOver(attempt, failed)
        if (quiescent.nonEmpty) closings.changed()
        if (interrupted.contains(attempt) || failures.containsKey(attempt)) schedule(RememberMs) {
          interrupted.remove(attempt)
          failures.remove(attempt)
        }
        if (watched) {
          problems.remove(attempt)
          if (processes.running(attempt).nonEmpty) endIfCut(attempt)
        }
      }
    })
    val properties = SparkInternals.localProperties(task)
    // A bound function finds its channel by it: which tasks call one, nobody knows before they do.
    val talks = (topology != null && booked.contains(topology)) || wanted.head.coordinated
    if (talks) {
      properties.setProperty(PlaceProperty, place.toString)
      stages.put(attempt, (task.stageAttemptNumber(), task.numPartitions()))
    }
    if (!withListeners) {
      if (properties.containsKey(ChainProperty)) properties.remove(ChainProperty)
    } else {
      if ("true" == task.getLocalProperty(UnifiedProperty)) throw new UnsupportedOperationException(UnifiedMessage)
      described.foreach { description =>
        try {
          val side = sides.opened(description)
          side.jvm.foreach(listeners => decorations = (listeners -> listeners.decorate(task)) :: decorations)
        } catch { case error: Throwable => throw new SideFailed(description, error) }
      }
      if (described.exists(_.listeners.exists(_.python))) {
        properties.setProperty(ChainProperty, booked.mkString(" "))
        properties.setProperty(PlaceProperty, place.toString)
        properties.setProperty(StageAttemptProperty, task.stageAttemptNumber().toString)
        watched = true
        watch(task, attempt)
      } else properties.remove(ChainProperty)
    }
    if (talks || watched) heedInterrupt(task, attempt)
  }

  /** Whether the application has neither listeners nor operators: a task of no topology then needs nothing of us. */
  private def nothingForAll: Boolean =
    descriptions.describe(Description.Application).exists(application => application.listeners.isEmpty && !application.coordinated)

  /** The topologies of a task, outermost first: the application's, its execution's, the named ones. */
  private def chain(task: TaskContext, topology: String): Seq[Description] = {
    val application = descriptions.describe(Description.Application).getOrElse(
      throw new IllegalStateException("the driver's plugin has ended"))
    val forExecutions = application.listeners.exists { entry =>
      entry.forExecution || (entry.kind == "name" && sides.lifetimeOf(application, entry) == "execution")
    }
    val execution = if (forExecutions) descriptions.execution(task) else None
    val named = if (topology == null) Nil else descriptions.named(topology)
    application +: (execution.toSeq ++ named)
  }

  private def listenerFailed(task: TaskContext, failed: SideFailed): Unit = {
    val error = failed.getCause match {
      case said: AgentFailed => said.getMessage
      case open: OpenFailedException => s"${open.getMessage}\n${TaskRejection.trace(open.getCause)}"
      case other => TaskRejection.trace(other)
    }
    refuse(task, failed.description.id, failed.listener,
      s"stagecrew: a listener of topology '${failed.description.name}' could not be opened on executor $executor:\n$error")
  }

  private def refuse(task: TaskContext, cause: Throwable): Unit = refuse(task, Description.Application, "",
    s"stagecrew: this task cannot begin on executor $executor: ${TaskRejection.trace(cause)}")

  /** The body of this attempt does not run, and the driver is told. */
  private def refuse(task: TaskContext, topology: String, listener: String, text: String): Unit =
    TaskRejection.refuse(task, executor, topology, listener, text, sides.failedInARow(topology)) { frame =>
      driver.send(SparkInternals.withSender(self, frame))
    }

  // -- A worker's task that fails or is killed

  private def watch(task: TaskContext, attempt: Long): Unit = {
    task.addTaskFailureListener(new TaskFailureListener {
      override def onTaskFailure(context: TaskContext, error: Throwable): Unit =
        Option(problems.remove(attempt)).foreach(text => error.addSuppressed(new HookTimeoutException(text)))
    })
    ()
  }

  /** Spark asks the attempt to end: its process does, politely (Spark kills it after spark.python.task.killTimeout), and who waits
    * for a coordinator in one that has no listeners. */
  private def heedInterrupt(task: TaskContext, attempt: Long): Unit = {
    task.addTaskInterruptListener(new TaskInterruptListener {
      override def onTaskInterrupted(context: TaskContext, reason: String): Unit = {
        interrupted.add(attempt)
        processes.running(attempt).foreach(terminate)
        if (coordinated) evaluations.interrupted(attempt)
      }
    })
    ()
  }

  /** Spark has dropped an evaluation that still runs (cut short, or killed): it would go on until it writes. Nobody else ends
    * its process then, as the task is over for Spark: first politely, and one that does not heed it for good. */
  private def endIfCut(attempt: Long): Unit = schedule(CutGraceMs) {
    val still = processes.running(attempt)
    still.foreach(terminate)
    if (still.nonEmpty) schedule(KillGraceMs) {
      processes.running(attempt).filter(still.contains).foreach { link =>
        Log.log.warn(s"$link still runs attempt $attempt, which is over, $KillGraceMs ms after it was asked to end: it is ended")
        kill(link)
      }
    }
  }

  private def terminate(link: Link): Unit = ProcessHandle.of(link.pid).ifPresent(process => { process.destroy(); () })

  private def kill(link: Link): Unit = ProcessHandle.of(link.pid).ifPresent(process => { process.destroyForcibly(); () })

  // -- Links: Python processes (their own threads)

  override def serve(link: Link, limit: Int): Unit =
    if (link.role == "evaluations") {
      coordinated = true
      evaluations.serve(link, limit)
    } else super.serve(link, limit)

  override def connected(link: Link): Unit = if (link.role != "evaluations") {
    processes.connected(link)
    if (link.role == "agent") agent.connected(link)
  }

  override def received(link: Link, frame: Frame): Unit = {
    took(link, frame)
    closings.changed()
  }

  private def took(link: Link, frame: Frame): Unit = frame.kind match {
    case "BEGIN" =>
      val attempt = frame.long("attempt")
      processes.began(link, attempt, table.chainOf(attempt).toSet)
      // While its worker was starting it may have been interrupted, or be over: cut short. A short task may also be over
      // before this thread hears of its begin; then its end is on the way.
      if (interrupted.contains(attempt)) terminate(link)
      else if (table.chainOf(attempt).isEmpty) endIfCut(attempt)
    case "END" => processes.ended(link)
    case "DESCRIBE" => describeTo(link, frame.text("topology"))
    case "HOOK" =>
      val timeoutMs = frame.long("timeout") + HookGraceMs
      processes.hookBegan(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"),
        System.nanoTime() + timeoutMs * 1000000L)
      // Not in the loop, which writes to links: a process that hangs must not keep itself from being ended.
      watchdog.schedule((() => Log.contained("ending overdue processes")(endOverdue())): Runnable, timeoutMs + 10, TimeUnit.MILLISECONDS)
      ()
    case "HOOK_DONE" =>
      val failed = frame.text("outcome") != "ok"
      processes.hookEnded(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"), failed,
        frame.long("micros"), frame.text("error"))
    case "OPENED" => agent.received(frame)
    case "CLOSED" => processes.closed(link, frame.text("topology"))
    case "GOODBYE" => Log.log.debug(s"$link ended: ${frame.text("reason")}")
    case other => throw new FrameException(s"a process does not send $other")
  }

  override def disconnected(link: Link): Unit = if (link.role == "evaluations") evaluations.gone(link) else {
    processes.disconnected(link)
    if (link.role == "agent") {
      if (agent.disconnected(link, Option(agentProblem))) {
        // Workers have copies of what it had opened: they close, and are described anew at their next task.
        val stale = sides.agentLost().toSet
        stale.foreach(topology => processes.touching(topology).foreach { case (worker, _) => worker.send("CLOSE", topology) })
      }
      agentProblem = null
    }
    closings.changed()
  }

  @volatile private var agentProblem: String = _

  private def describeTo(link: Link, topology: String): Unit = descriptions.known(topology) match {
    case None => link.send("REFUSED", s"topology $topology is not known on executor $executor")
    case Some(description) =>
      processes.touched(link, topology)
      val (body, blobs) = description.encoded
      val node = Json.parse(body)
      val side = sides.of(topology).map(_.agent.listeners).getOrElse(Map.empty)
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
    descriptions.known(topology).flatMap(_.listeners.find(_.index == index)).map { entry =>
      val said = sides.of(topology).flatMap(_.agent.listeners.get(index))
      (entry.name, entry.scope.orElse(said.map(_.scope)).getOrElse("worker"))
    }.getOrElse((s"listener $index", "worker"))

  /** Ends processes whose hook ignores its timeout; the error names listener and executor. */
  private def endOverdue(): Unit = processes.overdue().foreach { case (link, hook, attempt) =>
    val (name, _) = nameOf(hook.topology, hook.index)
    val limit = if (hook.name == "open") settings.openTimeoutMs else settings.closeTimeoutMs
    val topology = descriptions.known(hook.topology).map(_.name).getOrElse(hook.topology)
    val text = s"${hook.name} of listener '$name' (topology '$topology', executor $executor, host $host) took longer than " +
      s"$limit ms and ignored its interruption; process ${link.pid} was ended"
    Log.log.warn(text)
    attempt.filter(table.chainOf(_).nonEmpty).foreach(problems.put(_, text))
    if (link.role == "agent") agentProblem = text
    kill(link)
  }

  private def place: Path = lock.synchronized {
    if (server.isEmpty) {
      val folder = try SparkInternals.temporaryFolder(conf) catch {
        case Failure(error) => throw new java.io.IOException(s"executor $executor (host $host) cannot create a folder for the channel to its Python " +
          s"processes; check its local directories (spark.local.dir): ${TaskRejection.text(error)}", error)
      }
      val channels = try new Channels(folder.toPath, settings, version, () => welcome, this) catch {
        case error: Throwable => Log.contained(s"deleting $folder")(SparkInternals.delete(folder)); throw error
      }
      server = Some(channels -> folder)
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
      case "END_TOPOLOGY" =>
        descriptions.ended(frame.text("topology"))
        inLoop(end(frame.text("topology"), frame.long("timeout"), Json.parse(frame.text("body")), Some(reply)))
      case "UNPERSISTED" => inLoop {
          val topology = frame.text("topology")
          partitions.unpersisted(topology, Json.integers(Json.parse(frame.text("body")).get("caches")).toSet)
          val (sequence, counts) = ledger.full(topology)
          reply.answer(Frames.encode("REPORT", executor, sequence, counts))
        }
      case other => reply.fail(new FrameException(s"the driver does not send $other"))
    }
  }

  override def disconnected(address: String): Unit = if (address == SparkInternals.driverAddress(conf)) {
    abandoned = true
    Log.contained("deleting what topologies have stored")(partitions.abandon())
  }

  // -- The end of topologies (the loop's thread)

  private def end(topology: String, timeoutMs: Long, body: ObjectNode, reply: Option[Reply]): Unit = {
    partitions.end(topology, DriverPartitions.ending(body))
    if (migrates) releases(topology) = Json.integers(body.get("shuffles")).map(_ -> body.get("before").asLong).toMap
    closings.end(topology, timeoutMs, reply)
  }

  private def release(topology: String): CompletableFuture[Taken] = {
    val releasing = partitions.release(topology, releases.remove(topology).getOrElse(Map.empty))
    if (partitions.awaits(topology)) schedule(RememberMs)(partitions.unpersisted(topology, Set.empty)) // the driver may be gone
    releasing
  }

  /** The topology that a partition of this attempt belongs to: the innermost. What tasks of one that had ended write is the
    * application's until nobody uses the shuffle. */
  private def ownerOf(attempt: Long): Option[String] = table.chainOf(attempt).lastOption
    .filterNot(topology => topology == Description.Application || topology.startsWith(Description.ExecutionPrefix))
    .orElse(if (strays.contains(attempt)) Some(Description.Application) else None)

  // -- What the driver is told (the loop's thread)

  private def closingReport(topology: String, unclosed: Seq[String], taken: Option[Taken]): Array[Byte] = {
    partitions.tell(topology)
    val (sequence, counts) = ledger.full(topology)
    val body = Json.parse(counts)
    body.set[JsonNode]("unclosed", Json.arr(unclosed))
    taken.foreach { of =>
      body.set[JsonNode]("shuffles", Json.numbers(of.outputs.keySet.map(_.shuffle)))
      body.set[JsonNode]("caches", Json.numbers(of.caches))
    }
    Frames.encode("REPORT", executor, sequence, Json.write(body))
  }

  private def closed(topology: String): Unit = {
    descriptions.forget(topology)
    toForget += topology
    agent.retire(processes.touchesAny)
  }

  private def report(): Unit = {
    // What is closed everywhere and reported is not remembered; deferred workers close later.
    partitions.tell()
    toForget.filterInPlace(topology => processes.touching(topology).nonEmpty || partitions.awaits(topology) || !ledger.forget(topology))
    ledger.report().foreach { case (sequence, counts) =>
      driver.ask(message(sequence, counts), AskMs) {
        case Right(_) => ledger.delivered(sequence)
        case Left(_) => ledger.notDelivered(sequence)
      }
    }
    takeInventory()
  }

  /** What is stored here, for the driver to say what of it is over. */
  private def takeInventory(): Unit = partitions.inventory(always = migrates).foreach { body =>
    driver.ask(SparkInternals.withSender(self, Frames.encode("INVENTORY", executor, body)), AskMs) {
      case Left(_) => inLoop(partitions.answered(heard = false))
      case Right(answer) => inLoop {
        partitions.answered(heard = true)
        val orphans = Json.parse(Frames.decodeMessage(answer).text("body"))
        partitions.forget(Json.integers(orphans.get("shuffles")), Json.integers(orphans.get("caches")))
        partitions.unclaimed(Json.integers(orphans.get("unclaimed")))
        partitions.stale(Json.fields(orphans.get("stale")).map { case (shuffle, before) => shuffle.toInt -> before.toLong })
        orphans.get("ended").asInstanceOf[ObjectNode].properties.asScala.toSeq.filter(e => partitions.has(e.getKey)).foreach { entry =>
          end(entry.getKey, settings.closeTimeoutMs, entry.getValue.asInstanceOf[ObjectNode], None)
        }
      }
    }
  }

  private def message(sequence: Long, counts: String): Any =
    SparkInternals.withSender(self, Frames.encode("REPORT", executor, sequence, counts))

  /** So that the driver knows what was closed at last. It may be gone already, which is no matter then. */
  private def lastReport(left: Long): Unit = ledger.report().foreach { case (sequence, counts) =>
    try { driver.askSync(message(sequence, counts), math.max(left, LastReportMs)); () } catch {
      case NonFatal(error) => Log.log.debug("a last report did not reach the driver", error)
    }
  }

  // -- The end of the executor

  /** Closes everything that is open, and waits for it at most so long. A second call waits for the first. */
  def shutdown(timeoutMs: Long): Unit =
    if (!ending.compareAndSet(false, true)) { ended.await(timeoutMs, TimeUnit.MILLISECONDS); () }
    else try closeAll(timeoutMs) finally ended.countDown()

  private def closeAll(timeoutMs: Long): Unit = {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def left: Long = math.max(0L, (deadline - System.nanoTime()) / 1000000L)
    def end(topologies: Seq[String]): Unit = {
      val latches = topologies.map(closings.latch)
      topologies.foreach(id => inLoop(closings.end(id, left, None)))
      latches.foreach(_.await(left, TimeUnit.MILLISECONDS))
    }
    // What still runs then (a task of the JVM cannot be ended) must not cost the others their close.
    schedule(timeoutMs / 2)(closings.force())
    val (application, inner) = descriptions.ids.partition(_ == Description.Application)
    // Attempts are being killed, or will never end: their workers are asked to end, which closes what they have open.
    processes.busy.foreach(terminate)
    end(inner)
    end(application)
    sampling.foreach(_.shutdownNow())
    agent.stop()
    agent.await(left)
    if (abandoned) Log.contained("deleting what topologies have stored")(partitions.abandon())
    partitions.awaitDeletions(left)
    lastReport(left)
    Partitions.stop(partitions)
    loop.shutdownNow()
    watchdog.shutdownNow()
    pool.shutdown()
    server.foreach { case (channels, folder) =>
      channels.close()
      Log.contained(s"deleting $folder")(SparkInternals.delete(folder))
    }
    Log.contained("stopping the endpoint")(SparkInternals.stopEndpoint(self))
  }

  override def inLoop(f: => Unit): Unit =
    try loop.execute(() => Log.contained("the executor's loop")(f)) catch { case _: RejectedExecutionException => () }

  override def schedule(ms: Long)(f: => Unit): Unit =
    try { loop.schedule((() => Log.contained("the executor's loop")(f)): Runnable, ms, TimeUnit.MILLISECONDS); () }
    catch { case _: RejectedExecutionException => () }
}

object ExecutorCrew {
  /** Set by Python in the thread that runs a topology; Spark copies it to all that is started there. */
  val TopologyProperty = "spark.stagecrew.topology"
  val ChainProperty = "spark.stagecrew.chain"
  val PlaceProperty = "spark.stagecrew.place"
  val StageAttemptProperty = "spark.stagecrew.stageAttempt"
  private val UnifiedProperty = "spark.sql.execution.udf.unified.execution.enabled"

  val UnifiedMessage: String = s"$UnifiedProperty=true starts Python processes that bypass stagecrew; set it to false"

  /** How long after its timeout a hook has to heed the timer signal before its process is ended. */
  val HookGraceMs = 1000L

  /** How long after an attempt its worker has to say that it has ended. */
  private val CutGraceMs = 2000L

  /** How much longer one has that was asked to end; as Spark's daemon has it with stagecrew (worker/politely.py). */
  private val KillGraceMs = 5000L

  /** How long an attempt that was interrupted or failed is remembered after its end, for a worker that begins it late; and the
    * blocks of a topology that has closed here, for the driver to unpersist their datasets. */
  private val RememberMs = 60000L

  /** How long an executor waits for an answer of the driver. */
  private[stagecrew] val AskMs = 30000L
  private val LastReportMs = 500L

  private final class HookTimeoutException(text: String) extends Exception(text)
  private final class SideFailed(val description: Description, cause: Throwable) extends Exception(cause) {
    def listener: String = cause match { case failed: OpenFailedException => failed.listener; case _ => "" }
  }

  /** How long after the executor's begin it looks at its processes for the first time, at most. */
  private val FirstLookMs = 2000L

  private def nameOf(task: TaskContext): String =
    s"stage ${task.stageId()}.${task.stageAttemptNumber()} partition ${task.partitionId()} attempt ${task.taskAttemptId()}"

  private[stagecrew] def daemon(name: String): ThreadFactory = body => {
    val thread = new Thread(body, name)
    thread.setDaemon(true)
    thread
  }
}
