package org.apache.spark.stagecrew
package driver

import java.util.concurrent.ConcurrentHashMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._

/**
 * The executors on which topologies close, which Spark must not regard as idle. The driver's loop makes changes; Spark
 * is notified in the thread of its listeners, where it counts tasks. A posted event may be dropped: each later one, or
 * a reminder, makes up for it, so that every begin is followed by its end.
 *
 * @param pin notifies Spark that a topology begins to close on an executor, or has ended there
 * @param post has `tell` called in that thread, soon or never
 */
private[stagecrew] final class ExecutorPinning(pin: (String, Boolean) => Unit, post: () => Unit) {
  private val closing = ConcurrentHashMap.newKeySet[(String, String)]() // topology, executor
  private val told = mutable.LinkedHashSet.empty[(String, String)] // of the listeners' thread
  @volatile private var behind = false

  def begins(topology: String, executors: Seq[String]): Unit = change(executors.map(topology -> _).foreach(closing.add))

  def ends(topology: String, executor: String): Unit = change(closing.remove(topology -> executor))

  /** Called from time to time. */
  def remind(): Unit = if (behind) post()

  def tell(): Unit = {
    behind = false
    val now = closing.asScala.toSet
    told.toSeq.filterNot(now).foreach { one => told -= one; pin(one._2, false) }
    now.filterNot(told).foreach { one => told += one; pin(one._2, true) }
  }

  private def change(f: => Any): Unit = {
    f
    behind = true
    post()
  }
}
