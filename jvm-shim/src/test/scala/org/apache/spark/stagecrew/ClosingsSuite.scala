package org.apache.spark.stagecrew

import java.util.concurrent.{AbstractExecutorService, CompletableFuture, TimeUnit}
import scala.collection.mutable
import org.apache.spark.SparkConf
import org.scalatest.concurrent.Eventually._
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.{Seconds, Span}
import org.apache.spark.stagecrew.executor.{Agent, Closings, Ledger, Processes, TopologyTable}
import org.apache.spark.stagecrew.listeners.{ExecutorListeners, ListenerContext}
import org.apache.spark.stagecrew.partitions.{CachedBlock, Deletions}
import org.apache.spark.stagecrew.spark.Reply
import org.apache.spark.stagecrew.wire.{Description, Entry, Link}

/** A topology closes on an executor in order, once, and within a timeout. The tests simulate the Python processes. */
class ClosingsSuite extends AnyFunSuite {
  private final class Fixture {
    val ledger = new Ledger
    val table = new TopologyTable
    val processes = new Processes(ledger, (_, index) => (s"listener $index", "worker"), () => 0L)
    val sent = mutable.ArrayBuffer.empty[(String, String)] // process, topology
    val replies = mutable.ArrayBuffer.empty[Seq[String]] // the unclosed listeners of each reply
    val closed = mutable.ArrayBuffer.empty[String]
    private val due = mutable.ArrayBuffer.empty[() => Unit]
    private val settings = new Settings(new SparkConf(false))
    val held = mutable.ArrayBuffer.empty[Runnable] // tasks that the pool has not run
    var hold = false
    private val pool = new AbstractExecutorService {
      override def execute(body: Runnable): Unit = if (hold) held += body else body.run()
      override def shutdown(): Unit = ()
      override def shutdownNow(): java.util.List[Runnable] = java.util.List.of()
      override def isShutdown: Boolean = false
      override def isTerminated: Boolean = false
      override def awaitTermination(timeout: Long, unit: TimeUnit): Boolean = true
    }
    val loop = new Loop {
      private val queue = mutable.Queue.empty[() => Unit]
      private var running = false
      override def inLoop(f: => Unit): Unit = {
        queue += (() => f)
        if (!running) {
          running = true
          while (queue.nonEmpty) queue.dequeue().apply()
          running = false
        }
      }
      override def schedule(ms: Long)(f: => Unit): Unit = due += (() => f)
    }
    private val agent = new Agent("1", () => null, settings)
    val executorListeners = new ExecutorListeners(settings, ledger, processes, agent, pool,
      _ => ListenerContext("app", "t", "t", "1", "host", java.util.Map.of()))
    val released = mutable.Buffer.empty[String]
    var releasing = CompletableFuture.completedFuture(Deletions(blocks = Map(CachedBlock(7, 0) -> 1L)))
    val reportedDeletions = mutable.Buffer.empty[Option[Deletions]]
    val closings = new Closings("1", table, processes, executorListeners, pool, loop)(
      topology => { released += topology; releasing },
      (_, unclosed, deletions) => { replies += unclosed; reportedDeletions += deletions; Array.emptyByteArray },
        closed += _)
    private var pids = 100L

    def link(role: String = "worker"): Link = {
      pids += 1
      val name = s"p$pids"
      val link = Links.link(name, role, pids) { frame => sent += name -> frame.text("topology"); () }
      processes.connected(link)
      processes.addTopology(link, "t")
      processes.hookBegan(link, "t", 0, "open", Long.MaxValue)
      processes.hookEnded(link, "t", 0, "open", failed = false, 1, "")
      link
    }

    def end(): Unit = loop.inLoop(closings.end("t", 1000, Some(new Reply {
      override def send(bytes: Array[Byte]): Unit = ()
      override def fail(error: Throwable): Unit = ()
    })))

    def confirmClosed(link: Link): Unit = { processes.closed(link, "t"); closings.changed() }
    def expireTimeouts(): Unit = { due.foreach(_.apply()); due.clear() }
  }

  test("closing waits for attempts, then for workers, then for the agent") {
    val f = new Fixture
    val (worker, agent) = (f.link(), f.link("agent"))
    f.table.begin(1, Seq("t"))
    f.end()
    assert(f.sent.isEmpty)
    f.table.finish(1)
    f.closings.changed()
    assert(f.sent == Seq(worker.process -> "t"))
    f.confirmClosed(worker)
    assert(f.sent == Seq(worker.process -> "t", agent.process -> "t"))
    assert(f.replies.isEmpty)
    f.confirmClosed(agent)
    assert(f.replies == Seq(Nil))
    assert(f.closed == Seq("t"))
  }

  test("partitions are released after attempts have ended and listeners closed, and closing waits for them") {
    val f = new Fixture
    val worker = f.link()
    f.releasing = new CompletableFuture[Deletions]()
    f.end()
    assert(f.released.isEmpty)
    f.confirmClosed(worker)
    assert(f.released == Seq("t"))
    assert(f.replies.isEmpty)
    f.releasing.complete(Deletions(blocks = Map(CachedBlock(7, 0) -> 1L)))
    assert(f.reportedDeletions == Seq(Some(Deletions(blocks = Map(CachedBlock(7, 0) -> 1L)))))
    assert(f.replies == Seq(Nil))
    assert(f.closed == Seq("t"))
  }

  test("the reply names a slow release of partitions, and a failed release does not stop closing") {
    val f = new Fixture
    f.releasing = new CompletableFuture[Deletions]()
    f.end()
    f.expireTimeouts()
    assert(f.replies == Seq(Seq("partitions still being deleted on executor 1")))
    assert(f.reportedDeletions == Seq(None))
    f.releasing.completeExceptionally(new IllegalStateException)
    assert(f.closed == Seq("t"))
  }

  test("a busy worker receives CLOSE, and closing does not wait for it") {
    val f = new Fixture
    val worker = f.link()
    f.processes.began(worker, 7, Set("u"))
    f.end()
    assert(f.sent == Seq(worker.process -> "t"))
    assert(f.replies == Seq(Nil))
    assert(f.ledger.of("t").deferred == Set(worker.process))
    f.confirmClosed(worker)
    assert(f.ledger.of("t").deferred.isEmpty)
  }

  test("closing waits for a worker that has not finished a task of the topology, and the reply names it") {
    val f = new Fixture
    val (worker, agent) = (f.link(), f.link("agent"))
    f.processes.began(worker, 7, Set("t"))
    f.end()
    assert(f.sent == Seq(worker.process -> "t")) // the worker reads it when its task has ended
    assert(f.ledger.of("t").deferred.isEmpty)
    f.expireTimeouts()
    assert(f.replies == Seq(Seq(s"listener listener 0 in $worker on executor 1",
      s"listener listener 0 in $agent on executor 1")))
    f.processes.ended(worker)
    f.confirmClosed(worker)
    f.confirmClosed(agent)
    assert(f.closed == Seq("t"))
  }

  test("closing does not wait for a worker that begins a task after it received CLOSE") {
    val f = new Fixture
    val worker = f.link()
    f.end()
    assert(f.replies.isEmpty)
    f.processes.began(worker, 7, Set("u"))
    f.closings.changed()
    assert(f.replies == Seq(Nil))
    assert(f.ledger.of("t").deferred == Set(worker.process))
    assert(f.sent.size == 1)
  }

  test("closing does not wait for a lost process, and the process is counted as lost") {
    val f = new Fixture
    val (lost, remaining) = (f.link(), f.link())
    f.end()
    f.processes.disconnected(lost)
    f.closings.changed()
    assert(f.replies.isEmpty)
    f.confirmClosed(remaining)
    assert(f.replies == Seq(Nil))
    assert(f.ledger.of("t").lostProcesses == 1)
  }

  test("at the timeout the reply names the unclosed listeners, once, and closing continues") {
    val f = new Fixture
    val worker = f.link()
    f.end()
    f.expireTimeouts()
    assert(f.replies == Seq(Seq(s"listener listener 0 in $worker on executor 1")))
    f.end() // the driver asks again, and gets another reply
    f.confirmClosed(worker)
    assert(f.replies.size == 2 && f.replies(1).isEmpty)
    assert(f.closed == Seq("t"))
    assert(f.sent.size == 1)
  }

  test("at the timeout the reply names running attempts, but not their workers") {
    val f = new Fixture
    f.link()
    f.table.begin(3, Seq("t"))
    f.end()
    f.expireTimeouts()
    assert(f.replies == Seq(Seq("attempt 3 on executor 1 is still running")))
  }

  test("a latch opens when everything is closed, even if nothing was open") {
    val f = new Fixture
    val latch = f.closings.latch("t")
    f.end()
    assert(latch.getCount == 0)
  }

  test("closing waits for an open in progress, and then closes its listener") {
    ClosingsSuite.closes.set(0)
    val f = new Fixture
    val jvm = Entry(0, "jvm", "l", classOf[ClosingsSuite.Counting].getName, Some("jvm"), Some("application"),
      required = true, None)
    val description = Description("t", "t", None, Vector(jvm))()
    f.hold = true
    val waiting = new Thread(() =>
      try { f.executorListeners.open(description); () } catch { case _: InterruptedException => () })
    waiting.start()
    eventually(timeout(Span(10, Seconds)))(assert(f.held.nonEmpty))
    waiting.interrupt() // its task was cancelled
    waiting.join()
    f.end()
    assert(f.replies.isEmpty && f.closed.isEmpty)
    f.expireTimeouts()
    assert(f.replies == Seq(Seq("listeners still opening on executor 1")))
    f.hold = false
    f.held.foreach(_.run())
    assert(f.closed == Seq("t"))
    assert(ClosingsSuite.closes.get == 1)
  }

  test("when the executor shuts down, running attempts do not prevent closing") {
    val f = new Fixture
    val (worker, agent) = (f.link(), f.link("agent"))
    f.table.begin(3, Seq("t"))
    f.end()
    assert(f.sent.isEmpty)
    f.loop.inLoop(f.closings.force())
    assert(f.sent == Seq(worker.process -> "t"))
    f.confirmClosed(worker)
    f.confirmClosed(agent)
    assert(f.closed == Seq("t"))
  }
}

object ClosingsSuite {
  val closes = new java.util.concurrent.atomic.AtomicInteger

  final class Counting extends _root_.stagecrew.TopologyListener {
    override def close(context: _root_.stagecrew.TopologyContext): Unit = { closes.incrementAndGet(); () }
  }
}
