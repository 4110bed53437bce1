package org.apache.spark.stagecrew
package executor

import java.util.concurrent.ConcurrentHashMap
import org.apache.spark.TaskContext
import listeners._, spark._, wire._

/**
 * One attempt at a Spark task on this executor, from its start until no worker can report it any more. `mark` is the
 * topology that the attempt's thread carried, `chain` the topologies that it is booked under, outermost first.
 */
private[stagecrew] final class TaskAttempt(val task: TaskContext, val mark: Option[String], val chain: Seq[String]) {
  val id: Long = task.taskAttemptId()
  val began: Long = System.nanoTime()
  /** Whether its mark is a topology that had ended: its partitions belong to the application. */
  val stray: Boolean = mark.exists(!chain.contains(_))
  /** Whether it may call functions that are bound to operators. */
  var talks = false
  /** Whether its worker has listeners, and reports its begin and its end. */
  var hasWorker = false
  @volatile var over = false
  /** Why it failed or was killed; once Spark has asked it to end, `Evaluations.Killed`. */
  @volatile var failure = Option.empty[String]
  /** Why the executor ended its worker. */
  @volatile var workerEnded = Option.empty[String]
  private var decorations = List.empty[(JvmListeners, List[(Entry, AutoCloseable)])]

  def decorate(listeners: JvmListeners): Unit = decorations = (listeners -> listeners.decorate(task)) :: decorations
  def undecorate(): Unit = decorations.foreach { case (listeners, scopes) => listeners.leave(scopes) }

  def name: String = s"stage ${task.stageId()}.${task.stageAttemptNumber()} partition ${task.partitionId()}" +
    s" attempt ${task.taskAttemptId()}"
}

/** The task attempts of an executor: their start, interruption and end, in the threads of the tasks. */
private[stagecrew] final class TaskAttempts(crew: ExecutorCrew) extends Evaluations.Attempts {
  import TaskAttempts._
  import crew.{closings, descriptions, evaluations, executor, ledger, links, partitions, processes}
  import crew.{schedule, sides, table}

  private val attempts = new ConcurrentHashMap[Long, TaskAttempt]()

  def get(id: Long): Option[TaskAttempt] = Option(attempts.get(id))

  override def runs(attempt: Long): Boolean = table.chainOf(attempt).nonEmpty
  override def failed(attempt: Long): Option[String] = get(attempt).flatMap(_.failure)
  override def stageOf(attempt: Long): (Int, Int) =
    get(attempt).fold((0, 0))(of => (of.task.stageAttemptNumber(), of.task.numPartitions()))

  /** The topology that a partition of this attempt belongs to: the innermost one. */
  def ownerOf(attempt: Long): Option[String] = table.chainOf(attempt).lastOption
    .filterNot(topology => topology == Description.Application || topology.startsWith(Description.ExecutionPrefix))
    .orElse(get(attempt).filter(one => one.stray && !one.over).map(_ => Description.Application))

  // -- The start

  /** Starts an attempt. A failure fails the attempt with its cause: Spark would log an exception, and run the body. */
  def started(task: TaskContext): Unit = try {
    val mark = Option(task.getLocalProperty(TopologyProperty))
    if (mark.nonEmpty || !nothingForAll) begin(task, mark)
  } catch {
    // Spark has asked the attempt to end, so its body does not run anyway.
    case error: Throwable if task.isInterrupted() =>
      Log.log.debug(s"attempt ${task.taskAttemptId()} was ended while it began", error)
    case failed: SideFailed => listenerFailed(task, failed)
    case error: Throwable => reject(task, Description.Application, "",
      s"stagecrew: this task cannot begin on executor $executor: ${TaskRejection.trace(error)}")
  }

  private def begin(task: TaskContext, mark: Option[String]): Unit = {
    val wanted = chain(task, mark)
    val attempt = new TaskAttempt(task, mark, table.begin(task.taskAttemptId(), wanted.map(_.id)))
    attempts.put(attempt.id, attempt)
    task.addTaskCompletionListener[Unit]((_: TaskContext) => completed(attempt))
    val described = wanted.filter(description => attempt.chain.contains(description.id))
    preparePlace(attempt, wanted.head)
    openListeners(attempt, described)
    prepareWorker(attempt, described)
    if (attempt.talks || attempt.hasWorker) heedInterrupt(attempt)
  }

  /** Whether the application has neither listeners nor operators: then a task of no topology needs nothing. */
  private def nothingForAll: Boolean = descriptions.describe(Description.Application)
    .exists(application => application.listeners.isEmpty && !application.coordinated)

  /** The topologies of a task, outermost first: the application's, its execution's, the named ones. */
  private def chain(task: TaskContext, mark: Option[String]): Seq[Description] = {
    val application = descriptions.describe(Description.Application).getOrElse(
      throw new IllegalStateException("the driver's plugin has ended"))
    val forExecutions = application.listeners.exists { entry =>
      entry.forExecution || (entry.kind == "name" && sides.lifetimeOf(application, entry) == "execution")
    }
    val execution = if (forExecutions) descriptions.execution(task) else None
    application +: (execution.toSeq ++ mark.toSeq.flatMap(descriptions.named))
  }

  /** A bound function finds its channel by the place. Which tasks call one is not known before they do. */
  private def preparePlace(attempt: TaskAttempt, application: Description): Unit = {
    attempt.talks = attempt.mark.exists(attempt.chain.contains(_)) || application.coordinated
    if (attempt.talks) set(attempt, PlaceProperty, crew.place.toString)
  }

  private def openListeners(attempt: TaskAttempt, described: Seq[Description]): Unit =
    if (described.exists(_.listeners.nonEmpty)) {
      if ("true" == attempt.task.getLocalProperty(UnifiedProperty))
        throw new UnsupportedOperationException(UnifiedMessage)
      described.foreach { description =>
        try sides.opened(description).jvm.foreach(attempt.decorate)
        catch { case error: Throwable => throw new SideFailed(description, error) }
      }
    }

  /** Sets the properties that name the topologies to the attempt's worker. In a local master the properties may be
    * those of the attempt before. */
  private def prepareWorker(attempt: TaskAttempt, described: Seq[Description]): Unit = {
    attempt.hasWorker = described.exists(_.listeners.exists(_.python))
    if (attempt.hasWorker) {
      set(attempt, ChainProperty, attempt.chain.mkString(" "))
      set(attempt, PlaceProperty, crew.place.toString)
      set(attempt, StageAttemptProperty, attempt.task.stageAttemptNumber().toString)
      attempt.task.addTaskFailureListener((_: TaskContext, error: Throwable) =>
        attempt.workerEnded.foreach(text => error.addSuppressed(new HookTimeoutException(text))))
    } else {
      val properties = SparkInternals.localProperties(attempt.task)
      if (properties.containsKey(ChainProperty)) properties.remove(ChainProperty)
    }
  }

  private def set(attempt: TaskAttempt, name: String, value: String): Unit =
    SparkInternals.localProperties(attempt.task).setProperty(name, value)

  /** When Spark asks the attempt to end, asks its worker to end (Spark kills it after
    * spark.python.task.killTimeout), and ends the waits for coordinators of a worker without listeners. */
  private def heedInterrupt(attempt: TaskAttempt): Unit = {
    attempt.task.addTaskInterruptListener { (_: TaskContext, _: String) =>
      attempt.failure = Some(Evaluations.Killed)
      processes.running(attempt.id).foreach(links.terminate)
      evaluations.foreach(_.interrupted(attempt.id))
    }
  }

  private def listenerFailed(task: TaskContext, failed: SideFailed): Unit = {
    val error = failed.getCause match {
      case said: AgentFailed => said.getMessage
      case open: OpenFailedException => s"${open.getMessage}\n${TaskRejection.trace(open.getCause)}"
      case other => TaskRejection.trace(other)
    }
    reject(task, failed.description.id, failed.listener,
      s"stagecrew: a listener of topology '${failed.description.name}' could not be opened" +
        s" on executor $executor:\n$error")
  }

  /** Ends the attempt without its body, and reports it to the driver. */
  private def reject(task: TaskContext, topology: String, listener: String, text: String): Unit =
    TaskRejection.refuse(task, executor, topology, listener, text, sides.failedInARow(topology))(crew.sendToDriver)

  // -- The end

  private def completed(attempt: TaskAttempt): Unit = {
    attempt.undecorate()
    if (attempt.mark.nonEmpty) partitions.over(attempt.id, SparkInternals.updatedBlocks(attempt.task))
    val failed = failureOf(attempt.task)
    // Before `over` is set: the messages of its worker may not have been read yet.
    if (attempt.talks) attempt.failure = failed.orElse(attempt.failure)
    attempt.over = true
    // Before `finish`: then its topologies may be reported for the last time.
    attempt.chain.lastOption.foreach(
      ledger.span(_, "task", attempt.name, (System.nanoTime() - attempt.began) / 1000, failed.nonEmpty))
    val quiescent = table.finish(attempt.id)
    evaluations.foreach(_.attemptOver(attempt.id, failed))
    if (quiescent.nonEmpty) closings.changed()
    if (attempt.failure.isEmpty) attempts.remove(attempt.id)
      else schedule(ExecutorCrew.RememberMs) { attempts.remove(attempt.id); () }
    if (attempt.hasWorker && processes.running(attempt.id).nonEmpty) endAbandoned(attempt.id)
  }

  private def failureOf(task: TaskContext): Option[String] =
    if (task.isInterrupted()) Some(Evaluations.Killed) else if (task.isFailed()) Some(Evaluations.Failed) else None

  /** Spark has abandoned an evaluation that still runs (it read enough, or was killed), and nothing else ends it:
    * asks its worker to end, and kills a worker that does not. */
  def endAbandoned(attempt: Long): Unit = schedule(AbandonedGraceMs) {
    val still = processes.running(attempt)
    still.foreach(links.terminate)
    if (still.nonEmpty) schedule(KillGraceMs) {
      processes.running(attempt).filter(still.contains).foreach { link =>
        Log.log.warn(s"$link still runs attempt $attempt $KillGraceMs ms after it was asked to end: it is killed")
        links.kill(link)
      }
    }
  }
}

object TaskAttempts {
  /** Set by Python in the thread that runs a topology. Spark copies it to everything that is started there. */
  val TopologyProperty = "spark.stagecrew.topology"
  val ChainProperty = "spark.stagecrew.chain"
  val PlaceProperty = "spark.stagecrew.place"
  val StageAttemptProperty = "spark.stagecrew.stageAttempt"
  private val UnifiedProperty = "spark.sql.execution.udf.unified.execution.enabled"

  val UnifiedMessage: String = s"$UnifiedProperty=true starts Python processes that bypass stagecrew; set it to false"

  /** How long after the end of an attempt its worker may take to report it. */
  private val AbandonedGraceMs = 2000L

  /** How long a worker that was asked to end may take, as in Spark's daemon (worker/graceful_shutdown.py). */
  private val KillGraceMs = 5000L

  private final class HookTimeoutException(text: String) extends Exception(text)
  private final class SideFailed(val description: Description, cause: Throwable) extends Exception(cause) {
    def listener: String = cause match { case failed: OpenFailedException => failed.listener; case _ => "" }
  }
}
