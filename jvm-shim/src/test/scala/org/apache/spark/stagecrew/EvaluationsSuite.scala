package org.apache.spark.stagecrew

import java.io.{ByteArrayOutputStream, EOFException}
import java.nio.ByteBuffer
import org.scalatest.OneInstancePerTest
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.mutable
import org.apache.spark.stagecrew.executor.Evaluations
import org.apache.spark.stagecrew.wire.{Frame, Frames, Link}

class EvaluationsSuite extends AnyFunSuite with OneInstancePerTest {
  private val driver = mutable.Buffer.empty[Frame]
  private val worker = mutable.Buffer.empty[Frame]

  /** Attempts 1 to 9 run here. */
  private object attempts extends Evaluations.Attempts {
    val failures = mutable.Map.empty[Long, String]
    val ended = mutable.Set.empty[Long]
    override def runs(attempt: Long): Boolean = attempt < 10 && !ended(attempt)
    override def failureReason(attempt: Long): Option[String] = failures.get(attempt)
    override def stageOf(attempt: Long): (Int, Int) = (2, 8)
  }

  /** What happens while the next message is on its way to the driver. */
  private var meanwhile = Option.empty[() => Unit]

  /** An executor. Its frames to the driver are collected in `driver`. */
  private val evaluations: Evaluations = new Evaluations(10, 1000, attempts, { bytes =>
    meanwhile.foreach { happens =>
      meanwhile = None
      happens()
    }
    val buffer = ByteBuffer.wrap(bytes)
    while (buffer.hasRemaining) {
      val frame = new Array[Byte](buffer.getInt())
      buffer.get(frame)
      driver += Frames.decode(ByteBuffer.wrap(frame))
    }
  })

  /** A worker sends these frames, and then nothing more. Its received frames are collected in `worker`. */
  private def says(frames: Array[Byte]*): Link = {
    val input = new ByteArrayOutputStream
    frames.foreach(input.write(_))
    val link = Links.link("p", "evaluations", 7, input.toByteArray)(worker += _)
    intercept[EOFException](evaluations.serve(link, 1 << 20))
    link
  }

  private def arrives(frames: Array[Byte]*): Unit = {
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

  private def kinds(frames: mutable.Buffer[Frame]) = {
    val found = frames.map(_.kind).toList
    frames.clear()
    found
  }

  test("the reply to its end is the last reply of an evaluation, and earlier requests get theirs") {
    // So too when the reply to a request is still being written while the worker, which has it, says that it finished.
    says(ready(1, 1), request(1, 1), request(1, 2), finish(1, 3))
    assert(kinds(driver) == List("READY", "REQUEST", "REQUEST", "FINISH"))
    arrives(reply(1, 1), reply(1, 2))
    arrives(reply(1, 3), reply(1, 4))
    assert(worker.map(_.long("sequence")) == Seq(1, 2, 3))
  }

  test("the end of an attempt ends its evaluations, and later frames are refused") {
    says(ready(1, 1), ready(2, 2))
    kinds(driver)
    evaluations.attemptEnded(1, Some("killed"))
    assert(driver.map(frame => (frame.kind, frame.long("evaluation"), frame.text("outcome"))) == Seq(("ENDED", 1, "failed")))
    kinds(driver)
    assert(kinds(worker) == List("ABORT"))
    says(request(1, 1), request(2, 1))
    assert(kinds(driver) == List("REQUEST") && kinds(worker) == List("ABORT"))
    evaluations.attemptEnded(2, None)
    assert(driver.map(_.text("outcome")) == Seq("abandoned"))
  }

  test("an abandoned evaluation is notified, because it may wait for an event") {
    says(ready(1, 1))
    evaluations.attemptEnded(1, None)
    assert(worker.map(frame => (frame.kind, frame.text("reason"))) == Seq(("ABORT", "Spark needed no more of its rows")))
  }

  test("a killed attempt ends its evaluations at once, also those that begin later") {
    says(ready(1, 1), ready(2, 2))
    kinds(driver)
    attempts.failures(1) = "killed"
    evaluations.interrupted(1)
    assert(kinds(driver) == List("ENDED") && worker.map(_.long("evaluation")) == Seq(1))
    kinds(worker)
    says(ready(3, 1))
    assert(kinds(driver) == List("READY", "ENDED") && kinds(worker) == List("ABORT"))
    attempts.ended += 1
    evaluations.attemptEnded(1, Some("killed"))
    kinds(driver)
    says(ready(4, 1))
    assert(driver.map(_.kind) == Seq("READY", "ENDED") && driver.last.text("outcome") == "failed")
  }

  test("an attempt that was killed before its first evaluation began ends that at once") {
    attempts.failures(1) = "killed"
    says(ready(1, 1))
    assert(kinds(driver) == List("READY", "ENDED") && kinds(worker) == List("ABORT"))
  }

  test("an evaluation that is booked after its attempt has ended is abandoned on both sides") {
    says(ready(3, 99))
    assert(driver.last.text("outcome") == "abandoned")
    assert(kinds(driver) == List("READY", "ENDED") && kinds(worker) == List("ABORT"))
  }

  test("an evaluation that is booked after its attempt has failed has failed") {
    attempts.failures(99) = "its attempt failed"
    says(ready(3, 99))
    assert(driver.map(_.kind) == Seq("READY", "ENDED"))
    assert((driver.last.text("outcome"), driver.last.text("reason")) == (("failed", "its attempt failed")))
    assert(kinds(worker) == List("ABORT"))
  }

  test("the driver gets a begin before its end, also if the attempt fails meanwhile") {
    meanwhile = Some(() => evaluations.attemptEnded(1, Some("its attempt failed")))
    says(ready(3, 1))
    assert(driver.map(_.kind) == Seq("READY", "ENDED"))
    assert((driver.last.text("outcome"), driver.last.text("reason")) == (("failed", "its attempt failed")))
    assert(kinds(worker) == List("ABORT"))
  }

  test("when the driver's Python is gone all evaluations end, with the reason") {
    says(ready(1, 1), ready(2, 2))
    arrives(Frames.encode("LOST", "driver", "it broke"))
    assert(worker.map(frame => (frame.kind, frame.text("reason"))) == Seq.fill(2)(("ABORT", "it broke")))
  }

  test("the evaluations of a worker end with its link") {
    val link = says(ready(1, 1), ready(2, 1))
    kinds(driver)
    evaluations.disconnected(link)
    assert(driver.map(_.long("evaluation")).toSet == Set(1, 2) && kinds(driver).toSet == Set("ENDED"))
  }

  test("events wait in the mailbox for credit, and are acknowledged when they are in it") {
    says(ready(1, 1))
    kinds(driver)
    arrives(Frames.encode("EVENTS", 1L, 1L, Vector(Array[Byte](1), Array[Byte](2))))
    assert(kinds(driver) == List("ACCEPTED") && worker.isEmpty)
    says(Frames.encode("CREDIT_REQUEST", 1L, 5L, 100L))
    assert(kinds(worker) == List("EVENTS"))
    arrives(Frames.encode("EVENTS", 1L, 4L, Vector(Array[Byte](4))))
    assert(kinds(driver) == List("OVERFLOWED"))
    arrives(Frames.encode("ABORT", 1L, "events were lost"), reply(1, 1))
    assert(kinds(worker) == List("ABORT"))
  }
}
