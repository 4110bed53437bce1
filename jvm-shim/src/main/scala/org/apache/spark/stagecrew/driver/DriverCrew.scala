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
 * The driver's part of the plugin: it knows every topology, describes topologies to executors, and keeps the executors'
 * counts. `TopologyEnds` ends topologies, and `BusListener` handles Spark's events.
 *
 * `loop` is the one thread that owns the state. RPC threads, the listener bus and Python's calls enqueue.
 */
final class DriverCrew(private[stagecrew] val sc: SparkContext) extends ThreadLoop("stagecrew-driver") with Handler {
  import DriverCrew._

  private val conf = SparkInternals.conf(sc)
  val settings = new Settings(conf)
  private[stagecrew] val pool = Executors.newCachedThreadPool(ExecutorCrew.daemon("stagecrew-release"))
  private[stagecrew] val topologies = mutable.LinkedHashMap.empty[String, Topology]
  private[stagecrew] val executors = mutable.LinkedHashMap.empty[String, ExecutorOf]
  private[stagecrew] val executions = new Executions(new Executions.Books {
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
      Log.contained("telling Spark which executors are busy")(SparkInternals.pin(sc, executor, begins)),
    () => SparkInternals.post(sc, BusyChanged()))
  private val ends = new TopologyEnds(this)
  private val events = new BusListener(this)
  private val stats = new ApplicationStats
  private val totals = new TotalsBook(settings.retainedDeadExecutors)
  private val migrates = SparkInternals.migrates(conf)
  private var leftLast = Option.empty[Long] // when an executor was last seen to leave
  @volatile private var published = Snapshot(Vector.empty, Totals())
  private val eventLog = Option.when(SparkUi.hasEventLog(sc))(new EventLog(
    settings.eventLogIntervalMs, settings.eventLogMaxEvents, () => System.currentTimeMillis(),
    SparkInternals.post(sc, _)))

  /** Whether the UI or the event log shows when listeners opened and closed, and tasks ran. */
  val timelines: Boolean = eventLog.nonEmpty || SparkUi.hasUi(sc)

  /** The state after the last change, for the UI, metrics and reports. */
  def snapshot: Snapshot = published

  def start(application: Description): Unit = {
    call(add(application, ApplicationKind))
    SparkInternals.addListener(sc, events)
    every(1000)("the driver's check of executions")(checkExecutions())
    eventLog.foreach(log => every(1000)("storing in the event log")(log.tick(snapshot)))
  }

  // -- Python's calls (any thread)

  /** Adds listeners to the application's topology, and says whether it has operators. Before its first task. */
  def registerApplication(added: Description): Unit = call {
    val application = topologies(Description.Application)
    val all = application.description.and(added)
    application.description = all.copy(executable = added.executable, environment = added.environment,
      files = added.files, coordinated = added.coordinated)(all.blobs)
    publish(application)
  }

  def begin(description: Description): Unit = call {
    if (description.parent.exists(parent => !topologies.get(parent).exists(_.state == "active")))
      throw new IllegalStateException(s"topology '${description.name}' cannot begin inside one that has ended")
    add(description, NamedKind)
  }

  private def add(description: Description, kind: String): Unit = {
    topologies(description.id) = new Topology(description, kind, settings.retainedDeadExecutors)
    publish()
  }

  /** Ends a topology, and before it the topologies inside it. Completes when every executor has answered, or is
    * late. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    Log.contained("finding the datasets that are kept")(partitions.lookForKept(related(id)))
    ends.end(id, timeoutMs)
  }

  /** A topology, the topologies inside it, and those around it, by the last snapshot. */
  private def related(id: String): Seq[String] = {
    val parents = published.topologies.iterator.flatMap(t => t.parent.map(t.id -> _)).toMap
    def up(from: String): List[String] = from :: parents.get(from).map(up).getOrElse(Nil)
    (up(id) ++ parents.keys.filter(up(_).contains(id))).distinct
  }

  /** Ends everything before the SparkContext stops, within the timeout. A second call waits for the first. */
  def drain(timeoutMs: Long): Unit = endOnce(timeoutMs) {
    val deadline = System.nanoTime() + timeoutMs * 1000000L
    def left: Long = math.max(1L, (deadline - System.nanoTime()) / 1000000L)
    def ended(ids: Seq[String]): Unit =
      try CompletableFuture.allOf(ids.map(end(_, left)): _*).get(left, TimeUnit.MILLISECONDS)
      catch { case NonFatal(_) => () }
    val active = call(topologies.values.filter(_.state == "active").map(_.description).toSeq)
    ended(active.filter(d => d.id != Description.Application && d.parent.isEmpty).map(_.id))
    ended(Seq(Description.Application))
  }

  /** Cancels the jobs of a topology, and each new job until it has ended. */
  def cancel(id: String, reason: String): Unit = call(topologies.get(id).foreach { topology =>
    topology.cancelled = Some(reason)
    cancelNow(topology)
  })

  private def cancelNow(topology: Topology): Unit =
    topology.cancelled.foreach(reason => sc.cancelJobsWithTag(tag(topology.description.id), reason))

  /** The running jobs, SQL executions and streaming queries of a topology, including those that started a moment
    * ago. */
  def activity(id: String): Activity = Some(seen(id)).filter(_.nonEmpty).getOrElse {
    // The event of a start may be on its way: it is handled when a marker that is posted now arrives.
    val heard = new CountDownLatch(1)
    SparkInternals.post(sc, Heard(heard))
    heard.await(HeardMs, TimeUnit.MILLISECONDS)
    seen(id)
  }

  private def seen(id: String): Activity = call {
    val jobs = StagecrewScheduler.activeJobs(sc, TaskAttempts.TopologyProperty)
    val mine = jobs.collect { case (job, topology) if within(topology, id) => job }.toSeq.sorted
    topologies.get(id) match {
      case None => Activity(mine, Nil, Nil)
      case Some(topology) =>
        topology.executions.filterInPlace(StagecrewSql.executionRuns)
        topology.queries.filterInPlace(StagecrewSql.queryRuns)
        if (mine.nonEmpty) cancelNow(topology)
        Activity(mine, topology.executions.toSeq.sorted, topology.queries.toSeq.sorted)
    }
  }

  private def within(inner: String, outer: String): Boolean =
    inner == outer || topologies.get(inner).exists(t => chainOf(t).exists(_.description.id == outer))

  /** Statistics of coordinators. */
  def statistics(frame: Frame): Unit = {
    val news = Json.read[Statistics](frame.text("body"))
    inLoop(publish(stats.statistics(frame.long("sequence"), news, topologies.get): _*))
  }

  /** The state of the stored job that this application runs. */
  def recovery(view: RecoveryView): Unit = inLoop {
    stats.recovery = Some(view)
    publish()
  }

  def slots: Int = SparkInternals.slots(sc)

  def stopQueries(id: String): Unit = call(topologies.get(id).toSeq.flatMap(_.queries)).foreach { run =>
    Log.contained(s"stopping streaming query $run")(StagecrewSql.stopQuery(run))
  }

  def stop(): Unit = {
    Log.contained("storing in the event log")(eventLog.foreach(log => call(log.flush(snapshot))))
    Log.contained("stopping the driver's endpoint")(Rpc.stopEndpoint(endpoint))
    Log.contained("closing the coordination")(coordination.close())
    loop.shutdownNow()
    pool.shutdown()
  }

  // -- The executors' messages (RPC threads)

  override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit = {
    val frame = Frames.decodeMessage(message)
    inLoop {
      from.foreach(peer => executors(frame.text("executor")) = ExecutorOf(frame.text("executor"), peer, address))
      frame.kind match {
        case "ASK_DESCRIPTION" => describe(frame.text("topology"), frame.text("executor"), reply)
        case "ASK_EXECUTION" =>
          executions.find(frame.text("key"))(found => reply.answer(Frames.encode("EXECUTION", found.getOrElse(""))))
        case "OPEN_FAILED" => events.openFailed(frame)
        case "REPORT" =>
          reported(frame.text("executor"), frame)
          reply.answer(Frames.encode("OK"))
        case "INVENTORY" =>
          try {
            val (orphans, left) = partitions.inventory(Json.read[Inventory](frame.text("body")), leaving,
              id => topologies.get(id).map(_.state).getOrElse("closed"), () => ends.claimRunning())
            if (left.nonEmpty) pool.execute(() => ends.deleteLeft(left))
            reply.answer(Frames.encode("ORPHANS", Json.write(orphans)))
          } catch { case Failure(error) => reply.fail(error) } // the executor repeats it
        case other => reply.fail(new FrameException(s"an executor does not send $other"))
      }
    }
  }

  override def disconnected(address: String): Unit = inLoop {
    executors.values.filter(e => e.address == address && e.id != SparkContext.DRIVER_IDENTIFIER)
      .map(_.id).toSeq.foreach(lost)
  }

  // -- In the loop

  private def describe(id: String, executor: String, reply: Reply): Unit = {
    if (id.startsWith(Description.ExecutionPrefix) && !topologies.contains(id)) beginExecution(id)
    val active = topologies.get(id).filter(_.state == "active")
    active.foreach(topology => if (topology.executors.add(executor)) publish(topology))
    val description = active.map(_.description)
    reply.answer(Frames.encode(
      "DESCRIPTION", id, description.fold("")(_.body), description.fold(Vector.empty[Array[Byte]])(_.blobs)))
  }

  /** An execution has a topology of its own, for the application's listeners with this lifetime. */
  private def beginExecution(id: String): Unit = if (executions.mayBegin(id)) {
    val application = topologies(Description.Application).description
    add(application.copy(id = id, name = Executions.name(id), parent = None)(application.blobs), ExecutionKind)
  }

  private[stagecrew] def endExecution(id: String): Unit =
    if (topologies.get(id).exists(_.state == "active")) { ends.end(id, settings.closeTimeoutMs); () }

  /** Events may be dropped: ends the executions that have ended according to Spark's own books. */
  private def checkExecutions(): Unit = {
    executions.prune()
    partitions.prune()
    pinning.remind()
    if (migrates && executors.keys.exists(SparkInternals.leaves(sc, _))) leftLast = Some(System.nanoTime())
    topologies.values.filter(t => t.kind == ExecutionKind && t.state == "active").map(_.description.id)
      .filterNot(executions.runs).toSeq.foreach(endExecution)
  }

  /** Whether an executor sends its outputs to others before it leaves, or did so a moment ago. */
  private def leaving: Boolean = leftLast.exists(System.nanoTime() - _ < LeavingNanos)

  /** The topology that uses the datasets of a job of this topology: the innermost active one, because another thread
    * may have ended it. None while it closes and is cancelled, as its jobs are. */
  private[stagecrew] def user(topology: Option[String]): Option[String] = {
    val covering = topology.flatMap(topologies.get).toSeq.flatMap(chainOf).filter(_.state != "closed")
    if (covering.headOption.exists(_.state == "closing") && covering.exists(_.cancelled.nonEmpty)) None
    else Some(covering.find(_.state == "active").fold(Description.Application)(_.description.id))
  }

  /** A topology and those around it, innermost first. */
  private[stagecrew] def chainOf(topology: Topology): Seq[Topology] =
    topology +: topology.description.parent.flatMap(topologies.get).toSeq.flatMap(chainOf)

  private[stagecrew] def lost(executor: String): Unit = executors.remove(executor).foreach { _ =>
    coordination.lost(executor, s"executor $executor is lost")
    stats.processes.lost(executor, System.currentTimeMillis())
    totals.lose(executor)
    val concerned = ends.lost(executor)
    // Its partitions are lost with it, or belong to the shuffle service.
    val stored = topologies.values.filter(_.counts.contains(executor)).toSeq
    stored.foreach(_.counts.updateWith(executor)(_.map { case (sequence, counts) =>
      sequence -> counts.copy(partitions = counts.partitions.storing(PartitionCounts()))
    }))
    publish((concerned ++ stored).distinct: _*)
  }

  /** Takes over a report, unless a newer one has arrived. */
  private[stagecrew] def reported(executor: String, frame: Frame): ExecutorReport = {
    val (sequence, report) = (frame.long("sequence"), Json.read[ExecutorReport](frame.text("body")))
    if (totals.record(executor, sequence, report.totals)) {
      val newer = report.topologies.toSeq.flatMap { case (id, counts) =>
        topologies.get(id).filter(_.counts.get(executor).forall(_._1 < sequence)).map { topology =>
          topology.counts(executor) = sequence -> counts
          topology
        }
      }
      publish((newer ++ stats.reported(executor, sequence, report, topologies.get)).distinct: _*)
    }
    report
  }

  /** Makes a new snapshot, in which these topologies have changed. */
  private[stagecrew] def publish(changed: Topology*): Unit = {
    changed.foreach(_.changed())
    published = Snapshot(topologies.values.map(_.view).toVector, totals.sum, stats.processes.views,
      stats.recovery, stats.sums, ends.forgotten)
    eventLog.foreach(log => Log.contained("storing in the event log")(log.changed(published)))
  }

  private def call[T](f: => T): T = {
    val task = loop.submit((() => f): Callable[T])
    try task.get(60, TimeUnit.SECONDS) catch { case failed: ExecutionException => throw failed.getCause }
  }
}

object DriverCrew {
  val EndpointName = "stagecrew"

  /** How long after an executor was last seen to leave something that it sent may still arrive. */
  private val LeavingNanos = 60L * 1000 * 1000 * 1000

  /** How long an exit waits for the listener bus. It does not wait for a bus that is slower. */
  private val HeardMs = 1000L

  val ApplicationKind = "application"
  val NamedKind = "named"
  val ExecutionKind = "execution"

  /** The job tag of a topology. */
  def tag(id: String): String = s"stagecrew-$id"

  final case class Activity(jobs: Seq[Int], executions: Seq[Long], queries: Seq[String]) {
    def nonEmpty: Boolean = jobs.nonEmpty || executions.nonEmpty || queries.nonEmpty
  }

  private[stagecrew] final case class ExecutorOf(id: String, peer: Peer, address: String)
}
