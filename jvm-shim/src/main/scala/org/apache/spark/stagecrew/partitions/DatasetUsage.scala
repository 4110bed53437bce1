package org.apache.spark.stagecrew
package partitions

import scala.collection.mutable
import wire._

/**
 * Records which topologies use which stored datasets (shuffles, or cached datasets, by Spark's ids). A pure state
 * machine.
 *
 * A topology uses the datasets that its jobs write or read. The application topology uses the datasets of jobs without
 * a named topology, and the datasets that users keep.
 */
final class DatasetUsage {
  private val users = mutable.LinkedHashMap.empty[Int, mutable.LinkedHashSet[String]]

  def use(topology: String, datasets: Iterable[Int]): Unit =
    datasets.foreach(dataset => users.getOrElseUpdate(dataset, mutable.LinkedHashSet.empty) += topology)

  /** The topology has ended. Returns the datasets that only this topology used, and the heir of each of its other
    * datasets. The application never stops using a dataset. */
  def end(topology: String): (Seq[Int], Map[Int, String]) = {
    val datasets = users.collect {
      case (dataset, topologies) if topologies(topology) && topology != Description.Application => dataset
    }.toSeq
    datasets.foreach(users(_) -= topology)
    val (exclusive, shared) = datasets.partition(users(_).isEmpty)
    users --= exclusive
    (exclusive, shared.map(dataset => dataset -> heir(dataset).get).toMap)
  }

  /** One of the topologies that use a dataset. It is the application only if no other topology uses the dataset,
    * because the partitions of the application are never released. */
  def heir(dataset: Int): Option[String] =
    users.get(dataset).flatMap(ids => ids.find(_ != Description.Application).orElse(ids.headOption))

  /** Forgets datasets that are not registered with Spark any more. */
  def prune(registered: Int => Boolean): Unit = users.filterInPlace((dataset, _) => registered(dataset))

  def isEmpty: Boolean = users.isEmpty
}
