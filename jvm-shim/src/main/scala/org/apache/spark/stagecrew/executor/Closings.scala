package org.apache.spark.stagecrew
package executor

import java.util.concurrent._
import java.util.concurrent.atomic.AtomicBoolean
import scala.collection.concurrent.TrieMap
import scala.collection.mutable
import listeners._, partitions._, spark._, wire._

/** A thread that runs one thing after the other. It drops calls that are scheduled after its end. */
trait Loop {
  def inLoop(f: => Unit): Unit
  def schedule(ms: Long)(f: => Unit): Unit
}

/** A `Loop` on a thread of this name. A failure is logged, and does not end the loop. */
private[stagecrew] abstract class ThreadLoop(name: String) extends Loop {
  protected val loop: ScheduledExecutorService = Executors.newSingleThreadScheduledExecutor(ExecutorCrew.daemon(name))

  override def inLoop(f: => Unit): Unit = unlessEnded(loop.execute(() => Log.contained(s"the loop of $name")(f)))

  override def schedule(ms: Long)(f: => Unit): Unit = unlessEnded(
    loop.schedule((() => Log.contained(s"the loop of $name")(f)): Runnable, ms, TimeUnit.MILLISECONDS))

  protected def every(ms: Long)(what: String)(f: => Unit): Unit =
    loop.scheduleWithFixedDelay(() => Log.contained(what)(f), ms, ms, TimeUnit.MILLISECONDS)

  private def unlessEnded(f: => Unit): Unit = try f catch { case _: RejectedExecutionException => () }

  private val ending = new AtomicBoolean(false)
  private val ended = new CountDownLatch(1)

  /** Runs the end of the loop's owner, once. A second call waits for the first, within the timeout. */
  protected def endOnce(timeoutMs: Long)(f: => Unit): Unit =
    if (ending.compareAndSet(false, true)) try f finally ended.countDown()
    else ended.await(timeoutMs, TimeUnit.MILLISECONDS)
}

/**
 * The topologies that close on an executor. The steps: wait for attempts and opens in progress, close workers, then the
 * agent, then JVM listeners, then release partitions. Used by the loop, except where noted. `closed` is called when
 * everything of a topology is closed here.
 */
final class Closings(
    executor: String, table: TopologyTable, processes: Processes, sides: ExecutorListeners, pool: ExecutorService,
    loop: Loop)(
    release: String => CompletableFuture[Taken], report: (String, Seq[String], Option[Taken]) => Array[Byte],
    closed: String => Unit) {
  /** A hook that heeds its timeout reports it a moment later: then it is counted, and nothing is late. */
  private val ReportGraceMs = 300L
  private val closings = mutable.LinkedHashMap.empty[String, Closing]
  private val latches = TrieMap.empty[String, CountDownLatch]
  @volatile private var some = false
  private var forced = false

  /**
   * A closing may wait for a change: a link began or ended an attempt, closed, or is gone; an attempt has ended. Called
   * by any thread after the change. It costs nothing while no topology closes.
   */
  def changed(): Unit = if (some) loop.inLoop(progress())

  /** A latch that opens when the topology is closed. Any thread must get it before it calls `end`. */
  def latch(topology: String): CountDownLatch = latches.getOrElseUpdate(topology, new CountDownLatch(1))

  /** The topology has ended: closes it. Replies when it is closed, or at the timeout with the unclosed listeners. */
  def end(topology: String, timeoutMs: Long, reply: Option[Reply]): Unit = {
    table.end(topology)
    val closing = closings.getOrElseUpdate(topology, new Closing(topology))
    reply.foreach(closing.replies ::= _)
    some = true
    loop.schedule(timeoutMs + ReportGraceMs)(closing.giveUp())
    progress()
  }

  /** The executor ends: stops waiting for attempts. */
  def force(): Unit = {
    forced = true
    progress()
  }

  private def progress(): Unit = {
    closings.values.toSeq.foreach(closing => Log.contained(s"closing topology ${closing.topology}")(closing.advance()))
    some = closings.nonEmpty
  }

  private final class Closing(val topology: String) {
    var replies: List[Reply] = Nil
    private var asked = Set.empty[Link]
    private var opening = Option.empty[CompletableFuture[Side]]
    private var jvm = Option.empty[CompletableFuture[Void]]
    private var released = Option.empty[CompletableFuture[Taken]]

    /** Takes the steps in their order, until one must wait. A step that waits continues when `changed` is called. */
    def advance(): Unit =
      if (attemptsEnded && opensEnded && workersClosed && agentClosed && jvmClosed && partitionsReleased) finish()

    private def attemptsEnded: Boolean = forced || table.attemptsOf(topology).isEmpty

    // The task that opens it may be gone, but the open continues.
    private def opensEnded: Boolean = sides.opening(topology).forall { open =>
      if (!opening.contains(open)) {
        opening = Some(open)
        open.whenComplete((_, _) => changed())
      }
      open.isDone
    }

    private def workersClosed: Boolean = {
      val workers = processes.touching(topology).filter(_._1.role == "worker")
      workers.foreach { case (link, busy) =>
        askToClose(link)
        if (busy) processes.defer(link, topology)
      }
      workers.forall(_._2) // the busy ones close after their task
    }

    private def agentClosed: Boolean = {
      val agent = processes.touching(topology).find(_._1.role == "agent")
      agent.foreach { case (link, _) => askToClose(link) }
      agent.isEmpty
    }

    private def jvmClosed: Boolean = {
      if (jvm.isEmpty) {
        val side = sides.take(topology)
        jvm = Some(CompletableFuture.runAsync(() => side.foreach(listeners =>
          Log.contained(s"closing JVM listeners of $topology")(listeners.close())), pool))
        jvm.foreach(_.whenComplete((_, _) => changed()))
      }
      jvm.exists(_.isDone)
    }

    private def partitionsReleased: Boolean = {
      if (released.isEmpty) {
        released = Some(release(topology))
        released.foreach(_.whenComplete((_, _) => changed()))
      }
      released.exists(_.isDone)
    }

    private def askToClose(link: Link): Unit = if (!asked(link)) {
      asked += link
      link.send("CLOSE", topology)
    }

    private def finish(): Unit = {
      closings.remove(topology)
      if (table.attemptsOf(topology).isEmpty) table.forget(topology) // else the executor ends
      if (replies.nonEmpty) answer(Nil, released.filterNot(_.isCompletedExceptionally).map(_.get()))
      closed(topology)
      latches.remove(topology).foreach(_.countDown())
    }

    /** The timeout: replies with the unclosed listeners, and continues to close. */
    def giveUp(): Unit = if (closings.contains(topology) && replies.nonEmpty) {
      val attempts = table.attemptsOf(topology).toSeq.sorted
        .map(attempt => s"attempt $attempt on executor $executor still runs")
      val held = processes.touching(topology).collect { case (link, busy) if !busy =>
        val names = processes.unclosed(link, topology)
        s"${if (names.isEmpty) "" else names.mkString("listener ", ", ", " in ")}$link on executor $executor"
      }
      val late = jvm.filterNot(_.isDone).map(_ => s"JVM listeners on executor $executor")
      val opens = sides.opening(topology).map(_ => s"listeners that still open on executor $executor")
      val deleting = released.map(_ => s"partitions that are still being deleted on executor $executor")
      answer(attempts ++ (if (attempts.isEmpty) held ++ late ++ opens ++ deleting else Nil), None)
    }

    private def answer(unclosed: Seq[String], taken: Option[Taken]): Unit = {
      val bytes = report(topology, unclosed, taken)
      replies.foreach(_.answer(bytes))
      replies = Nil
    }
  }
}
