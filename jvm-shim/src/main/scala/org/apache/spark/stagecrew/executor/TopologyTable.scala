package org.apache.spark.stagecrew
package executor

import scala.collection.mutable

/**
 * The attempts of each topology on one executor: a pure state machine, without Spark, sockets or a clock.
 *
 * {{{
 *   active --end--> closing --(no attempt left)--> quiescent --forget--> closed
 * }}}
 *
 * Live attempts are a set, never a counter, and `begin` and `finish` are idempotent. An attempt that begins for a
 * closing or closed topology is not counted in it, so a quiescent topology never gets another attempt. Spark does start
 * such tasks: a map stage that two jobs share runs with the properties of the first job. Thread-safe.
 */
final class TopologyTable {
  import TopologyTable._

  private val chains = mutable.HashMap.empty[Long, Seq[String]] // by live attempt
  private val closing = mutable.HashSet.empty[String]
  private val closed = new Bounded[String, Unit](RememberedClosed)()

  /** An attempt begins in these topologies, outermost first. It is counted in those that are active, which are
    * returned. */
  def begin(attempt: Long, chain: Seq[String]): Seq[String] =
    synchronized(chains.getOrElseUpdate(attempt, chain.filter(active)))

  /** The attempt has ended. Returns the topologies that this made quiescent. */
  def finish(attempt: Long): Seq[String] = synchronized {
    chains.remove(attempt).getOrElse(Nil).filter(topology => closing(topology) && attemptsOf(topology).isEmpty)
  }

  /** The topology has ended. Returns whether it is quiescent. */
  def end(topology: String): Boolean = synchronized {
    if (!closed.contains(topology)) closing += topology
    attemptsOf(topology).isEmpty
  }

  /** A quiescent topology is closed now. */
  def forget(topology: String): Unit = synchronized {
    require(attemptsOf(topology).isEmpty, s"topology $topology has live attempts")
    closing -= topology
    closed(topology) = ()
  }

  /** Whether the topology has not ended here. */
  def active(topology: String): Boolean = synchronized(!closing.contains(topology) && !closed.contains(topology))

  def isClosed(topology: String): Boolean = synchronized(closed.contains(topology))

  /** The live attempts of a topology. */
  def attemptsOf(topology: String): Set[Long] =
    synchronized(chains.collect { case (attempt, chain) if chain.contains(topology) => attempt }.toSet)

  /** The topologies that an attempt is counted in. */
  def chainOf(attempt: Long): Seq[String] = synchronized(chains.getOrElse(attempt, Nil))

  /** Topologies that have live attempts or are closing. */
  def live: Set[String] = synchronized(chains.values.flatten.toSet ++ closing)
}

object TopologyTable {
  /** How many closed topologies an executor remembers. For older ones it asks the driver. */
  val RememberedClosed = 10000
}
