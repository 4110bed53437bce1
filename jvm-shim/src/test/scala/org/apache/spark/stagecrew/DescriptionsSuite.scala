package org.apache.spark.stagecrew

import java.util.concurrent.{CountDownLatch, Executors, TimeUnit}
import java.util.concurrent.atomic.AtomicInteger
import org.scalatest.concurrent.Eventually._
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.{Seconds, Span}
import org.apache.spark.stagecrew.executor.{Descriptions, ExecutorCrew, Opened, TopologyTable}
import org.apache.spark.stagecrew.wire.{Description, Frame, Frames}

/** An executor's requests to the driver about topologies and executions, and the cached replies. */
class DescriptionsSuite extends AnyFunSuite {
  private final class Fixture {
    val table = new TopologyTable
    val asks = new AtomicInteger
    @volatile var answer: Frame => Array[Byte] = frame => described(frame.text("topology"))
    private val pool = Executors.newCachedThreadPool(ExecutorCrew.daemon("descriptions"))
    val descriptions = new Descriptions("1", () => "host", table, pool, { bytes =>
      asks.incrementAndGet()
      answer(Frames.decodeMessage(bytes))
    })
  }

  private def described(id: String): Array[Byte] = {
    val description = Description(id, id, None, Vector.empty)()
    Frames.encode("DESCRIPTION", id, description.body, description.blobs)
  }

  /** Holds the replies to a fixture's requests. The first latch opens at a request; the second one releases the reply. */
  private def holdReplies(f: Fixture): (CountDownLatch, CountDownLatch) = {
    val (requested, replied) = (new CountDownLatch(1), new CountDownLatch(1))
    f.answer = frame => {
      requested.countDown()
      replied.await(60, TimeUnit.SECONDS)
      described(frame.text("topology"))
    }
    (requested, replied)
  }

  private def ended(id: String): Array[Byte] = Frames.encode("DESCRIPTION", id, "", Vector.empty)

  test("an executor requests the description of a topology once") {
    val f = new Fixture
    (1 to 3).foreach(_ => assert(f.descriptions.describe("t").map(_.id).contains("t")))
    assert(f.asks.get == 1)
    assert(f.descriptions.known("t").nonEmpty && f.descriptions.known("u").isEmpty)
    f.descriptions.forget("t")
    assert(f.descriptions.known("t").isEmpty && f.descriptions.ids.isEmpty)
  }

  test("ended topologies leave no state") {
    val f = new Fixture
    f.answer = frame => ended(frame.text("topology"))
    (1 to 1000).foreach(n => assert(f.descriptions.describe(s"t$n").isEmpty))
    assert(f.descriptions.ids.isEmpty && f.table.live.isEmpty)
    assert(f.descriptions.describe("t1").isEmpty)
    assert(f.asks.get == 1000)
  }

  test("the agent's reply is read with its listeners, its error, and the pickled values for workers") {
    def opened(error: String): Opened = {
      val body = s"""{"listeners": [{"index": 2, "scope": "executor", "lifetime": "application"}], "error": $error}"""
      val reply = Opened.of(Frames.decodeMessage(Frames.encode("OPENED", "t", body, Vector(Array[Byte](1, 2)))))
      assert(reply.body == body && reply.values.map(_.toSeq) == Vector(Seq[Byte](1, 2)))
      assert(reply.listeners == Vector(Opened.Listener(2, "executor", "application")))
      reply
    }
    assert(opened("null").error.isEmpty && opened("\"no pool\"").error.contains("no pool"))
  }

  test("a reply that arrives after the topology closed here is not cached") {
    val f = new Fixture
    f.answer = frame => {
      f.table.end(frame.text("topology"))
      f.table.forget(frame.text("topology"))
      f.descriptions.forget(frame.text("topology"))
      described(frame.text("topology"))
    }
    assert(f.descriptions.describe("t").isEmpty && f.descriptions.ids.isEmpty)
  }

  test("a reply that arrives after the topology closed here is not cached, even if its task was killed") {
    val f = new Fixture
    val (requested, replied) = holdReplies(f)
    val task = new Thread(() => try { f.descriptions.describe("t"); () } catch { case _: InterruptedException => () })
    task.start()
    assert(requested.await(10, TimeUnit.SECONDS))
    task.interrupt()
    task.join(10000)
    f.table.end("t")
    f.table.forget("t")
    f.descriptions.forget("t")
    replied.countDown()
    eventually(timeout(Span(10, Seconds)))(assert(f.descriptions.ids.isEmpty))
  }

  test("after a failed request, the next task sends another one") {
    val f = new Fixture
    f.answer = _ => throw new IllegalStateException("no answer")
    intercept[IllegalStateException](f.descriptions.describe("t"))
    f.answer = frame => described(frame.text("topology"))
    assert(f.descriptions.describe("t").nonEmpty)
  }

  test("a task gets the reply even if the task that sent the request was killed") {
    val f = new Fixture
    val (requested, replied) = holdReplies(f)
    val first = new Thread(() => try { f.descriptions.describe("t"); () } catch { case _: InterruptedException => () })
    first.start()
    assert(requested.await(10, TimeUnit.SECONDS))
    @volatile var found = Option.empty[Description]
    val second = new Thread(() => found = f.descriptions.describe("t"))
    second.start()
    eventually(timeout(Span(10, Seconds)))(assert(second.getState == Thread.State.WAITING))
    first.interrupt() // its task was killed
    first.join(10000)
    assert(!first.isAlive && found.isEmpty)
    replied.countDown()
    second.join(10000)
    assert(found.map(_.id).contains("t") && f.asks.get == 1)
  }

  test("the execution of a query is requested again when the previous one has ended") {
    val f = new Fixture
    f.answer = _ => Frames.encode("EXECUTION", s"execution-query-run${f.asks.get}")
    assert(f.descriptions.executionId("query:q").contains("execution-query-run1"))
    assert(f.descriptions.executionId("query:q").contains("execution-query-run1"))
    f.descriptions.ended("execution-query-run1")
    assert(f.descriptions.executionId("query:q").contains("execution-query-run2"))
  }

  test("the id of an execution that has ended is not cached") {
    val f = new Fixture
    def answer(run: Int): Unit = f.answer = frame =>
      if (frame.kind == "ASK_EXECUTION") Frames.encode("EXECUTION", s"execution-query-run$run")
      else if (run == 1) ended(frame.text("topology"))
      else described(frame.text("topology"))
    answer(run = 1) // the driver did not know yet that the query was started again
    assert(f.descriptions.executionOf("query:q").isEmpty)
    answer(run = 2)
    assert(f.descriptions.executionOf("query:q").map(_.id).contains("execution-query-run2"))
  }

  test("when an execution is forgotten, so are all stages of its job") {
    val f = new Fixture
    f.answer = _ => Frames.encode("EXECUTION", "execution-job-1")
    (1 to 5).foreach(stage => f.descriptions.executionId(s"stage:$stage"))
    f.descriptions.forget("execution-job-1")
    f.answer = _ => Frames.encode("EXECUTION", "execution-job-2")
    (1 to 5).foreach(stage => assert(f.descriptions.executionId(s"stage:$stage").contains("execution-job-2")))
  }
}
