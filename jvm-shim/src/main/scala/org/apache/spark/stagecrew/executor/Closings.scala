package org.apache.spark.stagecrew
package executor

import java.util.concurrent._
import scala.collection.concurrent.TrieMap
import scala.collection.mutable
import listeners._, partitions._, spark._, wire._

/**
 * Closes topologies on an executor. The steps are: wait for attempts and for opens in progress, close the workers, then
 * the agent, then the JVM listeners, then release the partitions. Except where noted, call the methods in the
 * loop. `closed` is called when a topology has closed on this executor.
 */
final class Closings(
    executor: String, table: TopologyTable, processes: Processes, executorListeners: ExecutorListeners,
    pool: ExecutorService, loop: Loop)(
    release: String => CompletableFuture[Deletions], report: (String, Seq[String], Option[Deletions]) => Array[Byte],
    closed: String => Unit) {
  /** How long to wait after the timeout, so that a hook that is interrupted at the same timeout can report its end. */
  private val ReportGraceMs = 300L
  private val closings = mutable.LinkedHashMap.empty[String, Closing]
  private val latches = TrieMap.empty[String, CountDownLatch]
  @volatile private var anyClosing = false
  private var forced = false

  /**
   * Continues closings after a change that they may wait for. Either a Python process began or ended an attempt,
   * received a topology, opened or closed one, or disconnected; or the executor ended an attempt. Any thread may call
   * this. Does nothing while no topology is closing.
   */
  def changed(): Unit = if (anyClosing) loop.inLoop(progress())

  /** A latch that opens when the topology is closed. Must be called before `end`. Any thread may call
    * this. */
  def latch(topology: String): CountDownLatch = latches.getOrElseUpdate(topology, new CountDownLatch(1))

  /** Closes a topology that has ended. Replies when it is closed, or at the timeout (see `replyAtTimeout`). */
  def end(topology: String, timeoutMs: Long, reply: Option[Reply]): Unit = {
    table.end(topology)
    val closing = closings.getOrElseUpdate(topology, new Closing(topology))
    reply.foreach(closing.replies ::= _)
    anyClosing = true
    loop.schedule(timeoutMs + ReportGraceMs)(closing.replyAtTimeout())
    progress()
  }

  /** Stops waiting for attempts, because the executor shuts down. */
  def force(): Unit = {
    forced = true
    progress()
  }

  private def progress(): Unit = {
    closings.values.toSeq.foreach(closing => Log.contained(s"closing topology ${closing.topology}")(closing.advance()))
    anyClosing = closings.nonEmpty
  }

  private final class Closing(val topology: String) {
    var replies: List[Reply] = Nil
    private var closeSent = Set.empty[Link]
    private var opening = Option.empty[CompletableFuture[OpenListeners]]
    private var jvm = Option.empty[CompletableFuture[Void]]
    private var releasing = Option.empty[CompletableFuture[Deletions]]

    /** Runs the steps in order, up to the first one that must wait. `changed` continues with that step. */
    def advance(): Unit =
      if (attemptsEnded && opensEnded && workersClosed && agentClosed && jvmClosed && partitionsReleased) finish()

    /** Lets the closing continue when this step is done. Returns the step. */
    private def awaited[T](step: CompletableFuture[T]): Option[CompletableFuture[T]] = {
      if (!step.isDone) step.whenComplete((_, _) => changed())
      Some(step)
    }

    private def attemptsEnded: Boolean = forced || table.attemptsOf(topology).isEmpty

    // An open continues even if the task that started it has ended.
    private def opensEnded: Boolean = executorListeners.opening(topology).forall { open =>
      if (!opening.contains(open)) opening = awaited(open)
      open.isDone
    }

    private def workersClosed: Boolean = {
      val workers = processes.linksOf(topology).filter(_._1.role == "worker")
      workers.foreach { case (link, busy) =>
        sendClose(link)
        if (busy) processes.defer(link, topology)
      }
      workers.forall(_._2) // busy workers close after their task
    }

    private def agentClosed: Boolean = {
      val agent = processes.linksOf(topology).find(_._1.role == "agent")
      agent.foreach { case (link, _) => sendClose(link) }
      agent.isEmpty
    }

    private def jvmClosed: Boolean = {
      if (jvm.isEmpty)
        jvm = awaited(executorListeners.remove(topology).fold(CompletableFuture.completedFuture[Void](null))(open =>
          CompletableFuture.runAsync(() => Log.contained(s"closing JVM listeners of $topology")(open.close()), pool)))
      jvm.exists(_.isDone)
    }

    private def partitionsReleased: Boolean = {
      if (releasing.isEmpty) releasing = awaited(release(topology))
      releasing.exists(_.isDone)
    }

    private def sendClose(link: Link): Unit = if (!closeSent(link)) {
      closeSent += link
      link.send("CLOSE", topology)
    }

    private def finish(): Unit = {
      closings.remove(topology)
      if (table.attemptsOf(topology).isEmpty) table.forget(topology) // otherwise the executor is shutting down
      if (replies.nonEmpty) sendReplies(Nil, releasing.filterNot(_.isCompletedExceptionally).map(_.get()))
      closed(topology)
      latches.remove(topology).foreach(_.countDown())
    }

    /** Replies at the timeout, and continues to close. The reply names the running attempts. If no attempt is running,
      * it names the listeners, processes and deletions that closing still waits for. */
    def replyAtTimeout(): Unit = if (closings.contains(topology) && replies.nonEmpty) {
      val attempts = table.attemptsOf(topology).toSeq.sorted
        .map(attempt => s"attempt $attempt on executor $executor is still running")
      val links = processes.linksOf(topology).collect { case (link, busy) if !busy =>
        val names = processes.unclosed(link, topology)
        s"${if (names.isEmpty) "" else names.mkString("listener ", ", ", " in ")}$link on executor $executor"
      }
      val jvmListeners = jvm.filterNot(_.isDone).map(_ => s"JVM listeners on executor $executor")
      val opens = executorListeners.opening(topology).map(_ => s"listeners still opening on executor $executor")
      val deleting = releasing.map(_ => s"partitions still being deleted on executor $executor")
      sendReplies(attempts ++ (if (attempts.isEmpty) links ++ jvmListeners ++ opens ++ deleting else Nil), None)
    }

    private def sendReplies(unclosed: Seq[String], released: Option[Deletions]): Unit = {
      val bytes = report(topology, unclosed, released)
      replies.foreach(_.send(bytes))
      replies = Nil
    }
  }
}
