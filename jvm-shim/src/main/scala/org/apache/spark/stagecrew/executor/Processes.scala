package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import ui._, wire._

/**
 * The Python processes of an executor: their open listeners, and the attempt and the hook that each one runs.
 *
 * Thread-safe. Nothing is sent to a process while the lock is held: the caller acts on the result.
 */
final class Processes(ledger: Ledger, nameOf: (String, Int) => (String, String), clock: () => Long) {
  import Processes._

  private val processes = mutable.LinkedHashMap.empty[Link, Process]

  def connected(link: Link): Unit = synchronized(processes(link) = new Process)

  private def change(link: Link)(f: Process => Unit): Unit = synchronized(processes.get(link).foreach(f))

  /** The link is closed: the open listeners of its process, and its hook, are lost. */
  def disconnected(link: Link): Unit = change(link) { process =>
    processes -= link
    process.hook.foreach { case (hook, began) =>
      ledger.span(hook.topology, hook.name, nameOf(hook.topology, hook.index)._1, (clock() - began) / 1000,
        failed = true, lost = true)
    }
    process.open.groupBy(_._1).foreach { case (topology, keys) =>
      keys.foreach { case (_, index) => count(topology, index)(c => c.copy(lost = c.lost + 1)) }
      ledger.change(topology)(c => c.copy(lostProcesses = c.lostProcesses + 1))
    }
    process.deferred.foreach(endDeferral(_, link))
  }

  /** The process begins an attempt that is counted in these topologies. */
  def began(link: Link, attempt: Long, chain: Set[String]): Unit = change(link)(_.running = Some(attempt -> chain))

  /** The process has ended its attempt. */
  def ended(link: Link): Unit = change(link)(_.running = None)

  /** The process has the description of a topology, and must close the topology later. */
  def addTopology(link: Link, topology: String): Unit = change(link)(_.topologies += topology)

  def closed(link: Link, topology: String): Unit = change(link) { process =>
    process.topologies -= topology
    process.counted -= topology
    if (process.deferred.remove(topology)) endDeferral(topology, link)
  }

  /** A hook begins. It is overdue from `overdueAt` on. */
  def hookBegan(link: Link, topology: String, index: Int, hook: String, overdueAt: Long): Unit =
    change(link) { process =>
      process.hook = Some(Hook(topology, index, hook, overdueAt) -> clock())
      if (hook == "open") {
        process.open += topology -> index
        if (process.counted.add(topology)) ledger.change(topology)(c => c.copy(processes = c.processes + 1))
        count(topology, index)(c => c.copy(opens = c.opens + 1))
      }
    }

  def hookEnded(
      link: Link, topology: String, index: Int, hook: String, failed: Boolean, micros: Long, error: String,
      line: String = ""): Unit = change(link) { process =>
    if (hook == "close") process.open -= topology -> index
    if (hook != "decorate") {
      process.hook = None
      ledger.span(topology, hook, nameOf(topology, index)._1, micros, failed)
    }
    count(topology, index) { before =>
      val timed = before.withDuration(hook, micros).copy(closes = before.closes + (if (hook == "close") 1 else 0))
      if (failed) timed.withFailure(error, line) else timed
    }
  }

  /** The running hooks of all processes, oldest first. */
  def runningHooks: Vector[RunningHook] = synchronized {
    val (now, nanos) = (System.currentTimeMillis(), clock())
    processes.valuesIterator.flatMap(_.hook).toVector.map { case (hook, began) =>
      RunningHook(hook.topology, Span("", hook.name, nameOf(hook.topology, hook.index)._1,
        now - (nanos - began) / 1000000L, 0, failed = false))
    }.sortBy(_.span.started)
  }

  /** The links whose hook is overdue, with the hook and the attempt. Each is returned once: the caller must kill the
    * process. */
  def takeOverdue(): Seq[(Link, Hook, Option[Long])] = synchronized {
    val now = clock()
    processes.toSeq.collect {
      case (link, process) if process.hook.exists(_._1.overdueAt <= now) =>
        val (hook, began) = process.hook.get
        process.hook = None
        val micros = (now - began) / 1000
        ledger.span(hook.topology, hook.name, nameOf(hook.topology, hook.index)._1, micros, failed = true)
        count(hook.topology, hook.index) { before =>
          before.withDuration(hook.name, micros)
            .withFailure(s"${hook.name} ignored its timeout; its process was killed", "")
        }
        (link, hook, process.running.map(_._1))
    }
  }

  /** The links whose processes have this topology, each with `true` if the process is running a task outside this
    * topology. A task of this topology does not count, because it is about to end: Spark may see its end before Python
    * does. */
  def linksOf(topology: String): Seq[(Link, Boolean)] = synchronized {
    processes.toSeq.collect { case (link, process) if process.topologies(topology) =>
      link -> process.running.exists { case (_, chain) => !chain(topology) }
    }
  }

  /** The links of workers that are running this attempt. */
  def running(attempt: Long): Seq[Link] = synchronized {
    processes.toSeq.collect {
      case (link, process) if process.running.exists(_._1 == attempt) && link.role == "worker" => link
    }
  }

  /** The attempt that the worker with this process id is running, if it has listeners. */
  def attemptOf(pid: Long): Option[Long] = synchronized {
    processes.collectFirst { case (link, process) if link.pid == pid && process.running.nonEmpty =>
      process.running.get._1
    }
  }

  /** Whether the process has any topology. */
  def hasTopologies(link: Link): Boolean = synchronized(processes.get(link).exists(_.topologies.nonEmpty))

  /** The links whose processes are running a task. */
  def busy: Seq[Link] = synchronized(processes.toSeq.collect { case (link, it) if it.running.nonEmpty => link })

  /** The process will close this topology after its current task. */
  def defer(link: Link, topology: String): Unit = change(link) { process =>
    if (process.deferred.add(topology)) ledger.change(topology)(c => c.copy(deferred = c.deferred + link.process))
  }

  def all: Seq[Link] = synchronized(processes.keys.toSeq)

  /** The names of the listeners of a topology that a process has not closed, for messages. */
  def unclosed(link: Link, topology: String): Seq[String] = synchronized {
    processes.get(link).toSeq.flatMap(_.open.toSeq).collect { case (`topology`, index) => nameOf(topology, index)._1 }
  }

  private def endDeferral(topology: String, link: Link): Unit =
    ledger.change(topology)(c => c.copy(deferred = c.deferred - link.process))

  private def count(topology: String, index: Int)(f: ListenerCounts => ListenerCounts): Unit = {
    val (name, scope) = nameOf(topology, index)
    ledger.listener(topology, index, name, scope)(f)
  }
}

object Processes {
  final case class Hook(topology: String, index: Int, name: String, overdueAt: Long)

  private final class Process {
    val open = mutable.LinkedHashSet.empty[(String, Int)]
    val topologies = mutable.LinkedHashSet.empty[String]
    val deferred = mutable.LinkedHashSet.empty[String]
    val counted = mutable.HashSet.empty[String] // the topologies whose number of processes includes this one
    var running = Option.empty[(Long, Set[String])] // its attempt, and the topologies of the attempt
    var hook = Option.empty[(Hook, Long)] // with the time when it began
  }
}
