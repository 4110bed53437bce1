package org.apache.spark.stagecrew
package driver

import java.util.concurrent._
import scala.collection.mutable
import scala.util.control.NonFatal
import org.apache.spark.SparkContext
import org.apache.spark.scheduler.StagecrewScheduler
import org.apache.spark.sql.StagecrewSql
import executor._, partitions._, spark._, ui._, wire._

/**
 * The plugin on the driver: it stores every topology, describes topologies to executors, and stores the counts of the
 * executors. `TopologyEnds` ends topologies, and `BusListener` handles Spark's events.
 *
 * The `loop` thread owns the state. RPC threads, the listener bus and calls from Python enqueue work into the loop.
 */
final class DriverCrew(private[stagecrew] val sc: SparkContext) extends ThreadLoop("stagecrew-driver") with Handler {
  import DriverCrew._

  private val conf = SparkInternals.conf(sc)
  val settings = new Settings(conf)
  private[stagecrew] val pool = Executors.newCachedThreadPool(ExecutorCrew.daemon("stagecrew-release"))
  private[stagecrew] val topologies = mutable.LinkedHashMap.empty[String, Topology]
  private[stagecrew] val executors = mutable.LinkedHashMap.empty[String, ExecutorPeer]
  private[stagecrew] val executions = new Executions(new Executions.SparkState {
    def jobOfStage(stage: Int): Option[Int] = StagecrewScheduler.jobOfStage(sc, stage)
    def jobRuns(job: Int): Boolean = StagecrewScheduler.activeJobs(sc, TaskAttempts.TopologyProperty).contains(job)
    def sqlRuns(execution: Long): Boolean = StagecrewSql.executionRuns(execution)
    def queryRuns(run: String): Boolean = StagecrewSql.queryRuns(run)
    def queryRun(id: String): Option[String] = StagecrewSql.queryRun(id)
  }, ms => f => schedule(ms)(f))
  private val endpoint = Rpc.endpoint(EndpointName, this)
  val coordination = new Coordination(settings, () => SparkInternals.temporaryFolder(conf))
  val partitions = new DriverPartitions(sc)
  private[stagecrew] val pinning = new ExecutorPinning(
    (executor, begins) =>
      Log.contained("notifying Spark of executors with closing topologies")(SparkInternals.pin(sc, executor, begins)),
    () => if (SparkInternals.removesIdleExecutors(sc)) SparkInternals.post(sc, PinningChanged()))
  private val ends = new TopologyEnds(this)
  private val events = new BusListener(this)
  private val runningTasks = new RunningTasks
  private val runningHooks = mutable.LinkedHashMap.empty[String, (Long, Vector[RunningHook])] // by executor
  private[stagecrew] val traces = Option.when(settings.tracing)(new TraceLog)
  private val totals = new TotalsBook(settings.retainedDeadExecutors)
  private val processes = new ProcessBook
  private val stopping = ConcurrentHashMap.newKeySet[String]() // the runs of streaming queries that are being stopped
  private var coordinatorTotals = 0L -> Option.empty[OperatorView] // with the sequence number of the frame
  private var storedJob = Option.empty[RecoveryView]
  private var lastLeaving = Option.empty[Long] // when a decommissioned executor was last seen
  @volatile private var published = Snapshot(Vector.empty, Totals())
  private val eventLog = Option.when(SparkUi.hasEventLog(sc))(new EventLogWriter(
    settings.eventLogIntervalMs, settings.eventLogMaxEvents, () => System.currentTimeMillis(),
    SparkInternals.post(sc, _)))

  /** Whether executors report when listeners opened and closed, and when tasks ran: the UI or the event log shows it,
    * or it is traced. */
  val timelines: Boolean = eventLog.nonEmpty || SparkUi.hasUi(sc) || settings.tracing

  /** The current state, for the UI, metrics and reports. Any thread. */
  def snapshot: Snapshot = published

  def start(application: Description): Unit = {
    call(add(application, ApplicationKind))
    SparkInternals.addListener(sc, events)
    traces.foreach(SparkInternals.addListener(sc, _))
    if (SparkUi.hasUi(sc)) {
      SparkInternals.addListener(sc, runningTasks)
      every(1000)("publishing the running tasks and hooks")(publishRunning())
    }
    every(1000)("checking executions")(checkExecutions())
    eventLog.foreach(log => every(1000)("storing the state in the event log")(log.tick(snapshot)))
  }

  /** Any thread: see `DriverFacade.queryStarted`. */
  def queryStarted(tags: Set[String], run: String): Unit = inLoop(events.queryStarted(tags, run))

  // -- Calls from Python (any thread)

  /** Adds listeners to the application topology, and sets whether the application has operators. Called before the
    * first task. */
  def registerApplication(added: Description): Unit = call {
    val application = topologies(Description.Application)
    val all = application.description.and(added)
    application.description = all.copy(executable = added.executable, environment = added.environment,
      files = added.files, coordinated = added.coordinated, traceparent = added.traceparent)(all.blobs)
    publish(application)
  }

  def begin(description: Description): Unit = call {
    if (description.parent.exists(parent => !topologies.get(parent).exists(_.state == "active")))
      throw new IllegalStateException("the topology around it has ended: begin it outside of that topology")
    add(description, NamedKind)
  }

  private def add(description: Description, kind: String): Unit = {
    topologies(description.id) = new Topology(description, kind, settings.retainedDeadExecutors)
    publish()
  }

  /** Ends a topology, as described in `TopologyEnds.end`. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    Log.contained("finding the kept datasets")(partitions.findKept(related(id)))
    ends.end(id, timeoutMs)
  }

  /** The ids of a topology, of the topologies inside it, and of those around it, according to the last snapshot. */
  private def related(id: String): Seq[String] = {
    val parents = published.topologies.iterator.flatMap(t => t.parent.map(t.id -> _)).toMap
    def outward(from: String): List[String] = from :: parents.get(from).map(outward).getOrElse(Nil)
    (outward(id) ++ parents.keys.filter(outward(_).contains(id))).distinct
  }

  /** Ends all topologies before the SparkContext stops, within the timeout. A second call waits for the first. */
  def drain(timeoutMs: Long): Unit = endOnce(timeoutMs) {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def remainingMs: Long = math.max(1L, (deadline - System.nanoTime()) / 1000000L)
    def endAll(ids: Seq[String]): Unit =
      try CompletableFuture.allOf(ids.map(end(_, remainingMs)): _*).get(remainingMs, TimeUnit.MILLISECONDS)
      catch { case NonFatal(_) => () }
    val active = call(topologies.values.filter(_.state == "active").map(_.description).toSeq)
    endAll(active.filter(d => d.id != Description.Application && d.parent.isEmpty).map(_.id))
    endAll(Seq(Description.Application))
  }

  /** Cancels the jobs of a topology, including jobs that start later, before the topology has ended. */
  def cancel(id: String, reason: String): Unit = call(topologies.get(id).foreach { topology =>
    topology.cancelled = Some(reason)
    cancelNow(topology)
  })

  /** Also cancels the jobs of the topologies inside it: a thread that entered only one of these has only its tag. */
  private def cancelNow(topology: Topology): Unit = topology.cancelled.foreach(reason =>
    allWithin(topology.description.id).foreach(one => sc.cancelJobsWithTag(tag(one.description.id), reason)))

  private def allWithin(id: String): Seq[Topology] =
    topologies.values.filter(topology => within(topology.description.id, id)).toSeq

  /** The running jobs, SQL executions and streaming queries of a topology and of those inside it, including any that
    * have just started. */
  def activity(id: String): Activity = Some(currentActivity(id)).filter(_.nonEmpty).getOrElse {
    // The event of a start may still be in the queue. It has been handled when a marker that is posted now arrives.
    val handled = new CountDownLatch(1)
    SparkInternals.post(sc, FlushMarker(handled))
    val isComplete = handled.await(FlushTimeoutMs, TimeUnit.MILLISECONDS)
    currentActivity(id).copy(isComplete = isComplete)
  }

  private def currentActivity(id: String): Activity = call {
    val jobs = StagecrewScheduler.activeJobs(sc, TaskAttempts.TopologyProperty)
    val jobIds = jobs.collect { case (job, topology) if within(topology, id) => job }.toSeq.sorted
    val found = allWithin(id)
    found.foreach(_.executions.filterInPlace(StagecrewSql.executionRuns))
    found.foreach(_.queries.filterInPlace(StagecrewSql.queryRuns))
    if (jobIds.nonEmpty) topologies.get(id).foreach(cancelNow)
    Activity(jobIds, found.flatMap(_.executions).distinct.sorted, found.flatMap(_.queries).distinct.sorted)
  }

  private def within(inner: String, outer: String): Boolean =
    inner == outer || topologies.get(inner).exists(t => chainOf(t).exists(_.description.id == outer))

  /** Records statistics of coordinators. */
  def recordStatistics(frame: Frame): Unit = {
    val (sequence, statistics) = (frame.long("sequence"), Json.read[Statistics](frame.text("body")))
    inLoop {
      if (sequence > coordinatorTotals._1) coordinatorTotals = sequence -> statistics.totals
      publish(update(statistics.topologies)(_.operators.record(sequence, _)): _*)
    }
  }

  /** Sets the state of the stored job that this application runs. */
  def setStoredJob(view: RecoveryView): Unit = inLoop {
    storedJob = Some(view)
    publish()
  }

  def slots: Int = SparkInternals.slots(sc)

  /** Stops the streaming queries of a topology and of those inside it. Does not wait: Spark waits until the current
    * batch of a query has ended. */
  def stopQueries(id: String): Unit =
    call(allWithin(id).flatMap(_.queries)).filter(stopping.add).foreach(run => pool.execute(() =>
      try Log.contained(s"stopping streaming query $run")(StagecrewSql.stopQuery(run)) finally stopping.remove(run)))

  def stop(): Unit = {
    Log.contained("storing the state in the event log")(eventLog.foreach(log => call(log.flush(snapshot))))
    Log.contained("stopping the driver's endpoint")(Rpc.stopEndpoint(endpoint))
    Log.contained("closing the channel to coordinators")(coordination.close())
    loop.shutdownNow()
    pool.shutdown()
  }

  // -- Messages from executors (RPC threads)

  override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
    val frame = Frames.decodeMessage(message)
    inLoop {
      from.foreach(peer => executors(frame.text("executor")) = ExecutorPeer(frame.text("executor"), peer, address))
      frame.kind match {
        case "ASK_DESCRIPTION" => describe(frame.text("topology"), frame.text("executor"), reply)
        case "ASK_EXECUTION" =>
          executions.find(frame.text("key"))(found => reply.send(Frames.encode("EXECUTION", found.getOrElse(""))))
        case "OPEN_FAILED" => events.openFailed(frame)
        case "REPORT" =>
          reported(frame.text("executor"), frame)
          reply.send(Frames.encode("OK"))
        case "INVENTORY" =>
          try {
            val (orphans, leftBlocks) = partitions.inventory(Json.read[Inventory](frame.text("body")), leaving,
              id => topologies.get(id).map(_.state).getOrElse("closed"), () => ends.claimRunning())
            if (leftBlocks.nonEmpty) pool.execute(() => ends.deleteLeftBlocks(leftBlocks))
            reply.send(Frames.encode("ORPHANS", Json.write(orphans)))
          } catch { case Failure(error) => reply.fail(error) } // the executor sends the inventory again
        case other => reply.fail(new FrameException(s"an executor does not send $other"))
      }
    }
  }

  override def disconnected(address: String): Unit = inLoop {
    executors.values.filter(e => e.address == address && !SparkInternals.isDriver(e.id))
      .map(_.id).toSeq.foreach(lost)
  }

  // -- In the loop

  private def describe(id: String, executor: String, reply: Reply): Unit = {
    if (id.startsWith(Description.ExecutionPrefix) && !topologies.contains(id)) beginExecution(id)
    val active = topologies.get(id).filter(_.state == "active")
    active.foreach(topology => if (topology.executors.add(executor)) publish(topology))
    val description = active.map(_.description)
    reply.send(Frames.encode(
      "DESCRIPTION", id, description.fold("")(_.body), description.fold(Vector.empty[Array[Byte]])(_.blobs)))
  }

  /** Begins the topology of an execution, which has the application's listeners with the lifetime "execution". */
  private def beginExecution(id: String): Unit = if (executions.mayBegin(id)) {
    val application = topologies(Description.Application).description
    add(application.copy(id = id, name = Executions.name(id), parent = None)(application.blobs), ExecutionKind)
  }

  private[stagecrew] def endExecution(id: String): Unit =
    if (topologies.get(id).exists(_.state == "active")) { ends.end(id, settings.closeTimeoutMs); () }

  /** Ends the topologies of executions that have ended according to Spark's own state, because Spark may have dropped
    * the events of their ends. Also forgets datasets and jobs that Spark does not know any more. */
  private def checkExecutions(): Unit = {
    executions.prune()
    partitions.prune()
    pinning.remind()
    if (partitions.migrates && executors.keys.exists(SparkInternals.isDecommissioned(sc, _)))
      lastLeaving = Some(System.nanoTime())
    topologies.values.filter(t => t.kind == ExecutionKind && t.state == "active").map(_.description.id)
      .filterNot(executions.runs).toSeq.foreach(endExecution)
  }

  /** Whether a decommissioned executor may be sending its outputs to other executors, or may have done so recently. */
  private def leaving: Boolean = lastLeaving.exists(System.nanoTime() - _ < LeavingNanos)

  /** The topology that uses the datasets of a job that started in this topology: the topology itself, or the innermost
    * active one around it, because another thread may have ended the topology. None if the topology is closing and
    * cancelled, because its jobs are then cancelled too. */
  private[stagecrew] def userOf(topology: Option[String]): Option[String] = {
    val covering = topology.flatMap(topologies.get).toSeq.flatMap(chainOf).filter(_.state != "closed")
    if (covering.headOption.exists(_.state == "closing") && covering.exists(_.cancelled.nonEmpty)) None
    else Some(covering.find(_.state == "active").fold(Description.Application)(_.description.id))
  }

  /** A topology and those around it, innermost first. */
  private[stagecrew] def chainOf(topology: Topology): Seq[Topology] =
    topology +: topology.description.parent.flatMap(topologies.get).toSeq.flatMap(chainOf)

  private[stagecrew] def lost(executor: String): Unit = executors.remove(executor).foreach { _ =>
    coordination.lost(executor, s"executor $executor is lost")
    processes.lost(executor, System.currentTimeMillis())
    totals.executorLost(executor)
    val hooks = update(runningHooks.remove(executor).toSeq.flatMap(_._2).map(hook => hook.topology -> hook.span)) {
      (topology, span) =>
        val lost = span.copy(executor = executor, ended = System.currentTimeMillis(), failed = true, lost = true)
        topology.spans.lost(lost)
        traces.foreach(_.addHook(topology.description.id, lost))
    }
    if (hooks.nonEmpty) publishRunning()
    val affected = ends.lost(executor)
    // The executor stores no partitions any more: they are lost, or an external shuffle service stores them.
    val stored = topologies.values.filter(_.counts.contains(executor)).toSeq
    stored.foreach(_.counts.updateWith(executor)(_.map { case (sequence, counts) =>
      sequence -> counts.copy(partitions = counts.partitions.storing(PartitionCounts()))
    }))
    publish((affected ++ stored ++ hooks).distinct: _*)
  }

  /** Records the parts of a report for which no newer report has arrived. Returns the whole report. */
  private[stagecrew] def reported(executor: String, frame: Frame): ExecutorReport = {
    val (sequence, report) = (frame.long("sequence"), Json.read[ExecutorReport](frame.text("body")))
    if (totals.record(executor, sequence, report.totals)) {
      processes.record(report.processes)
      val counted = update(report.topologies) { (topology, counts) =>
        if (topology.counts.get(executor).forall(_._1 < sequence)) topology.counts(executor) = sequence -> counts
      }
      report.hooks.filter(_ => runningHooks.get(executor).forall(_._1 < sequence))
        .foreach { hooks =>
          runningHooks(executor) = sequence -> hooks
          publishRunning()
        }
      publish(counted ++ update(report.spans) { (topology, spans) =>
        val added = topology.spans.record(executor, sequence, spans)
        traces.foreach(log => added.filter(_.kind != "task").foreach(log.addHook(topology.description.id, _)))
      }: _*)
    }
    report
  }

  /** Updates topologies that are still listed, each with its value. Returns these topologies. */
  private def update[T](values: Iterable[(String, T)])(f: (Topology, T) => Unit): Seq[Topology] = for {
    (id, value) <- values.toSeq
    topology <- topologies.get(id)
  } yield {
    f(topology, value)
    topology
  }

  /** Publishes a new snapshot, in which the views of these topologies are computed again. */
  private[stagecrew] def publish(changed: Topology*): Unit = {
    changed.foreach(_.changed())
    published = Snapshot(topologies.values.map(_.view).toVector, totals.sum, processes.views, storedJob,
      coordinatorTotals._2, ends.forgotten, published.running)
    eventLog.foreach(log => Log.contained("storing the state in the event log")(log.changed(published)))
  }

  /** Publishes the hooks and tasks that run now. The rest of the snapshot stays the same. */
  private def publishRunning(): Unit = {
    val hooks = for {
      (executor, (_, hooks)) <- runningHooks.toVector
      hook <- hooks if topologies.get(hook.topology).exists(_.state != "closed")
    } yield hook.topology -> hook.span.copy(executor = executor)
    val running = hooks.foldLeft(runningTasks.byTopology) { case (all, (topology, span)) =>
      all.updated(topology, span +: all.getOrElse(topology, Vector.empty))
    }
    if (running.nonEmpty || published.running.nonEmpty) published = published.copy(running = running)
  }

  private def call[T](f: => T): T = {
    val task = loop.submit((() => f): Callable[T])
    try task.get(60, TimeUnit.SECONDS) catch { case failed: ExecutionException => throw failed.getCause }
  }
}

object DriverCrew {
  val EndpointName = "stagecrew"

  /** How long outputs may still arrive at other executors after a decommissioned executor was last seen. */
  private val LeavingNanos = 60L * 1000 * 1000 * 1000

  /** The maximum time that `activity` waits for the listener bus. */
  private val FlushTimeoutMs = 1000L

  val ApplicationKind = "application"
  val NamedKind = "named"
  val ExecutionKind = "execution"

  /** The job tag of a topology. */
  def tag(id: String): String = s"stagecrew-$id"

  /** What runs in a topology. `isComplete` is false if Spark has not reported the latest starts yet. */
  final case class Activity(jobs: Seq[Int], executions: Seq[Long], queries: Seq[String], isComplete: Boolean = true) {
    def nonEmpty: Boolean = jobs.nonEmpty || executions.nonEmpty || queries.nonEmpty
  }

  private[stagecrew] final case class ExecutorPeer(id: String, peer: Peer, address: String)
}
