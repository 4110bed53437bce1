package org.apache.spark.stagecrew

import scala.collection.mutable

/**
 * Which topologies use which stored datasets (shuffles, or cached datasets, by Spark's ids): a pure state machine.
 *
 * A topology uses what its jobs write or read. The application, which never ends before Spark does, uses what jobs of no
 * topology need, and what is kept.
 */
final class DatasetUsage {
  private val users = mutable.HashMap.empty[Int, mutable.LinkedHashSet[String]]
  private val used = mutable.HashMap.empty[String, mutable.LinkedHashSet[Int]] // not the application's, which would grow for ever

  def use(topology: String, datasets: Iterable[Int]): Unit = datasets.foreach { dataset =>
    users.getOrElseUpdate(dataset, mutable.LinkedHashSet.empty) += topology
    if (topology != Description.Application) used.getOrElseUpdate(topology, mutable.LinkedHashSet.empty) += dataset
  }

  /** The topology has ended. Answers what only it has used, and for all else who goes on using it. */
  def end(topology: String): (Seq[Int], Map[Int, String]) = {
    val mine = used.remove(topology).toSeq.flatten
    mine.foreach(dataset => users.get(dataset).foreach { by =>
      by -= topology
      if (by.isEmpty) users -= dataset
    })
    val (passed, alone) = mine.partition(users.contains)
    (alone, passed.map(dataset => dataset -> heir(dataset).get).toMap)
  }

  /** Who uses a dataset: a named topology before the application, which deletes nothing. */
  def heir(dataset: Int): Option[String] = users.get(dataset).flatMap(by => by.find(_ != Description.Application).orElse(by.headOption))

  /** Forgets what is no longer registered. */
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
