package org.apache.spark.stagecrew
package partitions

import scala.collection.mutable
import wire._

/**
 * Which topologies use which stored datasets (shuffles, or cached datasets, by Spark's ids): a pure state machine.
 *
 * A topology uses the datasets that its jobs write or read. The application, which ends with Spark, uses those of jobs
 * of no topology, and those that are kept.
 */
final class DatasetUsage {
  private val users = mutable.HashMap.empty[Int, mutable.LinkedHashSet[String]]
  // Without the application's, which would grow without end.
  private val used = mutable.HashMap.empty[String, mutable.LinkedHashSet[Int]]

  def use(topology: String, datasets: Iterable[Int]): Unit = datasets.foreach { dataset =>
    users.getOrElseUpdate(dataset, mutable.LinkedHashSet.empty) += topology
    if (topology != Description.Application) used.getOrElseUpdate(topology, mutable.LinkedHashSet.empty) += dataset
  }

  /** The topology has ended. Returns the datasets that only it used, and for each other dataset a topology that uses
    * it. */
  def end(topology: String): (Seq[Int], Map[Int, String]) = {
    val mine = used.remove(topology).toSeq.flatten
    mine.foreach(dataset => users.get(dataset).foreach { by =>
      by -= topology
      if (by.isEmpty) users -= dataset
    })
    val (passed, alone) = mine.partition(users.contains)
    (alone, passed.map(dataset => dataset -> heir(dataset).get).toMap)
  }

  /** A user of a dataset: a named topology rather than the application, which deletes nothing. */
  def heir(dataset: Int): Option[String] =
    users.get(dataset).flatMap(by => by.find(_ != Description.Application).orElse(by.headOption))

  /** Forgets datasets that are no longer registered. */
  def prune(registered: Int => Boolean): Unit = users.keys.filterNot(registered).toSeq.foreach { dataset =>
    users.remove(dataset).toSeq.flatten.foreach { topology =>
      used.get(topology).foreach { of =>
        of -= dataset
        if (of.isEmpty) used -= topology
      }
    }
  }

  def isEmpty: Boolean = users.isEmpty && used.isEmpty
}
