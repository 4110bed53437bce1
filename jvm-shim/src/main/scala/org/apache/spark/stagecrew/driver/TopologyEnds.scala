package org.apache.spark.stagecrew
package driver

import java.util.concurrent.{CompletableFuture, TimeUnit, TimeoutException}
import org.apache.spark.scheduler.StagecrewScheduler
import executor._, partitions._, spark._, wire._

/**
 * Ends topologies on the driver. First the executors close a topology. Then the driver releases the partitions that
 * only the driver can release, and the topology is closed. Used by the driver's loop only, except `end` (any thread)
 * and `deleteLeftBlocks` (the threads of `pool`).
 */
private[stagecrew] final class TopologyEnds(crew: DriverCrew) {
  import crew.{executors, inLoop, partitions, pinning, pool, publish, sc, schedule, settings, topologies}

  /** How much longer than the timeout of a topology the driver waits for an executor's reply. */
  private val ReplyMarginMs = 2000L

  /** The maximum time from the end of an executor's connection until the driver knows that the executor is lost. */
  private val LostMs = 1000L

  /** The number of closed topologies that are no longer listed. */
  var forgotten = 0

  /** Ends the topologies inside a topology, and then the topology itself. The result completes when each executor has
    * replied or timed out, and the topology is closed. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    val done = new CompletableFuture[Unit]()
    inLoop {
      val inside = topologies.values.filter(t => t.description.parent.contains(id) && t.state == "active").toSeq
      def endSelf(): Unit = topologies.get(id).filter(_.state != "closed") match {
        case None => done.complete(()); ()
        case Some(topology) =>
          topology.closed.whenComplete((_, _) => done.complete(()))
          endTopology(topology, timeoutMs)
      }
      if (inside.isEmpty) endSelf()
      else CompletableFuture.allOf(inside.map(t => end(t.description.id, timeoutMs)): _*)
        .whenComplete((_, _) => end(id, timeoutMs).whenComplete((_, _) => done.complete(()))) // one may have begun
    }
    done
  }

  private def endTopology(topology: Topology, timeoutMs: Long): Unit = {
    if (topology.state == "active") {
      topology.state = "closing"
      val release = decideRelease(topology)
      // A decommissioned executor may have sent its outputs to any other executor.
      val everywhere = partitions.migrates && release.shuffles.nonEmpty
      val contacted = if (everywhere) executors.values.toSeq
        else (topology.executors ++ topology.holders).toSeq.flatMap(executors.get)
      topology.pending ++= contacted.map(_.id)
      pinning.closingBegins(topology.description.id, contacted.map(_.id))
      val message = Frames.encode("END_TOPOLOGY", topology.description.id, timeoutMs, Json.write(release))
      contacted.foreach(executor => executor.peer.ask(message, timeoutMs + ReplyMarginMs) {
        case Right(bytes) => inLoop(try Log.contained(s"handling the reply of executor ${executor.id}")(
          recordReply(topology, executor.id, bytes, release)) finally executorReplied(topology, executor.id))
        // A connection may close shortly before the driver learns that the executor is lost. The wait ensures that the
        // executor is then reported as lost.
        case Left(error) => schedule(if (error.isInstanceOf[TimeoutException]) 0 else LostMs) {
          if (topology.pending(executor.id)) {
            topology.unclosed += s"executor ${executor.id} did not reply: ${error.getMessage}"
            executorReplied(topology, executor.id)
          }
        }
      })
    }
    closeIfReplied(topology)
    publish(topology)
  }

  /** Records an executor's reply: the unclosed listeners, and the caches that the driver must release. If the executor
    * deleted outputs of shuffles that the driver did not release, because Spark dropped the events of their jobs, also
    * drops these shuffles' outputs from the tracker. */
  private def recordReply(topology: Topology, executor: String, bytes: Array[Byte], release: Release): Unit = {
    val report = crew.reported(executor, Frames.decodeMessage(bytes))
    topology.unclosed ++= report.unclosed
    topology.caches ++= report.caches
    if (report.caches.nonEmpty) topology.cachedOn += executor
    topology.leftBlocks ++= partitions.drop(report.shuffles.diff(release.shuffles))
  }

  /** Decides which partitions to release: those that no other topology and no running job uses. Drops the outputs of
    * released shuffles from the tracker. */
  private def decideRelease(topology: Topology): Release = {
    def notReleased(error: Throwable): Unit = Log.log.warn(
      s"the partitions of topology '${topology.description.name}' are not released, " +
        s"because the driver could not find out which jobs use them", error)
    val before = StagecrewScheduler.nextTaskAttempt(sc)
    val known = try { claimRunning(); true } catch { case Failure(error) => notReleased(error); false }
    val outer = crew.chainOf(topology).tail.filter(_.state == "active").map(_.description.id)
    val policy = if (known) topology.description.release else DriverPartitions.KeepsAll
    val (release, caches) = try partitions.end(topology.description.id, policy, outer, before) catch {
      case Failure(error) => notReleased(error); Release() -> Nil
    }
    release.heirs.values.flatMap(topologies.get).foreach(_.holders ++= topology.executors ++ topology.holders)
    topology.leftBlocks ++= partitions.drop(release.shuffles)
    topology.caches ++= caches
    release
  }

  /** Records that running jobs use their shuffles, because the start event of a job may be late or dropped. */
  def claimRunning(): Unit =
    StagecrewScheduler.shufflesInUse(sc, TaskAttempts.TopologyProperty).foreach { case (topologyId, shuffles) =>
      crew.userOf(Some(topologyId).filter(_.nonEmpty)).foreach(partitions.used(_, shuffles, Nil))
    }

  private def executorReplied(topology: Topology, executor: String): Unit = {
    topology.pending -= executor
    pinning.closingEnds(topology.description.id, executor)
    closeIfReplied(topology)
    publish(topology)
  }

  /** If all executors have replied, releases the partitions that only the driver can release, and closes the
    * topology. */
  private def closeIfReplied(topology: Topology): Unit =
    if (topology.state == "closing" && topology.pending.isEmpty && !topology.releasing) {
      val caches = topology.caches.toSeq.filter(rdd => partitions.unused(rdd) && SparkInternals.mayUncache(sc, rdd))
      val leftBlocks = topology.leftBlocks.toSeq
      topology.releasing = true
      if (caches.isEmpty && leftBlocks.isEmpty) confirmUnpersisted(topology, Nil)
      else CompletableFuture.runAsync(() => {
        caches.foreach(rdd => Log.contained(s"releasing cached dataset $rdd")(SparkInternals.uncache(sc, rdd)))
        deleteLeftBlocks(leftBlocks)
      }, pool).orTimeout(settings.closeTimeoutMs, TimeUnit.MILLISECONDS).whenComplete((_, error) => inLoop {
        if (error != null) topology.unclosed += "the driver is still deleting partitions"
        if (error != null) close(topology) else confirmUnpersisted(topology, caches) // late: executors count the blocks
      })
    }

  def deleteLeftBlocks(leftBlocks: Seq[SparkInternals.LeftBlocks]): Unit = leftBlocks.foreach(blocks =>
    Log.contained(s"deleting files of executor ${blocks.executor}")(
      SparkInternals.deleteLeftBlocks(blocks, ReplyMarginMs)))

  /** Lets the executors count which blocks of these unpersisted datasets were deleted. Then closes the topology. */
  private def confirmUnpersisted(topology: Topology, unpersisted: Seq[Int]): Unit = {
    val name = topology.description.name
    val message = Frames.encode(
      "UNPERSISTED", topology.description.id, Json.write(Datasets(Vector.empty, unpersisted.toVector)))
    val replies = topology.cachedOn.toSeq.flatMap(executors.get).map { executor =>
      val done = new CompletableFuture[Unit]()
      executor.peer.ask(message, ReplyMarginMs) {
        case Right(bytes) => inLoop(try Log.contained(s"recording the counts of executor ${executor.id}")(
          crew.reported(executor.id, Frames.decodeMessage(bytes))) finally done.complete(()))
        case Left(error) =>
          Log.log.warn(s"executor ${executor.id} did not confirm the deleted cached blocks of topology '$name': " +
            s"they are not counted as released: ${error.getMessage}")
          done.complete(())
      }
      done
    }
    if (replies.isEmpty) close(topology)
    else CompletableFuture.allOf(replies: _*).whenComplete((_, _) => inLoop(close(topology)))
  }

  private def close(topology: Topology): Unit = if (topology.state == "closing") {
    topology.state = "closed"
    topology.ended = System.currentTimeMillis()
    if (topology.unclosed.nonEmpty) Log.log.warn(s"topology '${topology.description.name}' has ended, " +
        s"but these have not closed: ${topology.unclosed.mkString("; ")}")
    topology.description = topology.description.copy()(Vector.empty) // a closed topology keeps no pickled listeners
    val listed = topologies.values.filter(t => t.state == "closed" && t.kind != DriverCrew.ApplicationKind).toSeq
    // The topology that ended last is always retained, because Python reads its report next.
    val removed = listed.sortBy(_.ended).dropRight(settings.retainedTopologies)
    removed.foreach(t => topologies.remove(t.description.id))
    forgotten += removed.size
    SpanBook.trim(topologies.values)
    publish(topology)
    topology.closed.complete(())
  }

  /** An executor is lost: topologies no longer wait for its reply. Returns the topologies that it was part of. */
  def lost(executor: String): Seq[Topology] = {
    topologies.values.foreach(_.holders -= executor)
    val affected = topologies.values
      .filter(t => (t.executors(executor) || t.pending(executor)) && t.state != "closed").toSeq
    affected.foreach { topology =>
      topology.lost(executor)
      if (topology.pending(executor)) executorReplied(topology, executor)
    }
    affected
  }
}
