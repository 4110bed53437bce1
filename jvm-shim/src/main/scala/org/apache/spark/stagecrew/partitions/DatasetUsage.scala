package org.apache.spark.stagecrew
package partitions

import scala.collection.mutable
import wire._

/**
 * Which topologies use which stored datasets (shuffles, or cached datasets, by Spark's ids): a pure state machine.
 *
 * A topology uses the datasets that its jobs write or read. The application topology uses the datasets of jobs without
 * a topology, and those that users keep.
 */
final class DatasetUsage {
  private val users = mutable.HashMap.empty[Int, mutable.LinkedHashSet[String]]
  // Without the datasets of the application, because they would grow without limit.
  private val used = mutable.HashMap.empty[String, mutable.LinkedHashSet[Int]]

  def use(topology: String, datasets: Iterable[Int]): Unit = datasets.foreach { dataset =>
    users.getOrElseUpdate(dataset, mutable.LinkedHashSet.empty) += topology
    if (topology != Description.Application) used.getOrElseUpdate(topology, mutable.LinkedHashSet.empty) += dataset
  }

  /** The topology has ended. Returns the datasets that no other topology uses, and for each of its other datasets the
    * heir: a topology that uses it. */
  def end(topology: String): (Seq[Int], Map[Int, String]) = {
    val datasets = used.remove(topology).toSeq.flatten
    datasets.foreach(dataset => users.get(dataset).foreach { topologies =>
      topologies -= topology
      if (topologies.isEmpty) users -= dataset
    })
    val (shared, exclusive) = datasets.partition(users.contains)
    (exclusive, shared.map(dataset => dataset -> heir(dataset).get).toMap)
  }

  /** A topology that uses a dataset. The application only if no other does, because its partitions are
    * never released. */
  def heir(dataset: Int): Option[String] =
    users.get(dataset).flatMap(ids => ids.find(_ != Description.Application).orElse(ids.headOption))

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
