package org.apache.spark.stagecrew

import java.util.{Collections, List => JList}
import java.util.concurrent.{AbstractExecutorService, ConcurrentLinkedQueue, CountDownLatch, ExecutorService}
import java.util.concurrent.{Executors, TimeUnit}
import java.util.concurrent.atomic.AtomicInteger
import org.apache.spark.{SparkConf, TaskContext}
import org.scalatest.BeforeAndAfterEach
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import stagecrew.{TopologyContext, TopologyListener}
import org.apache.spark.stagecrew.executor.{ExecutorCrew, Ledger, ListenerCounts}
import org.apache.spark.stagecrew.listeners.{JvmListeners, HookFailedException, ListenerContext}
import org.apache.spark.stagecrew.wire.Entry

object JvmListenersSuite {
  val calls = new ConcurrentLinkedQueue[String]()
  @volatile var interrupted = new CountDownLatch(1)

  abstract class Recording(name: String) extends TopologyListener {
    private def record(what: String): Unit = { calls.add(s"$what $name"); () }
    override def open(context: TopologyContext): Unit = record("open")
    override def close(context: TopologyContext): Unit = record("close")
    override def decorate(context: TopologyContext, task: TaskContext): AutoCloseable = {
      record("enter")
      () => record("leave")
    }
  }
  class A extends Recording("a")
  class B extends Recording("b")
  class C extends Recording("c")
  class FailingOpen extends Recording("failing") {
    override def open(context: TopologyContext): Unit = {
      super.open(context)
      throw new IllegalStateException("no pool")
    }
  }
  class FailingClose extends Recording("failing") {
    override def close(context: TopologyContext): Unit = {
      super.close(context)
      throw new IllegalStateException("no close")
    }
  }
  class FailingDecorate extends Recording("failing") {
    override def decorate(context: TopologyContext, task: TaskContext): AutoCloseable =
      throw new IllegalStateException("no scope")
  }
  class FailingLeave extends Recording("failing") {
    override def decorate(context: TopologyContext, task: TaskContext): AutoCloseable = {
      super.decorate(context, task)
      () => throw new IllegalStateException("no leave")
    }
  }
  class LongError extends TopologyListener {
    override def open(context: TopologyContext): Unit = throw new IllegalStateException("x" * 1000000)
  }
  class Plain extends TopologyListener
  class Hanging extends Recording("hanging") {
    override def open(context: TopologyContext): Unit = hang()
    protected def hang(): Unit = try new CountDownLatch(1).await() catch {
      case error: InterruptedException => interrupted.countDown(); throw error
    }
  }
  class HangingClose extends Hanging {
    override def open(context: TopologyContext): Unit = ()
    override def close(context: TopologyContext): Unit = hang()
  }
  class HangingConstructor extends Hanging {
    hang()
  }
  @volatile var look: () => Unit = () => ()
  class Looking extends TopologyListener {
    override def close(context: TopologyContext): Unit = look()
  }
  class NoListener
  class NoConstructor(val needed: Int) extends TopologyListener
}

class JvmListenersSuite extends AnyFunSuite with BeforeAndAfterEach {
  import JvmListenersSuite._

  // Long enough for a hook that does nothing, even on a busy machine.
  private val settings =
    new Settings(new SparkConf(false).set(Settings.OpenTimeout, "1s").set(Settings.CloseTimeout, "1s"))
  private val context = ListenerContext("app", "enrich", "t", "7", "host", Collections.emptyMap())
  private val pool = Executors.newCachedThreadPool(ExecutorCrew.daemon("suite"))
  private var ledger = new Ledger

  override def beforeEach(): Unit = {
    calls.clear()
    interrupted = new CountDownLatch(1)
    ledger = new Ledger
  }

  private def listeners(classes: Class[_]*): JvmListeners = listeners(pool, classes: _*)

  private def listeners(pool: ExecutorService, classes: Class[_]*): JvmListeners = new JvmListeners(
    classes.zipWithIndex.map { case (cls, i) =>
      Entry(i, "jvm", cls.getSimpleName, cls.getName, Some("jvm"), Some("application"), required = true, None)
    }.toVector, context, settings, ledger, pool)

  private def recordedCalls: Seq[String] = calls.asScala.toSeq

  private def counts(index: Int): ListenerCounts = ledger.of("t").listeners.find(_.index == index).get

  test("listeners open and decorate in order, and leave decorations and close in reverse") {
    val three = listeners(classOf[A], classOf[B], classOf[C])
    three.open()
    three.leave(three.decorate(null))
    three.close()
    assert(recordedCalls == Seq("open a", "open b", "open c", "enter a", "enter b", "enter c", "leave c",
      "leave b", "leave a", "close c", "close b", "close a"))
    (0 to 2).foreach(i => assert(counts(i).opens == 1 && counts(i).closes == 1 && counts(i).failures == 0))
  }

  test("a second close does nothing") {
    val one = listeners(classOf[A])
    one.open()
    one.close()
    one.close()
    assert(recordedCalls == Seq("open a", "close a") && counts(0).closes == 1)
  }

  test("after a failed open, the failed and the opened listeners close in reverse, and no others open") {
    val three = listeners(classOf[A], classOf[FailingOpen], classOf[C])
    val failed = intercept[HookFailedException](three.open())
    assert(failed.listener == "FailingOpen" && failed.getCause.getMessage == "no pool")
    Seq("FailingOpen", "enrich", "7", "host", "no pool").foreach(part => assert(failed.getMessage.contains(part)))
    assert(recordedCalls == Seq("open a", "open failing", "close failing", "close a"))
    assert(counts(1).opens == 1 && counts(1).closes == 1 && counts(1).failures == 1)
    assert(counts(1).lastError.contains("no pool"))
    assert(!ledger.of("t").listeners.exists(_.index == 2))
  }

  test("a failed close is counted, and the others close") {
    val three = listeners(classOf[A], classOf[FailingClose], classOf[C])
    three.open()
    three.close()
    assert(recordedCalls.drop(3) == Seq("close c", "close failing", "close a"))
    assert(counts(1).closes == 1 && counts(1).failures == 1 && counts(1).lastError.contains("no close"))
  }

  test("a hanging open is interrupted at its timeout, its listener is closed, and the error names the listener") {
    val hanging = listeners(classOf[A], classOf[Hanging])
    val failed = intercept[HookFailedException](hanging.open())
    assert(failed.getMessage.contains("Hanging") && failed.getMessage.contains("1000 ms"))
    assert(interrupted.await(5, TimeUnit.SECONDS))
    assert(recordedCalls == Seq("open a", "close hanging", "close a"))
    assert(counts(1).failures == 1)
  }

  test("a hanging constructor is interrupted at the timeout of open, and the opened listeners close") {
    val hanging = listeners(classOf[A], classOf[HangingConstructor])
    val failed = intercept[HookFailedException](hanging.open())
    Seq("the constructor of listener HangingConstructor", "1000 ms").foreach(part =>
      assert(failed.getMessage.contains(part)))
    assert(interrupted.await(5, TimeUnit.SECONDS))
    assert(recordedCalls == Seq("open a", "close a"))
    assert(counts(1).failures == 1 && counts(1).opens == 0)
  }

  test("opened listeners close when the pool starts no more threads") {
    val (own, remaining) = (Executors.newCachedThreadPool(ExecutorCrew.daemon("suite")), new AtomicInteger(3))
    val limited = new AbstractExecutorService {
      override def execute(call: Runnable): Unit =
        if (remaining.getAndDecrement() == 0) throw new OutOfMemoryError("unable to create native thread")
        else own.execute(call)
      override def shutdown(): Unit = own.shutdown()
      override def shutdownNow(): JList[Runnable] = own.shutdownNow()
      override def isShutdown: Boolean = own.isShutdown
      override def isTerminated: Boolean = own.isTerminated
      override def awaitTermination(time: Long, unit: TimeUnit): Boolean = own.awaitTermination(time, unit)
    }
    val failed = intercept[HookFailedException](listeners(limited, classOf[A], classOf[B]).open())
    assert(failed.getMessage.contains("open of listener B") && failed.getMessage.contains("unable to create"))
    assert(recordedCalls == Seq("open a", "close b", "close a"))
    own.shutdown()
  }

  test("a listener counts as open until its close returns") {
    var seen = Seq.empty[Long]
    look = () => seen = Seq(counts(0).opens, counts(0).closes)
    val one = listeners(classOf[Looking])
    one.open()
    one.close()
    assert(seen == Seq(1, 0) && counts(0).closes == 1)
  }

  test("a hanging close is interrupted at its timeout, and the others close") {
    val hanging = listeners(classOf[A], classOf[HangingClose])
    hanging.open()
    hanging.close()
    assert(interrupted.await(5, TimeUnit.SECONDS))
    assert(recordedCalls == Seq("open a", "close a"))
    assert(counts(1).closes == 1 && counts(1).failures == 1)
  }

  test("the duration of a failed or interrupted hook is in the sums and in the timeline") {
    val timed = scala.collection.mutable.Map.empty[String, Long]
    ledger.onDuration = (kind, micros) => timed(kind) = timed.getOrElse(kind, 0L) + micros
    intercept[HookFailedException](listeners(classOf[A], classOf[Hanging]).open())
    assert(counts(1).openMicros >= 1000000)
    assert(timed("open") == counts(0).openMicros + counts(1).openMicros &&
      timed("close") == counts(0).closeMicros + counts(1).closeMicros)
    val closing = listeners(classOf[HangingClose])
    closing.open()
    closing.close()
    assert(counts(0).closeMicros >= 1000000 && timed("close") == ledger.of("t").totals.closeMicros)
  }

  test("after a failed `decorate`, the earlier decorations are left, and the error names the listener") {
    val three = listeners(classOf[A], classOf[FailingDecorate], classOf[C])
    three.open()
    val failed = intercept[HookFailedException](three.decorate(null))
    assert(failed.listener == "FailingDecorate" && failed.getMessage.contains("no scope"))
    assert(recordedCalls.drop(3) == Seq("enter a", "leave a"))
    assert(counts(1).failures == 1)
  }

  test("a decoration whose close fails is counted, and the outer decorations are left") {
    val two = listeners(classOf[A], classOf[FailingLeave])
    two.open()
    two.leave(two.decorate(null))
    assert(recordedCalls.drop(2) == Seq("enter a", "enter failing", "leave a"))
    assert(counts(1).failures == 1)
  }

  test("a listener may implement no method, and `decorate` may return null") {
    val plain = listeners(classOf[Plain])
    plain.open()
    assert(plain.decorate(null).isEmpty)
    plain.close()
    assert(counts(0).opens == 1 && counts(0).closes == 1 && counts(0).failures == 0)
  }

  test("a class that is missing, is not a listener, or needs arguments is rejected by name, with the remedy") {
    Seq(classOf[NoListener].getName, classOf[NoConstructor].getName, "no.such.Listener").foreach { name =>
      val entry = Entry(0, "jvm", name, name, Some("jvm"), Some("application"), required = true, None)
      val failed = intercept[HookFailedException](
        new JvmListeners(Vector(entry), context, settings, ledger, pool).open())
      assert(failed.getMessage.contains(name) && failed.getMessage.contains("public constructor"))
    }
  }

  test("opened listeners close when a later one cannot be created") {
    val entries = listeners(classOf[A])
    entries.open()
    entries.close()
    calls.clear()
    val two = listeners(classOf[A], classOf[NoListener])
    intercept[HookFailedException](two.open())
    assert(recordedCalls == Seq("open a", "close a"))
  }

  test("the text of a listener's exception is limited") {
    val one = listeners(classOf[LongError])
    intercept[HookFailedException](one.open())
    assert(counts(0).lastError.length == ListenerCounts.ErrorLength &&
      counts(0).lastError.startsWith("java.lang.IllegalStateException: xx"))
  }
}
