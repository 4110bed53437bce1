package org.apache.spark.stagecrew

import java.util.concurrent._
import java.util.concurrent.atomic.AtomicBoolean
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal
import org.apache.spark.SparkContext

/**
 * The driver's part: knows every topology, describes them to executors, ends them, and keeps the executors' counts.
 *
 * `loop` is the one thread that owns the truth: RPC threads, the listener bus and Python's calls enqueue.
 */
final class DriverCrew(sc: SparkContext) extends Handler {
  import DriverCrew._

  val settings = new Settings(SparkInternals.conf(sc))
  private val loop = Executors.newSingleThreadScheduledExecutor(ExecutorCrew.daemon("stagecrew-driver"))
  private val topologies = mutable.LinkedHashMap.empty[String, Topology]
  private val executors = mutable.LinkedHashMap.empty[String, ExecutorOf]
  private val spark = new Executions.Books {
    def jobOfStage(stage: Int): Option[Int] = SparkInternals.jobOfStage(sc, stage)
    def jobRuns(job: Int): Boolean = SparkInternals.activeJobs(sc, ExecutorCrew.TopologyProperty).contains(job)
    def sqlRuns(execution: Long): Boolean = SparkInternals.executionRuns(execution)
    def queryRuns(run: String): Boolean = SparkInternals.queryRuns(run)
    def queryRun(id: String): Option[String] = SparkInternals.queryRun(id)
  }
  private val executions = new Executions(spark, ms => f => schedule(ms)(f))
  private val endpoint = SparkInternals.endpoint(EndpointName, this)
  val coordination = new Coordination(settings, () => SparkInternals.temporaryFolder(SparkInternals.conf(sc)), statistics)
  val partitions = new DriverPartitions(sc)
  private val pool = Executors.newCachedThreadPool(ExecutorCrew.daemon("stagecrew-release"))
  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  private var leftLast = Option.empty[Long]
  private val busy = new ExecutorPinning((executor, begins) =>
    Log.contained("telling Spark who is busy")(SparkInternals.pin(sc, executor, begins)), () => SparkInternals.post(sc, BusyChanged()))
  private val draining = new AtomicBoolean(false)
  private val drained = new CountDownLatch(1)
  private val watched = new ApplicationStats
  private val totals = new TotalsBook(settings.retainedDeadExecutors)
  private var forgotten = 0 // closed topologies that are not listed any more
  @volatile private var published = Snapshot(Vector.empty, Totals())

  private val eventLog = Option.when(SparkInternals.eventLog(sc))(new EventLog(
    settings.eventLogIntervalMs, settings.eventLogMaxEvents, () => System.currentTimeMillis(), SparkInternals.post(sc, _)))

  /** Whether somebody shows when listeners opened and closed, and tasks ran. */
  val timelines: Boolean = eventLog.nonEmpty || SparkInternals.hasUi(sc)

  /** What the UI, metrics and reports read: as of the last change. */
  def snapshot: Snapshot = published

  def start(application: Description): Unit = {
    call {
      topologies(application.id) = new Topology(application, ApplicationKind)
      publish()
    }
    SparkInternals.addListener(sc, new BusListener(this))
    loop.scheduleWithFixedDelay(() => Log.contained("the driver's check of executions")(checkExecutions()), 1, 1, TimeUnit.SECONDS)
    eventLog.foreach(log => loop.scheduleWithFixedDelay(() => Log.contained("storing in the event log")(log.tick(snapshot)), 1, 1, TimeUnit.SECONDS))
    ()
  }

  // -- What Python asks for (any thread)

  /** Adds listeners to the application's topology, and says whether it has operators; before its first task. */
  def registerApplication(added: Description): Unit = call {
    val application = topologies(Description.Application)
    val before = application.description.listeners
    val renumbered = added.listeners.zipWithIndex.map { case (entry, i) => entry.copy(index = before.size + i) }
    application.description = application.description.copy(
      listeners = before ++ renumbered, python = added.python, coordinated = added.coordinated)
    publish(application)
  }

  def begin(description: Description): Unit = call {
    description.parent.foreach { parent =>
      if (!topologies.get(parent).exists(_.state == "active")) {
        throw new IllegalStateException(s"topology '${description.name}' cannot begin inside one that has ended")
      }
    }
    topologies(description.id) = new Topology(description, NamedKind)
    publish()
  }

  /** Ends a topology, those inside it first. What it answers is done when every executor has answered, or is late. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    Log.contained("looking for what is kept")(partitions.lookForKept(related(id)))
    endNow(id, timeoutMs)
  }

  /** A topology, those inside it, and those that it lies in, as far as is published. */
  private def related(id: String): Seq[String] = {
    val parents = published.topologies.iterator.flatMap(t => t.parent.map(t.id -> _)).toMap
    def up(from: String): List[String] = from :: parents.get(from).map(up).getOrElse(Nil)
    (up(id) ++ parents.keys.filter(up(_).contains(id))).distinct
  }

  private def endNow(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    val done = new CompletableFuture[Unit]()
    inLoop {
      val inside = topologies.values.filter(t => t.description.parent.contains(id) && t.state == "active").map(_.description.id).toSeq
      def itself(): Unit = endOne(id, timeoutMs, done)
      if (inside.isEmpty) itself()
      else CompletableFuture.allOf(inside.map(endNow(_, timeoutMs)): _*).whenComplete((_, _) => inLoop(itself()))
      ()
    }
    done
  }

  /** Everything ends, before the SparkContext stops. Bounded; a second call waits for the first. */
  def drain(timeoutMs: Long): Unit =
    if (!draining.compareAndSet(false, true)) { drained.await(timeoutMs, TimeUnit.MILLISECONDS); () }
    else try endAll(timeoutMs) finally drained.countDown()

  private def endAll(timeoutMs: Long): Unit = {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def left: Long = math.max(1L, (deadline - System.nanoTime()) / 1000000L)
    def active = call(topologies.values.filter(t => t.state == "active").map(_.description).toSeq)
    val outermost = active.filter(d => d.id != Description.Application && d.parent.isEmpty)
    val ends = outermost.map(d => end(d.id, left))
    try CompletableFuture.allOf(ends: _*).get(left, TimeUnit.MILLISECONDS) catch { case NonFatal(_) => () }
    try end(Description.Application, left).get(left, TimeUnit.MILLISECONDS) catch { case NonFatal(_) => () }
    ()
  }

  /** Cancels what runs of a topology, and each new job of it until it has ended. */
  def cancel(id: String, reason: String): Unit = call(topologies.get(id).foreach { topology =>
    topology.cancelled = Some(reason)
    cancelNow(topology)
  })

  /** What runs of a topology: jobs, SQL executions and streaming queries, those too that were started just now. */
  def activity(id: String): Activity = {
    val before = seen(id)
    if (before.nonEmpty) before
    else {
      // The event of what began a moment ago may be on its way to us; one behind it tells that it has come.
      val heard = new CountDownLatch(1)
      SparkInternals.post(sc, Heard(heard))
      heard.await(HeardMs, TimeUnit.MILLISECONDS)
      seen(id)
    }
  }

  private def seen(id: String): Activity = call {
    val jobs = SparkInternals.activeJobs(sc, ExecutorCrew.TopologyProperty)
    val mine = jobs.collect { case (job, topology) if within(topology, id) => job }.toSeq.sorted
    topologies.get(id) match {
      case None => Activity(mine, Nil, Nil)
      case Some(topology) =>
        topology.executions.filterInPlace(SparkInternals.executionRuns)
        topology.queries.filterInPlace(SparkInternals.queryRuns)
        if (topology.cancelled.nonEmpty && mine.nonEmpty) cancelNow(topology)
        Activity(mine, topology.executions.toSeq.sorted, topology.queries.toSeq.sorted)
    }
  }

  /** What it says of coordinators; and of the stored job that it runs. */
  def statistics(frame: Frame): Unit =
    inLoop(publish(watched.statistics(frame.long("sequence"), Json.parse(frame.text("body")), topologies.get): _*))

  def recovery(view: RecoveryView): Unit = inLoop {
    watched.recovery = Some(view)
    publish()
  }

  def slots: Int = SparkInternals.slots(sc)

  def stopQueries(id: String): Unit = call(topologies.get(id).toSeq.flatMap(_.queries)).foreach { run =>
    Log.contained(s"stopping streaming query $run")(SparkInternals.stopQuery(run))
  }

  def stop(): Unit = {
    Log.contained("storing in the event log")(eventLog.foreach(log => call(log.flush(snapshot))))
    Log.contained("stopping the driver's endpoint")(SparkInternals.stopEndpoint(endpoint))
    Log.contained("closing the coordination")(coordination.close())
    loop.shutdownNow()
    pool.shutdown()
  }

  // -- What Spark's listener bus tells (its thread)

  def jobStarted(job: Int, stages: Seq[Int], topology: Option[String], shuffles: Seq[Int], caches: Seq[Int]): Unit = inLoop {
    executions.jobStarted(job, stages)
    user(topology).foreach(partitions.used(_, shuffles, caches))
    // A thread may bear the mark of one that was closed in another thread: its jobs are the application's.
    val covering = topology.flatMap(topologies.get).toSeq.flatMap(chainOf).filter(_.state != "closed")
    val counted = (covering ++ topologies.get(Description.Application)).distinct
    counted.foreach(_.jobs += 1)
    // An AQE query that is cancelled between two of its jobs goes on with the next.
    covering.flatMap(_.cancelled).headOption.foreach(reason => sc.cancelJob(job, reason))
    publish(counted: _*)
  }

  def jobEnded(job: Int): Unit = inLoop {
    executions.jobEnded(job)
    openFailures.filterInPlace((of, _) => executions.hasStage(of._1))
    endExecution(Executions.ofJob(job))
  }

  def executionStarted(id: Long, tags: Set[String]): Unit = inLoop(tagged(tags).foreach(_.executions += id))

  def executionEnded(id: Long): Unit = inLoop {
    topologies.values.foreach(_.executions -= id)
    endExecution(Executions.ofSql(id))
  }

  def queryStarted(id: String, run: String, tags: Set[String]): Unit = inLoop {
    executions.queryStarted(id, run)
    tagged(tags).foreach(_.queries += run)
  }

  def queryEnded(id: String, run: String): Unit = inLoop {
    topologies.values.foreach(_.queries -= run)
    executions.queryEnded(id, run)
    endExecution(Executions.ofQuery(run))
  }

  /** On the bus's own thread. */
  def busyChanged(): Unit = busy.tell()

  def executorRemoved(id: String): Unit = inLoop(lost(id))

  def heard(latch: CountDownLatch): Unit = inLoop(latch.countDown())

  // -- What executors ask (RPC threads)

  override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
    val frame = Frames.decodeMessage(message)
    inLoop {
      from.foreach { peer =>
        val id = frame.text("executor")
        executors.get(id) match {
          case Some(known) => known.peer = peer; known.address = address
          case None => executors(id) = new ExecutorOf(id, peer, address)
        }
      }
      frame.kind match {
        case "ASK_DESCRIPTION" => describe(frame.text("topology"), frame.text("executor"), reply)
        case "ASK_EXECUTION" =>
          executions.find(frame.text("key"))(found => reply.answer(Frames.encode("EXECUTION", found.getOrElse(""))))
        case "OPEN_FAILED" => openFailed(frame)
        case "REPORT" =>
          reported(frame.text("executor"), frame.long("sequence"), Json.parse(frame.text("body")))
          reply.answer(Frames.encode("OK"))
        case "INVENTORY" =>
          try {
            val (orphans, left) = partitions.inventory(
              Json.parse(frame.text("body")), leaving, id => topologies.get(id).map(_.state).getOrElse("closed"), () => claimRunning())
            if (left.nonEmpty) pool.execute(() => deleteLeft(left))
            reply.answer(Frames.encode("ORPHANS", Json.write(orphans)))
          } catch { case Failure(error) => reply.fail(error) } // it tells again
        case other => reply.fail(new FrameException(s"an executor does not send $other"))
      }
    }
  }

  override def disconnected(address: String): Unit = inLoop {
    executors.values.filter(e => e.address == address && e.id != SparkContext.DRIVER_IDENTIFIER).map(_.id).toSeq.foreach(lost)
  }

  // -- The loop's own

  private def describe(id: String, executor: String, reply: Reply): Unit = {
    if (id.startsWith(Description.ExecutionPrefix) && !topologies.contains(id)) beginExecution(id)
    topologies.get(id).filter(_.state == "active") match {
      case Some(topology) =>
        if (topology.executors.add(executor)) publish(topology)
        val (body, blobs) = topology.description.encoded
        reply.answer(Frames.encode("DESCRIPTION", id, body, blobs))
      case None => reply.answer(Frames.encode("DESCRIPTION", id, "", Vector.empty))
    }
  }

  /** An execution is a topology of its own, with those of the application's listeners that have this lifetime. */
  private def beginExecution(id: String): Unit = if (executions.mayBegin(id)) {
    val application = topologies(Description.Application).description
    topologies(id) = new Topology(application.copy(id = id, name = Executions.name(id), parent = None), ExecutionKind)
    publish()
  }

  private def endExecution(id: String): Unit = {
    if (topologies.get(id).exists(_.state == "active")) endNow(id, settings.closeTimeoutMs)
    ()
  }

  /** Events may be dropped: what has ended by Spark's own books is ended here too. */
  private def checkExecutions(): Unit = {
    executions.prune()
    partitions.prune()
    busy.remind()
    if (migrates && executors.keys.exists(SparkInternals.leaves(sc, _))) leftLast = Some(System.nanoTime())
    val over = topologies.values.filter(t => t.kind == ExecutionKind && t.state == "active").map(_.description.id)
      .filterNot(executions.runs)
    over.toSeq.foreach(endExecution)
  }

  private def endOne(id: String, timeoutMs: Long, done: CompletableFuture[Unit]): Unit = topologies.get(id) match {
    case None => done.complete(()); ()
    case Some(topology) if topology.state == "closed" => done.complete(()); ()
    case Some(topology) =>
      topology.waiters ::= done
      if (topology.state == "active") {
        topology.state = "closing"
        // Executions lie inside the application's topology: they end before it.
        val released = try release(topology) catch {
          case Failure(error) =>
            Log.log.warn(s"what topology '${topology.description.name}' has stored is not released", error)
            DriverPartitions.Released(DriverPartitions.KeepsAll, Nil, 0, Map.empty, Nil, Set.empty, Nil)
        }
        // Outputs of executors that leave are sent to any other.
        val asked = if (migrates && released.shuffles.nonEmpty) executors.values.toSeq else (topology.executors ++ topology.holders).toSeq.flatMap(executors.get)
        topology.pending ++= asked.map(_.id)
        busy.begins(id, asked.map(_.id))
        val message = Frames.encode("END_TOPOLOGY", id, timeoutMs, Json.write(released.json))
        asked.foreach { executor =>
          executor.peer.ask(message, timeoutMs + AnswerMs) {
            case Right(bytes) => inLoop {
              Log.contained(s"the answer of executor ${executor.id}") {
                val frame = Frames.decodeMessage(bytes)
                val body = Json.parse(frame.text("body"))
                reported(executor.id, frame.long("sequence"), body)
                topology.unclosed ++= Json.strings(body.get("unclosed"))
                val cached = Json.integers(body.get("caches"))
                topology.caches ++= cached
                if (cached.nonEmpty) topology.cachedOn += executor.id
                topology.left ++= partitions.drop(Json.integers(body.get("shuffles")).filterNot(released.shuffles.contains)) // of which no event told
              }
              answered(topology, executor.id)
            }
            // Its connection may be closed a moment before it is known to be lost: then that is said, and nobody waits here.
            case Left(error) => schedule(if (error.isInstanceOf[TimeoutException]) 0 else LostMs) {
              if (topology.pending(executor.id)) {
                topology.unclosed += s"executor ${executor.id} did not answer: ${error.getMessage}"
                answered(topology, executor.id)
              }
            }
          }
        }
      }
      settle(topology)
      publish(topology)
  }

  /** What nobody else uses, or will find running now, goes; what others use is theirs. */
  private def release(topology: Topology): DriverPartitions.Released = {
    val id = topology.description.id
    val before = SparkInternals.nextAttempt(sc)
    val known = try { claimRunning(); true } catch {
      case Failure(error) =>
        Log.log.warn(s"what topology '${topology.description.name}' has stored is not released: nobody knows who uses it", error)
        false
    }
    val around = chainOf(topology).tail.filter(_.state == "active").map(_.description.id)
    val released = partitions.end(id, if (known) topology.description.release else DriverPartitions.KeepsAll, around, before)
    released.heirs.values.flatMap(topologies.get).foreach(_.holders ++= topology.executors ++ topology.holders)
    topology.left ++= released.left
    topology.caches ++= released.caches
    released
  }

  /** Jobs that run now use their shuffles: the event of a job's start may be on its way, or lost. */
  private def claimRunning(): Unit = SparkInternals.shufflesInUse(sc, ExecutorCrew.TopologyProperty).foreach { case (of, shuffles) =>
    user(Some(of).filter(_.nonEmpty)).foreach(partitions.used(_, shuffles, Nil))
  }

  /** Whether an executor sends its outputs to others before it leaves, or did so a moment ago. */
  private def leaving: Boolean = leftLast.exists(System.nanoTime() - _ < LeavingNanos)

  /** Who uses what a job of this topology needs: the next around it that is active, as its tasks are booked; it may be one that
    * another thread has ended. Nobody, while that closes and is cancelled, as its jobs are. */
  private def user(topology: Option[String]): Option[String] = {
    val covering = topology.flatMap(topologies.get).toSeq.flatMap(chainOf).filter(_.state != "closed")
    if (covering.headOption.exists(_.state == "closing") && covering.exists(_.cancelled.nonEmpty)) None
    else Some(covering.find(_.state == "active").fold(Description.Application)(_.description.id))
  }

  private def answered(topology: Topology, executor: String): Unit = {
    topology.pending -= executor
    busy.ends(topology.description.id, executor)
    settle(topology)
    publish(topology)
  }

  /** When every executor has answered: what the driver itself releases, then it is closed. */
  private def settle(topology: Topology): Unit = if (topology.state == "closing" && topology.pending.isEmpty && !topology.releasing) {
    val caches = topology.caches.toSeq.filter(rdd => partitions.unused(rdd) && SparkInternals.mayUncache(sc, rdd))
    val left = topology.left.toSeq
    topology.releasing = true
    if (caches.isEmpty && left.isEmpty) confirm(topology, Nil)
    else CompletableFuture.runAsync(() => {
      caches.foreach(rdd => Log.contained(s"releasing cached dataset $rdd")(SparkInternals.uncache(sc, rdd)))
      deleteLeft(left)
    }, pool).whenComplete((_, _) => inLoop(confirm(topology, caches)))
    ()
  }

  /** Executors count which of their blocks of these datasets are gone; then the topology is closed. */
  private def confirm(topology: Topology, unpersisted: Seq[Int]): Unit = {
    val body = Json.obj()
    body.set[com.fasterxml.jackson.databind.JsonNode]("caches", Json.numbers(unpersisted))
    val message = Frames.encode("UNPERSISTED", topology.description.id, Json.write(body))
    val answers = topology.cachedOn.toSeq.flatMap(executors.get).map { executor =>
      val answer = new CompletableFuture[Unit]()
      executor.peer.ask(message, AnswerMs) {
        case Right(bytes) => inLoop {
          Log.contained(s"the counts of executor ${executor.id}") {
            val frame = Frames.decodeMessage(bytes)
            reported(executor.id, frame.long("sequence"), Json.parse(frame.text("body")))
          }
          answer.complete(())
          ()
        }
        case Left(error) =>
          Log.log.warn(s"executor ${executor.id} did not say which cached blocks of topology '${topology.description.name}' are gone: they are not " +
            s"counted as released: ${error.getMessage}")
          answer.complete(())
          ()
      }
      answer
    }
    if (answers.isEmpty) closed(topology)
    else CompletableFuture.allOf(answers: _*).whenComplete((_, _) => inLoop(closed(topology)))
    ()
  }

  private def deleteLeft(left: Seq[SparkInternals.LeftBlocks]): Unit = left.foreach(one =>
    Log.contained(s"deleting what executor ${one.executor} has left")(SparkInternals.deleteLeft(one, AnswerMs)))

  private def closed(topology: Topology): Unit = if (topology.state == "closing") {
    topology.state = "closed"
    topology.ended = System.currentTimeMillis()
    val waiters = topology.waiters
    topology.waiters = Nil
    if (topology.unclosed.nonEmpty) {
      Log.log.warn(s"topology '${topology.description.name}' has ended, but these have not closed: ${topology.unclosed.mkString("; ")}")
    }
    // Closed ones keep no pickled listeners, and only so many are remembered.
    topology.description = topology.description.copy(listeners = topology.description.listeners.map(_.copy(blob = None)))
    val closed = topologies.values.filter(t => t.state == "closed" && t.kind != ApplicationKind).toSeq
    // The one that ended last is never among them: Python reads its report next.
    val left = closed.sortBy(_.ended).dropRight(settings.retainedTopologies)
    left.foreach(t => topologies.remove(t.description.id))
    forgotten += left.size
    SpanBook.trim(topologies.values)
    publish(topology)
    waiters.foreach(_.complete(()))
  }

  private def lost(executor: String): Unit = executors.remove(executor).foreach { _ =>
    coordination.lost(executor, s"executor $executor is lost")
    watched.processes.lost(executor, System.currentTimeMillis())
    totals.lost(executor)
    topologies.values.foreach(_.holders -= executor)
    val concerned = topologies.values.filter(t => (t.executors(executor) || t.pending(executor)) && t.state != "closed").toSeq
    concerned.foreach { topology =>
      topology.lost(executor, settings.retainedDeadExecutors)
      if (topology.pending(executor)) answered(topology, executor)
    }
    // What it had stored is gone with it, or the shuffle service's.
    val stored = topologies.values.filter(_.counts.contains(executor)).toSeq
    stored.foreach(_.counts.updateWith(executor)(_.map { case (sequence, counts) => sequence -> counts.copy(stored = Stored()) }))
    publish((concerned ++ stored).distinct: _*)
  }

  private def reported(executor: String, sequence: Long, body: com.fasterxml.jackson.databind.node.ObjectNode): Unit =
    if (totals.took(executor, sequence, Totals.of(body.get("totals")))) {
      val newer = body.get("topologies").properties.asScala.toSeq.flatMap { entry =>
        topologies.get(entry.getKey).filter(topology => sequence > topology.counts.get(executor).map(_._1).getOrElse(0L)).map { topology =>
          topology.counts(executor) = sequence -> ExecutorCounts.of(entry.getValue)
          topology
        }
      }
      publish((newer ++ watched.reported(executor, sequence, body, topologies.get)).distinct: _*)
    }

  /** Spark retries these attempts without end: at the limit of the task's retries its stage is cancelled with the cause. */
  private def openFailed(frame: Frame): Unit = {
    val key = (frame.long("stage").toInt, frame.long("partition").toInt)
    val attempts = openFailures.getOrElseUpdate(key, mutable.HashSet.empty)
    attempts += frame.long("attempt")
    if (attempts.size >= SparkInternals.maxTaskFailures(sc)) {
      openFailures.filterInPlace((other, _) => other._1 != key._1)
      sc.cancelStage(key._1, frame.text("error"))
    }
  }
  private val openFailures = mutable.LinkedHashMap.empty[(Int, Int), mutable.HashSet[Long]]

  private def cancelNow(topology: Topology): Unit =
    topology.cancelled.foreach(reason => sc.cancelJobsWithTag(tag(topology.description.id), reason))

  private def tagged(tags: Set[String]): Seq[Topology] = topologies.values.filter(t => tags(tag(t.description.id))).toSeq

  private def chainOf(topology: Topology): Seq[Topology] =
    topology +: topology.description.parent.flatMap(topologies.get).toSeq.flatMap(chainOf)

  private def within(inner: String, outer: String): Boolean =
    inner == outer || topologies.get(inner).exists(t => chainOf(t).exists(_.description.id == outer))

  /** Makes what is shown anew, of these topologies; the others are shown as they were. */
  private def publish(changed: Topology*): Unit = {
    changed.foreach(_.changed())
    published = Snapshot(topologies.values.map(_.view).toVector, totals.sum,
      watched.processes.views, watched.recovery, watched.sums, forgotten)
    eventLog.foreach(log => Log.contained("storing in the event log")(log.changed(published)))
  }

  private def inLoop(f: => Unit): Unit =
    try loop.execute(() => Log.contained("the driver's loop")(f)) catch { case _: RejectedExecutionException => () }

  private def schedule(ms: Long)(f: => Unit): Unit =
    try { loop.schedule((() => Log.contained("the driver's loop")(f)): Runnable, ms, TimeUnit.MILLISECONDS); () }
    catch { case _: RejectedExecutionException => () }

  private def call[T](f: => T): T = {
    val task = loop.submit((() => f): Callable[T])
    try task.get(60, TimeUnit.SECONDS) catch { case failed: ExecutionException => throw failed.getCause }
  }
}

object DriverCrew {
  val EndpointName = "stagecrew"

  /** How much longer than a topology's own time-out the driver waits for the answer of an executor. */
  private val AnswerMs = 2000L

  /** How long after its connection an executor is told to be lost at the latest, where it is. */
  private val LostMs = 1000L

  /** How long after an executor was last seen to leave something that it sent may still arrive. */
  private val LeavingNanos = 60L * 1000 * 1000 * 1000

  /** How long an exit waits for the listener bus; a bus that is behind by more is not waited for. */
  private val HeardMs = 1000L

  val ApplicationKind = "application"
  val NamedKind = "named"
  val ExecutionKind = "execution"

  /** The job tag of a topology. */
  def tag(id: String): String = s"stagecrew-$id"

  final case class Activity(jobs: Seq[Int], executions: Seq[Long], queries: Seq[String]) {
    def nonEmpty: Boolean = jobs.nonEmpty || executions.nonEmpty || queries.nonEmpty
  }

  private final class ExecutorOf(val id: String, var peer: Peer, var address: String)
}
