package org.apache.spark.stagecrew
package listeners

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService}
import executor._, wire._

/** What one topology has open once per executor: JVM listeners, and Python listeners in the agent (`inAgent`: at
  * least one). */
final class Side(val jvm: Option[JvmListeners], val agent: Opened, val inAgent: Boolean)

/** The agent could not open a listener; the text is the traceback. */
final class AgentFailed(text: String) extends Exception(text)

/** The executor-scoped listeners of topologies. Each topology's side opens once, and all its tasks share the
  * outcome. After a failure the next attempt opens it again. */
final class ExecutorListeners(
    settings: Settings, ledger: Ledger, processes: Processes, agent: Agent, pool: ExecutorService,
    where: Description => Where) {
  private val noSide = new Side(None, Opened(), inAgent = false)
  private val sides = new Once[Side](pool)
  private val jvms = new ConcurrentHashMap[String, JvmListeners]() // open ones: they outlive a lost agent
  private val failures = new ConcurrentHashMap[String, Integer]()

  /** Opens the executor's side of a topology, or waits for its open. Throws the exception of the open. */
  def opened(description: Description): Side =
    if (description.listeners.forall(entry => entry.kind == "pickle" && entry.scope.contains("worker")))
      noSide
    else sides.of(description.id) {
      try {
        val side = open(description)
        failures.remove(description.id)
        side
      } catch {
        case error: Throwable =>
          failures.merge(description.id, 1, (a, b) => a + b)
          throw error
      }
    }

  /** The open side of a topology; None while it opens, and after a failure. */
  def of(topology: String): Option[Side] = sides.now(topology)

  /** The open of a topology's side that is in progress. */
  def opening(topology: String): Option[CompletableFuture[Side]] = sides.pending(topology)

  /** How many opens of a topology failed in a row, for the backoff. */
  def failedInARow(topology: String): Int = Option(failures.get(topology)).fold(0)(_.intValue)

  /** The lifetime of a listener that is registered by name is known when an executor has imported it. */
  def lifetimeOf(application: Description, entry: Entry): String = entry.lifetime
    .orElse(opened(application).agent.listeners.get(entry.index).map(_.lifetime)).getOrElse("application")

  /** Forgets a topology's side. Returns its JVM listeners, which the caller closes. */
  def take(topology: String): Option[JvmListeners] = {
    failures.remove(topology)
    sides.forget(topology)
    Option(jvms.remove(topology))
  }

  /** The agent was lost with everything that it had open: the next task opens that again. Returns the topologies. */
  def agentLost(): Seq[String] = {
    val had = sides.keys.filter(of(_).exists(_.inAgent))
    had.foreach(sides.forget)
    had
  }

  private def open(description: Description): Side = {
    val lifetime = description.lifetime
    // An execution's topology has the application's listeners. Each opens in one of the two, by its lifetime, which the
    // agent finds out for a name.
    val mine = description.listeners.filter(entry => lifetime.forall(wanted => entry.lifetime.forall(_ == wanted)))
    val jvm = mine.filter(_.kind == "jvm")
    if (jvm.nonEmpty && !jvms.containsKey(description.id)) {
      val listeners = new JvmListeners(jvm, where(description), settings, ledger, pool)
      listeners.open()
      jvms.put(description.id, listeners)
    }
    try {
      val forAgent = mine.exists(e => e.kind == "name" || (e.kind == "pickle" && e.scope.contains("executor")))
      val (answer, inAgent) = if (!forAgent) (Opened(), false) else openInAgent(description, lifetime)
      new Side(Option(jvms.get(description.id)), answer, inAgent)
    } catch {
      case error: Throwable =>
        Option(jvms.remove(description.id)).foreach(_.close())
        throw error
    }
  }

  private def openInAgent(description: Description, lifetime: Option[String]): (Opened, Boolean) = {
    val answer = agent.open(description)(processes.touched(_, description.id))
    val opened = answer.error.isEmpty &&
      answer.listeners.values.exists(one => one.scope == "executor" && lifetime.forall(_ == one.lifetime))
    if (!opened) {
      agent.current.foreach(processes.closed(_, description.id))
      if (answer.error.isEmpty) agent.retire(processes.touchesAny) // after a failure the next attempt needs it
    }
    answer.error.foreach(error => throw new AgentFailed(error))
    (answer, opened)
  }
}
