package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import scala.util.control.NonFatal
import partitions._, spark._, wire._

/** Sends reports to the driver: counts, spans and samples, and the inventory of the executor's partitions. Used by the
  * executor's loop only, except for `last`. */
private[stagecrew] final class ExecutorReports(crew: ExecutorCrew) {
  import crew.{agent, closings, descriptions, executor, inLoop, ledger, partitions, processes, schedule, settings}

  private val migrates = SparkInternals.migrates(crew.conf)
  private val toForget = mutable.LinkedHashSet.empty[String]
  private val releases = mutable.HashMap.empty[String, Map[Int, Long]]

  /** Reports the changes. A topology is forgotten when it is closed here and the driver has its counts. */
  def report(): Unit = {
    partitions.updateLedger()
    toForget.filterInPlace { topology =>
      processes.linksOf(topology).nonEmpty || partitions.awaitsUnpersist(topology) || !ledger.forget(topology)
    }
    ledger.report().foreach { case (sequence, report) =>
      crew.askDriver(message(sequence, report)) {
        case Right(_) => ledger.delivered(sequence)
        case Left(_) => ledger.notDelivered(sequence)
      }
    }
    sendInventory()
  }

  /** Sends the last report. A failure is harmless: the driver may have stopped already. */
  def last(timeoutMs: Long): Unit = ledger.report().foreach { case (sequence, report) =>
    try crew.askDriverSync(message(sequence, report), timeoutMs) catch {
      case NonFatal(error) => Log.log.debug("the last report did not reach the driver", error)
    }
  }

  /** A report of one topology: its counts, and after its end also unclosed listeners and released partitions. */
  def of(id: String, unclosed: Seq[String] = Nil, deleted: Deletions = Deletions()): Array[Byte] = {
    partitions.updateLedger(id)
    val (sequence, report) = ledger.full(id)
    message(sequence, report.copy(unclosed = unclosed.toVector,
      shuffles = deleted.outputs.keySet.map(_.shuffle).toVector, caches = deleted.caches.toVector))
  }

  private def message(sequence: Long, report: ExecutorReport): Array[Byte] =
    Frames.encode("REPORT", executor, sequence, Json.write(report))

  /** Sends an inventory of the stored partitions to the driver. The reply lists those that must be deleted. */
  private def sendInventory(): Unit = partitions.inventory(always = migrates).foreach { inventory =>
    crew.askDriver(Frames.encode("INVENTORY", executor, Json.write(inventory))) {
      case Left(_) => inLoop(partitions.inventoryLost())
      case Right(answer) => inLoop {
        partitions.inventoryDelivered(inventory)
        val orphans = Json.read[Orphans](Frames.decodeMessage(answer).text("body"))
        partitions.table.forget(orphans.gone.shuffles, orphans.gone.caches)
        partitions.deleteUnclaimed(orphans.unclaimed)
        partitions.deleteStale(orphans.stale.map(stale => stale.shuffle -> stale.before).toMap)
        orphans.ended.foreach { case (topology, release) =>
          if (partitions.table.has(topology)) end(topology, settings.closeTimeoutMs, release, None)
        }
      }
    }
  }

  /** Closes a topology that has ended, and then releases its partitions. */
  def end(topology: String, timeoutMs: Long, release: Release, reply: Option[Reply]): Unit = {
    partitions.table.end(topology, release)
    if (migrates) releases(topology) = release.shuffles.map(_ -> release.before).toMap
    closings.end(topology, timeoutMs, reply)
  }

  def release(topology: String): java.util.concurrent.CompletableFuture[Deletions] = {
    val releasing = partitions.release(topology, releases.remove(topology).getOrElse(Map.empty))
    // The driver unpersists cached datasets, but it may be lost.
    if (partitions.awaitsUnpersist(topology)) schedule(ExecutorCrew.RememberMs)(partitions.expireUnpersisted(topology))
    releasing
  }

  def closed(topology: String): Unit = {
    descriptions.forget(topology)
    toForget += topology
    agent.retire(processes.hasTopologies)
  }
}
