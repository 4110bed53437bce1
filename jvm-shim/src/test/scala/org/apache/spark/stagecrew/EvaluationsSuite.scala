package org.apache.spark.stagecrew

import java.io.{ByteArrayOutputStream, EOFException}
import java.nio.ByteBuffer
import java.nio.channels.Pipe
import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.executor.Evaluations
import org.apache.spark.stagecrew.wire.{Frame, Frames, Link}

class EvaluationsSuite extends AnyFunSuite with OneInstancePerTest {
  private val sentToDriver = mutable.Buffer.empty[Frame]
  private val sentToWorker = mutable.Buffer.empty[Frame]

  /** Attempts 1 to 9 are running. */
  private object attempts extends Evaluations.Attempts {
    val failures = mutable.Map.empty[Long, String]
    val ended = mutable.Set.empty[Long]
    override def runs(attempt: Long): Boolean = attempt < 10 && !ended(attempt)
    override def failureReason(attempt: Long): Option[String] = failures.get(attempt)
    override def stageOf(attempt: Long): (Int, Int) = (2, 8) // stage attempt 2, 8 partitions
  }

  /** Called before the next message is delivered to the driver. */
  private var beforeDelivery = Option.empty[() => Unit]

  /** The evaluations of an executor. Their frames to the driver are collected in `sentToDriver`. */
  private val evaluations: Evaluations = new Evaluations(10, 1000, attempts, Evaluations.Route { bytes =>
    beforeDelivery.foreach { action =>
      beforeDelivery = None
      action()
    }
    sentToDriver ++= framesOf(bytes)
  })

  private def framesOf(bytes: Array[Byte]): Seq[Frame] = {
    val buffer = ByteBuffer.wrap(bytes)
    Iterator.continually(buffer).takeWhile(_.hasRemaining).map { _ =>
      val frame = new Array[Byte](buffer.getInt())
      buffer.get(frame)
      Frames.decode(ByteBuffer.wrap(frame))
    }.toVector
  }

  /** The driver's Python, connected to the executor. Its frames are in `sent`. */
  private final class DirectDriver {
    val sent = mutable.Buffer.empty[Frame]
    private val pipe = Pipe.open()
    @volatile var isClosed = false
    private val link = Links.linkFrom("d", "driver", 8, pipe.source, () => { isClosed = true; end() })(message =>
      sent.synchronized(sent ++= framesOf(message.bytes("frames"))))
    private val thread = new Thread(() =>
      try evaluations.serveDriver(link, 1 << 20, frames => Frames.encode("FROM", "1", frames)) catch {
        case _: EOFException => ()
      })
    thread.start()
    eventually(assert(evaluations.isDirect(link)))

    def send(frames: Array[Byte]*): Unit = frames.foreach(frame => pipe.sink.write(ByteBuffer.wrap(frame)))
    def end(): Unit = pipe.sink.close()
    def awaitEnd(): Unit = { end(); thread.join(10000); assert(!thread.isAlive) }
    def kinds: List[String] = sent.synchronized(takeKinds(sent))
  }

  /** A worker sends these frames, and its input then ends. This is not a disconnect: its evaluations stay live. The
    * frames that it receives are collected in `sentToWorker`. */
  private def workerSends(frames: Array[Byte]*): Link = {
    val input = new ByteArrayOutputStream
    frames.foreach(input.write(_))
    val link = Links.link("p", "evaluations", 7, input.toByteArray)(sentToWorker += _)
    intercept[EOFException](evaluations.serve(link, 1 << 20))
    link
  }

  private def driverSends(frames: Array[Byte]*): Unit = {
    val all = new ByteArrayOutputStream
    frames.foreach(all.write(_))
    evaluations.onDriverMessage(ByteBuffer.wrap(all.toByteArray))
  }

  private def ready(evaluation: Long, attempt: Long) =
    Frames.encode("READY", evaluation, "b", 0L, attempt, 0L, 0L, 0L, 0L, 0L)
  private def request(evaluation: Long, sequence: Long) = Frames.encode("REQUEST", evaluation, sequence, Array[Byte](1))
  private def finish(evaluation: Long, sequence: Long) = Frames.encode("FINISH", evaluation, sequence, "finished", "")
  private def reply(evaluation: Long, sequence: Long) =
    Frames.encode("REPLY", evaluation, sequence, "ok", Array[Byte](2))

  /** Empties the buffer, and returns the kinds of its frames. */
  private def takeKinds(frames: mutable.Buffer[Frame]) = {
    val found = frames.map(_.kind).toList
    frames.clear()
    found
  }

  test("the reply to FINISH is the last reply to an evaluation, and earlier requests get their replies") {
    // This holds even if the worker sends FINISH while the executor's thread is still handling the reply before it.
    workerSends(ready(1, 1), request(1, 1), request(1, 2), finish(1, 3))
    assert(takeKinds(sentToDriver) == List("READY", "REQUEST", "REQUEST", "FINISH"))
    driverSends(reply(1, 1), reply(1, 2))
    driverSends(reply(1, 3), reply(1, 4))
    assert(sentToWorker.map(_.long("sequence")) == Seq(1, 2, 3))
  }

  test("the end of an attempt ends its evaluations, and their later frames are refused") {
    workerSends(ready(1, 1), ready(2, 2))
    takeKinds(sentToDriver)
    evaluations.attemptEnded(1, Some("killed"))
    assert(sentToDriver.map(frame => (frame.kind, frame.long("evaluation"), frame.text("outcome"))) ==
      Seq(("ENDED", 1, "failed")))
    takeKinds(sentToDriver)
    assert(takeKinds(sentToWorker) == List("ABORT"))
    workerSends(request(1, 1), request(2, 1))
    assert(takeKinds(sentToDriver) == List("REQUEST") && takeKinds(sentToWorker) == List("ABORT"))
    evaluations.attemptEnded(2, None)
    assert(sentToDriver.map(_.text("outcome")) == Seq("abandoned"))
  }

  test("the driver can ask whether an evaluation is live, and gets no reply after ENDED") {
    workerSends(ready(1, 1), ready(2, 2))
    evaluations.attemptEnded(1, Some("killed"))
    takeKinds(sentToDriver)
    driverSends(Frames.encode("ASK_LIVE", 1L), Frames.encode("ASK_LIVE", 2L))
    assert(sentToDriver.map(frame => (frame.kind, frame.long("evaluation"))) == Seq(("LIVE", 2)))
  }

  test("the worker of an abandoned evaluation is notified, because it may wait for an event") {
    workerSends(ready(1, 1))
    evaluations.attemptEnded(1, None)
    assert(sentToWorker.map(frame => (frame.kind, frame.text("reason"))) ==
      Seq(("ABORT", "Spark needed no more of its rows")))
  }

  test("the evaluations of a killed attempt end immediately, including those that begin later") {
    workerSends(ready(1, 1), ready(2, 2))
    takeKinds(sentToDriver)
    attempts.failures(1) = "killed"
    evaluations.interrupted(1)
    assert(takeKinds(sentToDriver) == List("ENDED") && sentToWorker.map(_.long("evaluation")) == Seq(1))
    takeKinds(sentToWorker)
    workerSends(ready(3, 1))
    assert(takeKinds(sentToDriver) == List("READY", "ENDED") && takeKinds(sentToWorker) == List("ABORT"))
    attempts.ended += 1
    evaluations.attemptEnded(1, Some("killed"))
    takeKinds(sentToDriver)
    workerSends(ready(4, 1))
    assert(sentToDriver.map(_.kind) == Seq("READY", "ENDED") && sentToDriver.last.text("outcome") == "failed")
  }

  test("if an attempt was killed before its first evaluation began, the evaluation ends immediately") {
    attempts.failures(1) = "killed"
    workerSends(ready(1, 1))
    assert(takeKinds(sentToDriver) == List("READY", "ENDED") && takeKinds(sentToWorker) == List("ABORT"))
  }

  test("an evaluation that begins after its attempt has ended is abandoned in the coordinator and in the worker") {
    workerSends(ready(3, 99))
    assert(sentToDriver.last.text("outcome") == "abandoned")
    assert(takeKinds(sentToDriver) == List("READY", "ENDED") && takeKinds(sentToWorker) == List("ABORT"))
  }

  test("an evaluation that begins after its attempt has failed is reported as failed") {
    attempts.failures(99) = "its attempt failed"
    workerSends(ready(3, 99))
    assert(sentToDriver.map(_.kind) == Seq("READY", "ENDED"))
    assert((sentToDriver.last.text("outcome"), sentToDriver.last.text("reason")) == (("failed", "its attempt failed")))
    assert(takeKinds(sentToWorker) == List("ABORT"))
  }

  test("the driver gets READY before ENDED, even if the attempt fails in between") {
    beforeDelivery = Some(() => evaluations.attemptEnded(1, Some("its attempt failed")))
    workerSends(ready(3, 1))
    assert(sentToDriver.map(_.kind) == Seq("READY", "ENDED"))
    assert((sentToDriver.last.text("outcome"), sentToDriver.last.text("reason")) == (("failed", "its attempt failed")))
    assert(takeKinds(sentToWorker) == List("ABORT"))
  }

  test("when the driver's Python is lost, all evaluations end with the reason") {
    workerSends(ready(1, 1), ready(2, 2))
    driverSends(Frames.encode("LOST", "driver", "it broke"))
    assert(sentToWorker.map(frame => (frame.kind, frame.text("reason"))) == Seq.fill(2)(("ABORT", "it broke")))
  }

  test("the evaluations of a worker end with its link") {
    val link = workerSends(ready(1, 1), ready(2, 1))
    takeKinds(sentToDriver)
    evaluations.disconnected(link)
    assert(sentToDriver.map(_.long("evaluation")).toSet == Set(1, 2) && takeKinds(sentToDriver).toSet == Set("ENDED"))
  }

  test("events wait in the mailbox for credit, and are acknowledged as soon as they are in it") {
    workerSends(ready(1, 1))
    takeKinds(sentToDriver)
    driverSends(Frames.encode("EVENTS", 1L, 1L, Vector(Array[Byte](1), Array[Byte](2))))
    assert(takeKinds(sentToDriver) == List("ACCEPTED") && sentToWorker.isEmpty)
    workerSends(Frames.encode("CREDIT", 1L, 5L, 100L))
    assert(takeKinds(sentToWorker) == List("EVENTS"))
    driverSends(Frames.encode("EVENTS", 1L, 4L, Vector(Array[Byte](4))))
    assert(takeKinds(sentToDriver) == List("OVERFLOWED"))
    driverSends(Frames.encode("ABORT", 1L, "events were lost"), reply(1, 1))
    assert(takeKinds(sentToWorker) == List("ABORT"))
  }

  test("an evaluation keeps the route on which it began, in both directions") {
    workerSends(ready(1, 1))
    val driver = new DirectDriver
    workerSends(ready(2, 2), request(1, 1), request(2, 1), request(2, 2), request(1, 2))
    assert(takeKinds(sentToDriver) == List("READY", "REQUEST", "REQUEST"))
    assert(driver.kinds == List("READY", "REQUEST", "REQUEST"))
    driver.send(reply(2, 1), reply(2, 2))
    eventually(assert(sentToWorker.size == 2))
    driverSends(reply(1, 1))
    assert(sentToWorker.map(_.long("evaluation")) == Seq(2, 2, 1))
    driver.send(Frames.encode("EVENTS", 2L, 1L, Vector(Array[Byte](1))))
    eventually(assert(driver.kinds == List("ACCEPTED")))
    evaluations.attemptEnded(1, None)
    evaluations.attemptEnded(2, None)
    assert(takeKinds(sentToDriver) == List("ENDED") && driver.kinds == List("ENDED"))
    driver.awaitEnd()
  }

  test("when a direct connection ends, only its evaluations fail, and later ones take the other route") {
    workerSends(ready(1, 1))
    val driver = new DirectDriver
    workerSends(ready(2, 2), request(2, 1))
    takeKinds(sentToDriver)
    driver.awaitEnd()
    assert(sentToWorker.map(frame => (frame.kind, frame.long("evaluation"), frame.text("reason"))) ==
      Seq(("ABORT", 2, "the executor lost its connection to the coordinators")))
    takeKinds(sentToWorker)
    workerSends(request(2, 2), request(1, 1), ready(3, 3))
    assert(takeKinds(sentToDriver) == List("REQUEST", "READY") && takeKinds(sentToWorker) == List("ABORT"))
    assert(driver.kinds.take(2) == List("READY", "REQUEST"))
  }

  test("a newer direct connection replaces the earlier one, whose evaluations fail") {
    val first = new DirectDriver
    workerSends(ready(1, 1))
    val second = new DirectDriver
    assert(first.isClosed)
    first.awaitEnd()
    assert(sentToWorker.map(frame => (frame.kind, frame.long("evaluation"))) == Seq(("ABORT", 1)))
    workerSends(ready(2, 2))
    assert(second.kinds == List("READY") && sentToDriver.isEmpty)
    second.awaitEnd()
  }

  test("the first evaluation waits for the direct connection that is being made") {
    evaluations.expectDirect()
    val worker = workerWaits(ready(1, 1))
    val driver = new DirectDriver
    worker.join(10000)
    assert(driver.kinds == List("READY") && sentToDriver.isEmpty)
    driver.awaitEnd()
  }

  test("the first evaluation does not wait when the driver's Python declines to connect") {
    evaluations.expectDirect()
    val worker = workerWaits(ready(1, 1))
    driverSends(Frames.encode("NO_DIRECT"))
    worker.join(10000)
    assert(takeKinds(sentToDriver) == List("READY"))
    workerSends(ready(2, 2))
    assert(takeKinds(sentToDriver) == List("READY"))
  }

  test("without a word from the driver's Python, only the first evaluation waits, and for a limited time") {
    evaluations.expectDirect()
    val began = System.nanoTime()
    workerSends(ready(1, 1))
    val waited = System.nanoTime() - began
    assert(takeKinds(sentToDriver) == List("READY") && waited < 10000000000L)
    val beganAgain = System.nanoTime()
    workerSends(ready(2, 2))
    assert(takeKinds(sentToDriver) == List("READY") && System.nanoTime() - beganAgain < waited / 2)
  }

  /** A worker sends these frames from a thread, which is returned when it waits. */
  private def workerWaits(frames: Array[Byte]*): Thread = {
    val thread = new Thread(() => { workerSends(frames: _*); () })
    thread.start()
    eventually(assert(thread.getState == Thread.State.TIMED_WAITING))
    assert(sentToDriver.isEmpty)
    thread
  }

  test("when the driver's JVM loses its Python, the evaluations of both routes end") {
    workerSends(ready(1, 1))
    val driver = new DirectDriver
    workerSends(ready(2, 2))
    driverSends(Frames.encode("LOST", "driver", "it broke"))
    assert(sentToWorker.map(_.kind) == Seq("ABORT", "ABORT"))
    driver.awaitEnd()
  }

  private def eventually(check: => Any): Unit = {
    val deadline = System.nanoTime() + 10000000000L
    def attempt(): Unit = try { check; () } catch {
      case failed: Throwable =>
        if (System.nanoTime() > deadline) throw failed
        Thread.sleep(5)
        attempt()
    }
    attempt()
  }
}
