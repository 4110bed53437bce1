package org.apache.spark.stagecrew
package executor

import scala.collection.mutable
import scala.util.control.NonFatal
import partitions._, spark._, wire._

/** What an executor reports to the driver: counts, spans and samples, and the inventory of its partitions. Used by the
  * executor's loop only. */
private[stagecrew] final class ExecutorReports(crew: ExecutorCrew) {
  import crew.{agent, closings, descriptions, executor, inLoop, ledger, partitions, processes, schedule, settings}

  private val migrates = SparkInternals.migrates(crew.conf)
  private val toForget = mutable.LinkedHashSet.empty[String]
  private val releases = mutable.HashMap.empty[String, Map[Int, Long]]

  /** Reports what changed. A topology is forgotten when it is closed here and the driver has its counts. */
  def report(): Unit = {
    partitions.tell()
    toForget.filterInPlace { topology =>
      processes.touching(topology).nonEmpty || partitions.awaits(topology) || !ledger.forget(topology)
    }
    ledger.report().foreach { case (sequence, report) =>
      crew.askDriver(message(sequence, report)) {
        case Right(_) => ledger.delivered(sequence)
        case Left(_) => ledger.notDelivered(sequence)
      }
    }
    sendInventory()
  }

  /** Sends the last report. It is not needed if the driver is gone already. */
  def last(timeoutMs: Long): Unit = ledger.report().foreach { case (sequence, report) =>
    try crew.askDriverSync(message(sequence, report), timeoutMs) catch {
      case NonFatal(error) => Log.log.debug("the last report did not reach the driver", error)
    }
  }

  /** A report of one topology: its counts, and at its end also the unclosed listeners and the released partitions. */
  def of(topology: String, unclosed: Seq[String] = Nil, taken: Taken = Taken()): Array[Byte] = {
    partitions.tell(topology)
    val (sequence, report) = ledger.full(topology)
    message(sequence, report.copy(unclosed = unclosed.toVector, shuffles = taken.outputs.keySet.map(_.shuffle).toVector,
      caches = taken.caches.toVector))
  }

  private def message(sequence: Long, report: ExecutorReport): Array[Byte] =
    Frames.encode("REPORT", executor, sequence, Json.write(report))

  /** Sends the driver an inventory of the stored partitions. The reply names those that must be deleted. */
  private def sendInventory(): Unit = partitions.inventory(always = migrates).foreach { inventory =>
    crew.askDriver(Frames.encode("INVENTORY", executor, Json.write(inventory))) {
      case Left(_) => inLoop(partitions.answered(heard = false))
      case Right(answer) => inLoop {
        partitions.answered(heard = true)
        val orphans = Json.read[Orphans](Frames.decodeMessage(answer).text("body"))
        partitions.forget(orphans.gone.shuffles, orphans.gone.caches)
        partitions.unclaimed(orphans.unclaimed)
        partitions.stale(orphans.stale.map(one => one.shuffle -> one.before).toMap)
        orphans.ended.filter { case (topology, _) => partitions.has(topology) }.foreach { case (topology, release) =>
          end(topology, settings.closeTimeoutMs, release, None)
        }
      }
    }
  }

  /** A topology has ended: it closes here, and then releases its partitions. */
  def end(topology: String, timeoutMs: Long, release: Release, reply: Option[Reply]): Unit = {
    partitions.end(topology, release.ending)
    if (migrates) releases(topology) = release.shuffles.map(_ -> release.before).toMap
    closings.end(topology, timeoutMs, reply)
  }

  def release(topology: String): java.util.concurrent.CompletableFuture[Taken] = {
    val releasing = partitions.release(topology, releases.remove(topology).getOrElse(Map.empty))
    // The driver, which unpersists cached datasets, may be gone.
    if (partitions.awaits(topology)) schedule(ExecutorCrew.RememberMs)(partitions.unpersisted(topology, Set.empty))
    releasing
  }

  def closed(topology: String): Unit = {
    descriptions.forget(topology)
    toForget += topology
    agent.retire(processes.touchesAny)
  }
}
