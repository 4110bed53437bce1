package org.apache.spark.stagecrew
package executor

import java.util.concurrent.ConcurrentHashMap
import org.apache.spark.TaskContext
import listeners._, spark._, wire._

/**
 * One attempt of a Spark task on this executor, from its start until no worker can send messages about it any more.
 * `topology` is the id in the local property of the task. `chain` are the topologies that the attempt is counted in,
 * outermost first.
 */
private[stagecrew] final class TaskAttempt(
    val task: TaskContext, val topology: Option[String], val chain: Seq[String]) {
  val id: Long = task.taskAttemptId()
  val began: Long = System.nanoTime()
  /** Whether `topology` had already ended when the attempt began. If so, the attempt's partitions belong to the
    * application. */
  val topologyHadEnded: Boolean = topology.exists(!chain.contains(_))
  /** Whether its function may be bound to an operator. */
  var mayUseOperators = false
  /** Whether its worker has listeners. If so, the worker reports the beginning and the end of the attempt. */
  var workerHasListeners = false
  @volatile var ended = false
  /** Why it failed. It is `Evaluations.Killed` as soon as Spark has asked the attempt to end. */
  @volatile var failure = Option.empty[String]
  /** Why the executor killed its worker. */
  @volatile var workerKillReason = Option.empty[String]
  private var enteredScopes = List.empty[(JvmListeners, List[(Entry, AutoCloseable)])]

  /** Enters the scopes of JVM listeners. The task runs inside them. */
  def enter(listeners: JvmListeners): Unit = enteredScopes = (listeners -> listeners.decorate(task)) :: enteredScopes
  def leave(): Unit = enteredScopes.foreach { case (listeners, scopes) => listeners.leave(scopes) }

  def name: String = s"stage ${task.stageId()}.${task.stageAttemptNumber()} partition ${task.partitionId()}" +
    s" attempt ${task.taskAttemptId()}"
}

/** The task attempts of an executor: their start, interruption and end, in the threads of the tasks. */
private[stagecrew] final class TaskAttempts(crew: ExecutorCrew) extends Evaluations.Attempts {
  import TaskAttempts._
  import crew.{closings, descriptions, evaluations, executor, executorListeners, ledger, links, partitions}
  import crew.{processes, schedule, table}

  private val attempts = new ConcurrentHashMap[Long, TaskAttempt]()

  def get(id: Long): Option[TaskAttempt] = Option(attempts.get(id))

  override def runs(attempt: Long): Boolean = table.chainOf(attempt).nonEmpty
  override def failureReason(attempt: Long): Option[String] = get(attempt).flatMap(_.failure)
  override def stageOf(attempt: Long): (Int, Int) =
    get(attempt).fold((0, 0))(found => (found.task.stageAttemptNumber(), found.task.numPartitions()))

  /** The innermost named topology of the attempt, which owns its partitions; the application if that topology had
    * already ended. None for an attempt outside named topologies. */
  def ownerOf(attempt: Long): Option[String] = table.chainOf(attempt).lastOption
    .filterNot(topology => topology == Description.Application || topology.startsWith(Description.ExecutionPrefix))
    .orElse(get(attempt).filter(found => found.topologyHadEnded && !found.ended).map(_ => Description.Application))

  // -- The start

  /** Starts an attempt. Never throws, because Spark would only log the exception and run the body anyway. Instead, the
    * attempt ends without its body, and the driver receives the error. */
  def started(task: TaskContext): Unit = try {
    val topology = Option(task.getLocalProperty(TopologyProperty))
    if (topology.nonEmpty || !applicationHasNoListenersOrOperators) begin(task, topology)
  } catch {
    // Spark has asked the attempt to end, so its body does not run.
    case error: Throwable if task.isInterrupted() =>
      Log.log.debug(s"attempt ${task.taskAttemptId()} was killed while it began", error)
    case failed: OpenFailure => listenerFailed(task, failed)
    case error: Throwable => reject(task, Description.Application, "",
      s"stagecrew: this task could not be started on executor $executor: ${TaskRejection.trace(error)}")
  }

  private def begin(task: TaskContext, topology: Option[String]): Unit = {
    val topologies = chain(task, topology)
    val attempt = new TaskAttempt(task, topology, table.begin(task.taskAttemptId(), topologies.map(_.id)))
    attempts.put(attempt.id, attempt)
    task.addTaskCompletionListener[Unit]((_: TaskContext) => completed(attempt))
    val described = topologies.filter(description => attempt.chain.contains(description.id))
    prepareAddressFile(attempt, topologies.head)
    openListeners(attempt, described)
    prepareWorker(attempt, described)
    if (attempt.mayUseOperators || attempt.workerHasListeners) addInterruptListener(attempt)
  }

  /** If the application has neither listeners nor operators, tasks outside named topologies can be ignored. */
  private def applicationHasNoListenersOrOperators: Boolean = descriptions.describe(Description.Application)
    .exists(application => application.listeners.isEmpty && !application.coordinated)

  /** The topologies of a task, outermost first: the application's, the execution's (if a listener needs it), and the
    * named ones. */
  private def chain(task: TaskContext, topology: Option[String]): Seq[Description] = {
    val application = descriptions.describe(Description.Application).getOrElse(
      throw new IllegalStateException("the plugin on the driver has stopped"))
    val forExecutions = application.listeners.exists { entry =>
      entry.forExecution || (entry.kind == "name" && executorListeners.lifetimeOf(application, entry) == "execution")
    }
    val execution = if (forExecutions) descriptions.execution(task) else None
    application +: (execution.toSeq ++ topology.toSeq.flatMap(descriptions.named))
  }

  /** A bound function finds its channel through the file named in `AddressFileProperty`. It is not known which tasks
    * call bound functions, so the property is set for every task that might. */
  private def prepareAddressFile(attempt: TaskAttempt, application: Description): Unit = {
    attempt.mayUseOperators = attempt.topology.exists(attempt.chain.contains(_)) || application.coordinated
    if (attempt.mayUseOperators) {
      set(attempt, AddressFileProperty, crew.addressFile.toString)
      crew.startEvaluations() // before the worker starts, so that the driver's Python has time to connect directly
    }
  }

  private def openListeners(attempt: TaskAttempt, described: Seq[Description]): Unit =
    if (described.exists(_.listeners.nonEmpty)) {
      if ("true" == attempt.task.getLocalProperty(UnifiedProperty))
        throw new UnsupportedOperationException(UnifiedMessage)
      described.foreach { description =>
        try executorListeners.open(description).jvm.foreach(attempt.enter)
        catch { case error: Throwable => throw new OpenFailure(description, error) }
      }
    }

  /** Sets the local properties from which the worker learns the topologies. With a local master, tasks share the
    * properties, so a chain that a previous attempt left there is removed. */
  private def prepareWorker(attempt: TaskAttempt, described: Seq[Description]): Unit = {
    attempt.workerHasListeners = described.exists(_.listeners.exists(_.python))
    if (attempt.workerHasListeners) {
      set(attempt, ChainProperty, attempt.chain.mkString(" "))
      set(attempt, AddressFileProperty, crew.addressFile.toString)
      set(attempt, StageAttemptProperty, attempt.task.stageAttemptNumber().toString)
      attempt.task.addTaskFailureListener((_: TaskContext, error: Throwable) =>
        attempt.workerKillReason.foreach(text => error.addSuppressed(new HookTimeoutException(text))))
    } else SparkInternals.localProperties(attempt.task).remove(ChainProperty)
  }

  private def set(attempt: TaskAttempt, name: String, value: String): Unit =
    SparkInternals.localProperties(attempt.task).setProperty(name, value)

  /** When Spark asks the attempt to end, its worker receives SIGTERM (Spark kills the worker after
    * spark.python.task.killTimeout), and its evaluations end. A worker that has not begun the attempt receives SIGTERM
    * when it does, and a worker without listeners receives none. */
  private def addInterruptListener(attempt: TaskAttempt): Unit = {
    SparkVersion.onInterrupt(attempt.task, crew.later(PollMs, "polling an attempt")) {
      attempt.failure = Some(Evaluations.Killed)
      processes.running(attempt.id).foreach(links.terminate)
      evaluations.foreach(_.interrupted(attempt.id))
    }
  }

  private def listenerFailed(task: TaskContext, failed: OpenFailure): Unit = {
    val error = failed.getCause match {
      case error: AgentOpenFailedException => error.getMessage
      case open: HookFailedException => s"${open.getMessage}\n${TaskRejection.trace(open.getCause)}"
      case other => TaskRejection.trace(other)
    }
    reject(task, failed.description.id, failed.listener,
      s"stagecrew: a listener of topology '${failed.description.name}' could not be opened" +
        s" on executor $executor:\n$error")
  }

  /** Ends the attempt without running the task's body, and reports it to the driver. To Spark, the attempt was killed;
    * it has not failed. */
  private def reject(task: TaskContext, topology: String, listener: String, text: String): Unit =
    TaskRejection.reject(task, executor, topology, listener, text, executorListeners.failuresInARow(topology))(
      crew.sendToDriver)

  // -- The end

  private def completed(attempt: TaskAttempt): Unit = {
    attempt.leave()
    if (attempt.topology.nonEmpty) partitions.attemptEnded(attempt.id, SparkInternals.updatedBlocks(attempt.task))
    val failed = failureOf(attempt.task)
    // This must precede `ended = true`, because some of the worker's messages may still be unread.
    if (attempt.mayUseOperators) attempt.failure = failed.orElse(attempt.failure)
    attempt.ended = true
    // This must precede `finish`: afterwards the topologies may send their last report.
    attempt.chain.lastOption.foreach(
      ledger.span(_, "task", attempt.name, (System.nanoTime() - attempt.began) / 1000, failed.nonEmpty))
    val quiescent = table.finish(attempt.id)
    evaluations.foreach(_.attemptEnded(attempt.id, failed))
    if (quiescent.nonEmpty) closings.changed()
    if (attempt.failure.isEmpty) attempts.remove(attempt.id)
      else schedule(ExecutorCrew.RememberMs) { attempts.remove(attempt.id); () }
    if (attempt.workerHasListeners && processes.running(attempt.id).nonEmpty) endAbandoned(attempt.id)
  }

  private def failureOf(task: TaskContext): Option[String] =
    if (task.isInterrupted()) Some(Evaluations.Killed) else if (task.isFailed()) Some(Evaluations.Failed) else None

  /** Terminates the worker of an attempt that has ended in Spark (Spark has read enough rows, or the attempt was
    * killed), but is still running in Python. The worker receives SIGTERM, and is killed if it does not end in time. */
  def endAbandoned(attempt: Long): Unit = schedule(AbandonedGraceMs) {
    val remaining = processes.running(attempt)
    remaining.foreach(links.terminate)
    if (remaining.nonEmpty) schedule(KillGraceMs) {
      processes.running(attempt).filter(remaining.contains).foreach { link =>
        Log.log.warn(s"$link is still running attempt $attempt $KillGraceMs ms after SIGTERM; killing it")
        links.kill(link)
      }
    }
  }
}

object TaskAttempts {
  /** The local property with the topology's id. Python sets it in the thread that runs the topology, and Spark passes
    * it on to the jobs that the thread starts. */
  val TopologyProperty = "spark.stagecrew.topology"

  /** The id of the topology in the properties of a job or a stage. Spark passes null if there are no properties. */
  def topologyIn(properties: java.util.Properties): Option[String] =
    Option(properties).flatMap(p => Option(p.getProperty(TopologyProperty)))

  val ChainProperty = "spark.stagecrew.chain"
  val AddressFileProperty = "spark.stagecrew.addressFile"
  val StageAttemptProperty = "spark.stagecrew.stageAttempt"
  private val UnifiedProperty = "spark.sql.execution.udf.unified.execution.enabled"

  val UnifiedMessage: String = s"$UnifiedProperty=true starts Python processes that bypass stagecrew; set it to false"

  /** How often an attempt is polled, if Spark does not report that it asks the attempt to end. */
  private val PollMs = 100L

  /** How long a worker may take to report the end of an attempt after Spark has ended it. */
  private val AbandonedGraceMs = 2000L

  /** How long a worker may take to end after SIGTERM, as in the daemon (worker/graceful_shutdown.py). */
  private val KillGraceMs = 5000L

  private final class HookTimeoutException(text: String) extends Exception(text)
  private final class OpenFailure(val description: Description, cause: Throwable) extends Exception(cause) {
    def listener: String = cause match { case failed: HookFailedException => failed.listener; case _ => "" }
  }
}
