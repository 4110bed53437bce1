package org.apache.spark.stagecrew
package listeners

import java.util.concurrent.{CompletableFuture, ConcurrentHashMap, ExecutorService}
import executor._, wire._

/** The listeners of one topology that are open on this executor: JVM listeners, and Python listeners in the agent.
  * `inAgent` says whether at least one is open in the agent. */
final class OpenListeners(val jvm: Option[JvmListeners], val agent: Opened, val inAgent: Boolean)

/** The agent could not open a listener. The message is the Python traceback. */
final class AgentOpenFailedException(traceback: String) extends Exception(traceback)

/** Opens the executor-scoped listeners of each topology once. All tasks of the topology share the outcome. After a
  * failure, the next task tries again. */
final class ExecutorListeners(
    settings: Settings, ledger: Ledger, processes: Processes, agent: Agent, pool: ExecutorService,
    contextOf: Description => ListenerContext) {
  private val none = new OpenListeners(None, Opened()(), inAgent = false)
  private val opened = new Once[OpenListeners](pool)
  private val jvmListeners = new ConcurrentHashMap[String, JvmListeners]() // the open ones: they outlive a lost agent
  private val failures = new ConcurrentHashMap[String, Integer]()

  /** Opens the listeners of a topology, or waits until another thread has opened them. Throws what `open` threw. */
  def open(description: Description): OpenListeners =
    if (!needsOpen(description)) none
    else opened.of(description.id) {
      try {
        val listeners = openAll(description)
        failures.remove(description.id)
        listeners
      } catch {
        case error: Throwable =>
          failures.merge(description.id, 1, (a, b) => a + b)
          throw error
      }
    }

  /** Whether a listener of a topology may open on this executor, outside of its workers. */
  def needsOpen(description: Description): Boolean =
    description.listeners.exists(entry => entry.kind != "pickle" || !entry.scope.contains("worker"))

  /** The open listeners of a topology. None until all of them are open, and after a failure. */
  def of(topology: String): Option[OpenListeners] = opened.computed(topology)

  /** The outcome of a topology's listeners that are being opened. */
  def opening(topology: String): Option[CompletableFuture[OpenListeners]] = opened.pending(topology)

  /** How many times in a row the listeners of a topology could not be opened, for the backoff. */
  def failuresInARow(topology: String): Int = Option(failures.get(topology)).fold(0)(_.intValue)

  /** The lifetime of a listener: "application" or "execution". Only the agent knows that of a listener that is
    * registered by name. Then this opens the application's listeners, and waits. */
  def lifetimeOf(application: Description, entry: Entry): String = entry.lifetime
    .orElse(open(application).agent.listeners.find(_.index == entry.index).map(_.lifetime)).getOrElse("application")

  /** Removes the open listeners of a topology. Returns its JVM listeners, which the caller must close. */
  def remove(topology: String): Option[JvmListeners] = {
    failures.remove(topology)
    opened.forget(topology)
    Option(jvmListeners.remove(topology))
  }

  /** Called when the agent was lost. Forgets the listeners that were open in it, so that the next task opens them
    * again. Returns the ids of their topologies. */
  def agentLost(): Seq[String] = {
    val lost = opened.keys.filter(of(_).exists(_.inAgent))
    lost.foreach(opened.forget)
    lost
  }

  private def openAll(description: Description): OpenListeners = {
    val lifetime = description.lifetime
    // An execution (SQL query, RDD job or streaming query) has a topology with the same listeners as the application
    // topology. Each listener opens in one of these two, as its lifetime says. The agent knows the lifetime of a
    // listener that is registered by name.
    val entries = description.listeners.filter(entry => lifetime.forall(own => entry.lifetime.forall(_ == own)))
    val jvm = entries.filter(_.kind == "jvm")
    val opensJvm = jvm.nonEmpty && !jvmListeners.containsKey(description.id)
    if (opensJvm) {
      val listeners = new JvmListeners(jvm, contextOf(description), settings, ledger, pool)
      listeners.open()
      jvmListeners.put(description.id, listeners)
    }
    try {
      val forAgent = entries.exists(e => e.kind == "name" || (e.kind == "pickle" && e.scope.contains("executor")))
      val (reply, inAgent) = if (!forAgent) (none.agent, false) else openInAgent(description, lifetime)
      new OpenListeners(Option(jvmListeners.get(description.id)), reply, inAgent)
    } catch {
      case error: Throwable =>
        // After the loss of an agent, running tasks may still use the JVM listeners.
        if (opensJvm) Option(jvmListeners.remove(description.id)).foreach(_.close())
        throw error
    }
  }

  private def openInAgent(description: Description, lifetime: Option[String]): (Opened, Boolean) = {
    val reply = agent.open(description)(processes.addTopology(_, description.id))
    val isOpen = reply.error.isEmpty && reply.listeners.exists(listener =>
      listener.scope == "executor" && lifetime.forall(_ == listener.lifetime))
    if (!isOpen) {
      agent.current.foreach(processes.closed(_, description.id))
      if (reply.error.isEmpty) agent.retire(processes.hasTopologies) // after a failure, the next task needs the agent
    }
    reply.error.foreach(error => throw new AgentOpenFailedException(error))
    (reply, isOpen)
  }
}
