package org.apache.spark.stagecrew

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutionException, ExecutorService}
import scala.jdk.CollectionConverters._

/** What one topology has open once per executor: JVM listeners, and Python ones in the agent (`inAgent`: it has some). */
final class Side(val jvm: Option[JvmListeners], val agent: Opened, val inAgent: Boolean)

/** The agent said that a listener could not be opened: its traceback. */
final class AgentFailed(text: String) extends Exception(text)

/**
 * The sides of an executor: each is opened once, whichever task comes first, and all tasks share the outcome. One that
 * failed is forgotten, so that the next attempt opens it anew.
 */
final class ExecutorListeners(settings: Settings, ledger: Ledger, processes: Processes, agent: Agent, pool: ExecutorService, where: Description => Where) {
  import ExecutorListeners._

  private val sides = new ConcurrentHashMap[String, CompletableFuture[Side]]()
  private val jvms = new ConcurrentHashMap[String, JvmListeners]() // open ones: they outlive an agent that is lost
  private val failures = new ConcurrentHashMap[String, Integer]()

  /** Opens the executor's side of a topology, or shares the outcome of whoever opens it now. Throws what the open threw. */
  def opened(description: Description): Side = {
    if (description.listeners.forall(entry => entry.kind == "pickle" && entry.scope.contains("worker"))) return NoSide
    val mine = new CompletableFuture[Side]()
    val first = sides.putIfAbsent(description.id, mine)
    val side = if (first != null) first else {
      // Not in the task's thread: a task that is killed meanwhile must not take the open of all others with it.
      pool.execute(() => {
        try {
          mine.complete(open(description))
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

  /** What is open of a topology; None while it opens, and when it failed. */
  def of(topology: String): Option[Side] =
    Option(sides.get(topology)).filter(side => side.isDone && !side.isCompletedExceptionally).map(_.get())

  /** The open of a topology's side that is under way. */
  def opening(topology: String): Option[CompletableFuture[Side]] = Option(sides.get(topology)).filterNot(_.isDone)

  /** How many opens of a topology failed in a row: for the back-off. */
  def failedInARow(topology: String): Int = Option(failures.get(topology)).map(_.intValue).getOrElse(0)

  /** A name's lifetime is known when an executor has imported it; the application's side does that. */
  def lifetimeOf(application: Description, entry: Entry): String = entry.lifetime.getOrElse(
    opened(application).agent.listeners.get(entry.index).map(_.lifetime).getOrElse("application"))

  /** Takes a topology's side away and answers its JVM listeners, which are to be closed. */
  def take(topology: String): Option[JvmListeners] = {
    failures.remove(topology)
    sides.remove(topology)
    Option(jvms.remove(topology))
  }

  /** The agent was lost, and what it had open with it: the next task opens that again. Answers the topologies. */
  def agentLost(): Seq[String] = {
    val had = sides.keySet.asScala.filter(topology => of(topology).exists(_.inAgent)).toSeq
    had.foreach(sides.remove)
    had
  }

  private def open(description: Description): Side = {
    val execution = description.id.startsWith(Description.ExecutionPrefix)
    val lifetime =
      if (execution) Some("execution") else if (description.id == Description.Application) Some("application") else None
    // The topology of an execution has the application's listeners: each opens in one of both, by its lifetime. That of a
    // name is known when an agent has imported it.
    val mine = description.listeners.filter(entry => lifetime.forall(wanted => entry.lifetime.forall(_ == wanted)))
    val jvm = mine.filter(_.kind == "jvm")
    if (jvm.nonEmpty && !jvms.containsKey(description.id)) {
      val listeners = new JvmListeners(jvm, where(description), settings, ledger, pool)
      listeners.open()
      jvms.put(description.id, listeners)
    }
    try {
      val forAgent = mine.exists(e => e.kind == "name" || (e.kind == "pickle" && e.scope.contains("executor")))
      val (answer, inAgent) = if (!forAgent) (Opened(Map.empty, None), false) else openInAgent(description, lifetime)
      new Side(Option(jvms.get(description.id)), answer, inAgent)
    } catch {
      case error: Throwable =>
        Option(jvms.remove(description.id)).foreach(_.close())
        throw error
    }
  }

  private def openInAgent(description: Description, lifetime: Option[String]): (Opened, Boolean) = {
    val answer = agent.open(description, lifetime)(processes.touched(_, description.id))
    val opened = answer.error.isEmpty &&
      answer.listeners.values.exists(one => one.scope == "executor" && lifetime.forall(_ == one.lifetime))
    if (!opened) {
      agent.current.foreach(processes.closed(_, description.id))
      if (answer.error.isEmpty) agent.retire(processes.touchesAny) // after a failure the next attempt wants it again
    }
    answer.error.foreach(error => throw new AgentFailed(error))
    (answer, opened)
  }
}

object ExecutorListeners {
  private val NoSide = new Side(None, Opened(Map.empty, None), inAgent = false)
}
