package org.apache.spark.stagecrew
package driver

import java.util.concurrent.ConcurrentHashMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._

/**
 * Pins executors while topologies are closing on them, so that Spark does not remove them as idle. The driver's loop
 * calls `closingBegins`, `closingEnds` and `remind`. The thread of Spark's listener bus calls `notifySpark`: in this
 * thread Spark counts the running tasks of an executor, and a pin looks to Spark like a running task. Spark may drop a
 * posted event. The next event, or the next `remind`, then reports the missed changes, so each executor is unpinned in
 * the end.
 *
 * @param setPinned tells Spark that one topology more (true) or one topology less (false) is closing on an executor
 * @param post posts an event to Spark's listener bus, where its handler calls `notifySpark`
 */
private[stagecrew] final class ExecutorPinning(setPinned: (String, Boolean) => Unit, post: () => Unit) {
  private val closing = ConcurrentHashMap.newKeySet[(String, String)]() // topology, executor
  private val pinned = mutable.LinkedHashSet.empty[(String, String)] // used by the listener bus's thread only
  @volatile private var hasUnreportedChanges = false

  def closingBegins(topology: String, ids: Seq[String]): Unit = change(ids.map(topology -> _).foreach(closing.add))

  def closingEnds(topology: String, executor: String): Unit = change(closing.remove(topology -> executor))

  /** Posts again if an event may have been dropped. Called periodically. */
  def remind(): Unit = if (hasUnreportedChanges) post()

  /** Tells Spark the changes since the last call. Called in the listener bus's thread. */
  def notifySpark(): Unit = {
    hasUnreportedChanges = false
    val now = closing.asScala.toSet
    pinned.toSeq.filterNot(now).foreach { pair => pinned -= pair; setPinned(pair._2, false) }
    now.filterNot(pinned).foreach { pair => pinned += pair; setPinned(pair._2, true) }
  }

  private def change(f: => Any): Unit = {
    f
    hasUnreportedChanges = true
    post()
  }
}
