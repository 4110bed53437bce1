package org.apache.spark.stagecrew
package driver

import java.util.concurrent.{CompletableFuture, TimeoutException}
import org.apache.spark.scheduler.StagecrewScheduler
import executor._, partitions._, spark._, wire._

/**
 * Ends topologies on the driver. The executors close a topology first. Then the driver releases the partitions that
 * only it can release, and the topology is closed. Used by the driver's loop only.
 */
private[stagecrew] final class TopologyEnds(crew: DriverCrew) {
  import crew.{executors, inLoop, partitions, pinning, pool, publish, sc, schedule, settings, topologies}

  /** How long the driver waits for a reply in addition to the timeout of a topology. */
  private val ReplyMarginMs = 2000L

  /** How long it takes at most, after the connection has closed, until the driver knows that an executor is lost. */
  private val LostMs = 1000L

  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  /** The number of closed topologies that are no longer listed. */
  var forgotten = 0

  /** Ends the topologies inside a topology, and then the topology. Completes when each executor has replied or timed
    * out. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    val done = new CompletableFuture[Unit]()
    inLoop {
      val inside = topologies.values.filter(t => t.description.parent.contains(id) && t.state == "active").toSeq
      def endSelf(): Unit = topologies.get(id).filter(_.state != "closed") match {
        case None => done.complete(()); ()
        case Some(topology) => endTopology(topology, timeoutMs, done)
      }
      if (inside.isEmpty) endSelf()
      else CompletableFuture.allOf(inside.map(t => end(t.description.id, timeoutMs)): _*)
        .whenComplete((_, _) => inLoop(endSelf()))
    }
    done
  }

  private def endTopology(topology: Topology, timeoutMs: Long, done: CompletableFuture[Unit]): Unit = {
    topology.waiters ::= done
    if (topology.state == "active") {
      topology.state = "closing"
      val released = release(topology)
      // A decommissioned executor sends its outputs to any other executor.
      val everywhere = migrates && released.release.shuffles.nonEmpty
      val contacted = if (everywhere) executors.values.toSeq
        else (topology.executors ++ topology.holders).toSeq.flatMap(executors.get)
      topology.pending ++= contacted.map(_.id)
      pinning.begins(topology.description.id, contacted.map(_.id))
      val message = Frames.encode("END_TOPOLOGY", topology.description.id, timeoutMs, Json.write(released.release))
      contacted.foreach(executor => executor.peer.ask(message, timeoutMs + ReplyMarginMs) {
        case Right(bytes) => inLoop {
          Log.contained(s"handling the reply of executor ${executor.id}")(
            recordReply(topology, executor.id, bytes, released))
          executorReplied(topology, executor.id)
        }
        // A connection may close shortly before its executor is known to be lost. The executor is then reported as
        // lost.
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

  /** Records an executor's reply: the unclosed listeners, the caches that the driver must release, and the shuffles
    * whose outputs are still in the tracker, because Spark dropped the events of their jobs. */
  private def recordReply(
    topology: Topology, executor: String, bytes: Array[Byte], released: DriverPartitions.Released): Unit = {
    val report = crew.reported(executor, Frames.decodeMessage(bytes))
    topology.unclosed ++= report.unclosed
    topology.caches ++= report.caches
    if (report.caches.nonEmpty) topology.cachedOn += executor
    topology.leftBlocks ++= partitions.drop(report.shuffles.diff(released.release.shuffles))
  }

  /** Releases the partitions that no other topology and no running job uses. */
  private def release(topology: Topology): DriverPartitions.Released = {
    def notReleased(error: Throwable): Unit = Log.log.warn(
      s"the partitions of topology '${topology.description.name}' are not released, " +
        s"because the driver could not find out which jobs use them", error)
    val before = StagecrewScheduler.nextAttempt(sc)
    val known = try { claimRunning(); true } catch { case Failure(error) => notReleased(error); false }
    val outer = crew.chainOf(topology).tail.filter(_.state == "active").map(_.description.id)
    val policy = if (known) topology.description.release else DriverPartitions.KeepsAll
    val released = try partitions.end(topology.description.id, policy, outer, before) catch {
      case Failure(error) => notReleased(error); DriverPartitions.NothingReleased
    }
    released.release.heirs.values.flatMap(topologies.get).foreach(_.holders ++= topology.executors ++ topology.holders)
    topology.leftBlocks ++= released.leftBlocks
    topology.caches ++= released.caches
    released
  }

  /** Records that running jobs use their shuffles. The start event of a job may be late, or dropped. */
  def claimRunning(): Unit =
    StagecrewScheduler.shufflesInUse(sc, TaskAttempts.TopologyProperty).foreach { case (topologyId, shuffles) =>
      crew.userOf(Some(topologyId).filter(_.nonEmpty)).foreach(partitions.used(_, shuffles, Nil))
    }

  private def executorReplied(topology: Topology, executor: String): Unit = {
    topology.pending -= executor
    pinning.ends(topology.description.id, executor)
    closeIfReplied(topology)
    publish(topology)
  }

  /** When all executors have replied: releases the partitions that only the driver can release, and closes the
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
      }, pool).whenComplete((_, _) => inLoop(confirmUnpersisted(topology, caches)))
    }

  def deleteLeftBlocks(leftBlocks: Seq[SparkInternals.LeftBlocks]): Unit = leftBlocks.foreach(blocks =>
    Log.contained(s"deleting files of executor ${blocks.executor}")(
      SparkInternals.deleteLeftBlocks(blocks, ReplyMarginMs)))

  /** Lets executors count which blocks of these datasets were deleted. Then the topology is closed. */
  private def confirmUnpersisted(topology: Topology, unpersisted: Seq[Int]): Unit = {
    val name = topology.description.name
    val message = Frames.encode(
      "UNPERSISTED", topology.description.id, Json.write(Datasets(Vector.empty, unpersisted.toVector)))
    val replies = topology.cachedOn.toSeq.flatMap(executors.get).map { executor =>
      val done = new CompletableFuture[Unit]()
      executor.peer.ask(message, ReplyMarginMs) {
        case Right(bytes) => inLoop {
          Log.contained(s"recording the counts of executor ${executor.id}")(
            crew.reported(executor.id, Frames.decodeMessage(bytes)))
          done.complete(())
        }
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
    val waiters = topology.waiters
    topology.waiters = Nil
    if (topology.unclosed.nonEmpty) Log.log.warn(s"topology '${topology.description.name}' has ended, " +
        s"but these have not closed: ${topology.unclosed.mkString("; ")}")
    topology.description = topology.description.copy()(Vector.empty) // a closed topology keeps no pickled listeners
    val closed = topologies.values.filter(t => t.state == "closed" && t.kind != DriverCrew.ApplicationKind).toSeq
    // The topology that ended last is always retained, because Python reads its report next.
    val removed = closed.sortBy(_.ended).dropRight(settings.retainedTopologies)
    removed.foreach(t => topologies.remove(t.description.id))
    forgotten += removed.size
    SpanBook.trim(topologies.values)
    publish(topology)
    waiters.foreach(_.complete(()))
  }

  /** An executor is lost: topologies no longer wait for it. Returns the topologies that it was part of. */
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
