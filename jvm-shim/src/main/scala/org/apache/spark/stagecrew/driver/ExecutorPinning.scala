package org.apache.spark.stagecrew
package driver

import java.util.concurrent.ConcurrentHashMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._

/**
 * Pins executors while topologies are closing on them, so that Spark does not remove them as idle. The driver's loop
 * makes the changes. Spark is notified in the thread of its listeners, where Spark also counts tasks. A posted event
 * may be dropped. The next event or reminder then makes up for it, so each pin is followed by its removal.
 *
 * @param pin tells Spark that a topology begins to close on an executor (true), or has closed there (false)
 * @param post posts an event that calls `notifySpark` in the listeners' thread. The event may be dropped
 */
private[stagecrew] final class ExecutorPinning(pin: (String, Boolean) => Unit, post: () => Unit) {
  private val closing = ConcurrentHashMap.newKeySet[(String, String)]() // topology, executor
  private val pinned = mutable.LinkedHashSet.empty[(String, String)] // used by the listeners' thread only
  @volatile private var outdated = false

  def begins(topology: String, executors: Seq[String]): Unit = change(executors.map(topology -> _).foreach(closing.add))

  def ends(topology: String, executor: String): Unit = change(closing.remove(topology -> executor))

  /** Posts again if an event may have been dropped. Called periodically. */
  def remind(): Unit = if (outdated) post()

  /** Tells Spark the changes since the last call. Called in the listeners' thread. */
  def notifySpark(): Unit = {
    outdated = false
    val now = closing.asScala.toSet
    pinned.toSeq.filterNot(now).foreach { pair => pinned -= pair; pin(pair._2, false) }
    now.filterNot(pinned).foreach { pair => pinned += pair; pin(pair._2, true) }
  }

  private def change(f: => Any): Unit = {
    f
    outdated = true
    post()
  }
}
