package org.apache.spark.stagecrew
package driver

import java.util.concurrent.{CompletableFuture, TimeoutException}
import org.apache.spark.scheduler.StagecrewScheduler
import executor._, partitions._, spark._, wire._

/**
 * Ends topologies on the driver. Executors close a topology first. Then the driver releases the partitions that only it
 * can release, and the topology is closed. Used by the driver's loop only.
 */
private[stagecrew] final class TopologyEnds(crew: DriverCrew) {
  import crew.{executors, inLoop, partitions, pinning, pool, publish, sc, schedule, settings, topologies}

  /** How much longer than the timeout of a topology the driver waits for an executor's reply. */
  private val AnswerMs = 2000L

  /** How long after its connection has closed an executor is known to be lost, at most. */
  private val LostMs = 1000L

  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  /** Closed topologies that are no longer listed. */
  var forgotten = 0

  /** Ends a topology, and before it the topologies inside it. Completes when every executor has answered, or is
    * late. */
  def end(id: String, timeoutMs: Long): CompletableFuture[Unit] = {
    val done = new CompletableFuture[Unit]()
    inLoop {
      val inside = topologies.values.filter(t => t.description.parent.contains(id) && t.state == "active").toSeq
      def itself(): Unit = topologies.get(id).filter(_.state != "closed") match {
        case None => done.complete(()); ()
        case Some(topology) => endOne(topology, timeoutMs, done)
      }
      if (inside.isEmpty) itself()
      else CompletableFuture.allOf(inside.map(t => end(t.description.id, timeoutMs)): _*)
        .whenComplete((_, _) => inLoop(itself()))
    }
    done
  }

  private def endOne(topology: Topology, timeoutMs: Long, done: CompletableFuture[Unit]): Unit = {
    topology.waiters ::= done
    if (topology.state == "active") {
      topology.state = "closing"
      val released = release(topology)
      // Outputs of executors that leave are sent to any other executor.
      val everywhere = migrates && released.release.shuffles.nonEmpty
      val asked = if (everywhere) executors.values.toSeq
        else (topology.executors ++ topology.holders).toSeq.flatMap(executors.get)
      topology.pending ++= asked.map(_.id)
      pinning.begins(topology.description.id, asked.map(_.id))
      val message = Frames.encode("END_TOPOLOGY", topology.description.id, timeoutMs, Json.write(released.release))
      asked.foreach(executor => executor.peer.ask(message, timeoutMs + AnswerMs) {
        case Right(bytes) => inLoop {
          Log.contained(s"the reply of executor ${executor.id}")(take(topology, executor.id, bytes, released))
          answered(topology, executor.id)
        }
        // A connection may close a moment before its executor is known to be lost: then it is reported as lost.
        case Left(error) => schedule(if (error.isInstanceOf[TimeoutException]) 0 else LostMs) {
          if (topology.pending(executor.id)) {
            topology.unclosed += s"executor ${executor.id} did not reply: ${error.getMessage}"
            answered(topology, executor.id)
          }
        }
      })
    }
    settle(topology)
    publish(topology)
  }

  /** Takes over an executor's reply: the listeners that have not closed, and the caches that the driver must
    * release. */
  private def take(
    topology: Topology, executor: String, bytes: Array[Byte], released: DriverPartitions.Released): Unit = {
    val report = crew.reported(executor, Frames.decodeMessage(bytes))
    topology.unclosed ++= report.unclosed
    topology.caches ++= report.caches
    if (report.caches.nonEmpty) topology.cachedOn += executor
    topology.left ++= partitions.drop(report.shuffles.diff(released.release.shuffles)) // their events were dropped
  }

  /** Releases what no other topology and no running job uses. */
  private def release(topology: Topology): DriverPartitions.Released = {
    def notReleased(error: Throwable): Unit = Log.log.warn(
      s"the partitions of topology '${topology.description.name}' are not released, " +
        s"because their use cannot be found out", error)
    val before = StagecrewScheduler.nextAttempt(sc)
    val known = try { claimRunning(); true } catch { case Failure(error) => notReleased(error); false }
    val around = crew.chainOf(topology).tail.filter(_.state == "active").map(_.description.id)
    val policy = if (known) topology.description.release else DriverPartitions.KeepsAll
    val released = try partitions.end(topology.description.id, policy, around, before) catch {
      case Failure(error) => notReleased(error); DriverPartitions.NothingReleased
    }
    released.release.heirs.values.flatMap(topologies.get).foreach(_.holders ++= topology.executors ++ topology.holders)
    topology.left ++= released.left
    topology.caches ++= released.caches
    released
  }

  /** Running jobs use their shuffles. The event of a job's start may be on its way, or lost. */
  def claimRunning(): Unit =
    StagecrewScheduler.shufflesInUse(sc, TaskAttempts.TopologyProperty).foreach { case (mark, shuffles) =>
      crew.user(Some(mark).filter(_.nonEmpty)).foreach(partitions.used(_, shuffles, Nil))
    }

  private def answered(topology: Topology, executor: String): Unit = {
    topology.pending -= executor
    pinning.ends(topology.description.id, executor)
    settle(topology)
    publish(topology)
  }

  /** When every executor has answered, the driver releases what only it can. Then the topology is closed. */
  private def settle(topology: Topology): Unit =
    if (topology.state == "closing" && topology.pending.isEmpty && !topology.releasing) {
      val caches = topology.caches.toSeq.filter(rdd => partitions.unused(rdd) && SparkInternals.mayUncache(sc, rdd))
      val left = topology.left.toSeq
      topology.releasing = true
      if (caches.isEmpty && left.isEmpty) confirm(topology, Nil)
      else CompletableFuture.runAsync(() => {
        caches.foreach(rdd => Log.contained(s"releasing cached dataset $rdd")(SparkInternals.uncache(sc, rdd)))
        deleteLeft(left)
      }, pool).whenComplete((_, _) => inLoop(confirm(topology, caches)))
    }

  def deleteLeft(left: Seq[SparkInternals.LeftBlocks]): Unit = left.foreach(one =>
    Log.contained(s"deleting the files of executor ${one.executor}")(SparkInternals.deleteLeft(one, AnswerMs)))

  /** Executors count which of their blocks of these datasets are gone. Then the topology is closed. */
  private def confirm(topology: Topology, unpersisted: Seq[Int]): Unit = {
    val name = topology.description.name
    val message = Frames.encode(
      "UNPERSISTED", topology.description.id, Json.write(Datasets(Vector.empty, unpersisted.toVector)))
    val answers = topology.cachedOn.toSeq.flatMap(executors.get).map { executor =>
      val done = new CompletableFuture[Unit]()
      executor.peer.ask(message, AnswerMs) {
        case Right(bytes) => inLoop {
          Log.contained(s"the counts of executor ${executor.id}")(
            crew.reported(executor.id, Frames.decodeMessage(bytes)))
          done.complete(())
        }
        case Left(error) =>
          Log.log.warn(s"executor ${executor.id} did not confirm which cached blocks of topology '$name' are gone: " +
            s"they are not counted as released: ${error.getMessage}")
          done.complete(())
      }
      done
    }
    if (answers.isEmpty) close(topology)
    else CompletableFuture.allOf(answers: _*).whenComplete((_, _) => inLoop(close(topology)))
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
    // The one that ended last stays: Python reads its report next.
    val left = closed.sortBy(_.ended).dropRight(settings.retainedTopologies)
    left.foreach(t => topologies.remove(t.description.id))
    forgotten += left.size
    SpanBook.trim(topologies.values)
    publish(topology)
    waiters.foreach(_.complete(()))
  }

  /** An executor is lost: topologies do not wait for it. */
  def lost(executor: String): Seq[Topology] = {
    topologies.values.foreach(_.holders -= executor)
    val concerned = topologies.values
      .filter(t => (t.executors(executor) || t.pending(executor)) && t.state != "closed").toSeq
    concerned.foreach { topology =>
      topology.lost(executor)
      if (topology.pending(executor)) answered(topology, executor)
    }
    concerned
  }
}
