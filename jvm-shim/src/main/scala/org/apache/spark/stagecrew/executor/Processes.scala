package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import wire._

/**
 * The Python processes of an executor: what each has open, the attempt that it runs, and the hook that it is in.
 *
 * Guarded by its own lock. Nothing is called while the lock is held: the caller acts on the result.
 */
final class Processes(ledger: Ledger, nameOf: (String, Int) => (String, String), clock: () => Long) {
  import Processes._

  private val book = mutable.LinkedHashMap.empty[Link, Process]

  def connected(link: Link): Unit = synchronized(book(link) = new Process)

  private def change(link: Link)(f: Process => Unit): Unit = synchronized(book.get(link).foreach(f))

  /** The link is gone: open listeners of its process are lost. */
  def disconnected(link: Link): Unit = change(link) { process =>
    book -= link
    process.open.groupBy(_._1).foreach { case (topology, keys) =>
      keys.foreach { case (_, index) => count(topology, index)(c => c.copy(lost = c.lost + 1)) }
      ledger.change(topology)(c => c.copy(lostProcesses = c.lostProcesses + 1))
    }
    process.deferred.foreach(undefer(_, link))
  }

  /** The link's process begins an attempt that is booked under these topologies. */
  def began(link: Link, attempt: Long, chain: Set[String]): Unit = change(link) { process =>
    process.attempt = Some(attempt)
    process.chain = chain
  }

  def ended(link: Link): Unit = change(link) { process =>
    process.attempt = None
    process.chain = Set.empty
  }

  /** The process knows a topology: it must close it later. */
  def touched(link: Link, topology: String): Unit = change(link)(_.touched += topology)

  def closed(link: Link, topology: String): Unit = change(link) { process =>
    process.touched -= topology
    process.counted -= topology
    if (process.deferred.remove(topology)) undefer(topology, link)
  }

  /** A hook begins. It is overdue at this time. */
  def hookBegan(link: Link, topology: String, index: Int, hook: String, overdueAt: Long): Unit =
    change(link) { process =>
      process.hook = Some(Hook(topology, index, hook, overdueAt))
      process.hookBegan = clock()
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
      val timed = before.took(hook, micros).copy(closes = before.closes + (if (hook == "close") 1 else 0))
      if (failed) timed.failed(error, line) else timed
    }
  }

  /** The links whose hook is overdue, each once: the caller kills their processes. */
  def overdue(): Seq[(Link, Hook, Option[Long])] = synchronized {
    val now = clock()
    book.toSeq.collect {
      case (link, process) if process.hook.exists(_.overdueAt <= now) =>
        val hook = process.hook.get
        process.hook = None
        val micros = (now - process.hookBegan) / 1000
        ledger.span(hook.topology, hook.name, nameOf(hook.topology, hook.index)._1, micros, failed = true)
        count(hook.topology, hook.index) { before =>
          before.took(hook.name, micros).failed(s"${hook.name} ignored its timeout; its process was ended", "")
        }
        (link, hook, process.attempt)
    }
  }

  /** The links that know this topology; `true` for those that run a task of another topology. A task of this
    * topology is about to end: Spark may regard it as ended while Python still leaves it. */
  def touching(topology: String): Seq[(Link, Boolean)] = synchronized {
    book.toSeq.collect { case (link, process) if process.touched(topology) =>
      link -> (process.attempt.nonEmpty && !process.chain(topology))
    }
  }

  /** The links of workers that run this attempt. */
  def running(attempt: Long): Seq[Link] = synchronized {
    book.toSeq.collect { case (link, process) if process.attempt.contains(attempt) && link.role == "worker" => link }
  }

  /** Whether the link knows any topology. */
  def touchesAny(link: Link): Boolean = synchronized(book.get(link).exists(_.touched.nonEmpty))

  def busy: Seq[Link] = synchronized(book.toSeq.collect { case (link, process) if process.attempt.nonEmpty => link })

  def defer(link: Link, topology: String): Unit = change(link) { process =>
    if (process.deferred.add(topology)) ledger.change(topology)(c => c.copy(deferred = c.deferred + link.process))
  }

  def all: Seq[Link] = synchronized(book.keys.toSeq)

  /** The listeners of a topology that a link has not closed, for messages. */
  def unclosed(link: Link, topology: String): Seq[String] = synchronized {
    book.get(link).toSeq.flatMap(_.open.toSeq).collect { case (`topology`, index) => nameOf(topology, index)._1 }
  }

  private def undefer(topology: String, link: Link): Unit =
    ledger.change(topology)(c => c.copy(deferred = c.deferred - link.process))

  private def count(topology: String, index: Int)(f: ListenerCounts => ListenerCounts): Unit = {
    lazy val (name, scope) = nameOf(topology, index)
    ledger.listener(topology, index, name, scope)(f)
  }
}

object Processes {
  final case class Hook(topology: String, index: Int, name: String, overdueAt: Long)

  private final class Process {
    val open = mutable.LinkedHashSet.empty[(String, Int)]
    val touched = mutable.LinkedHashSet.empty[String]
    val deferred = mutable.LinkedHashSet.empty[String]
    val counted = mutable.HashSet.empty[String] // topologies of which it opened something
    var attempt = Option.empty[Long]
    var chain = Set.empty[String] // the topologies of the attempt
    var hook = Option.empty[Hook]
    var hookBegan = 0L
  }
}
