package org.apache.spark.stagecrew
package executor

import java.nio.ByteBuffer
import scala.collection.mutable
import driver._, spark._, wire._

/**
 * The evaluations of an executor: calls of bound functions that talk with coordinators on the driver. It holds their
 * mailboxes, routes frames by the evaluation's number alone, and never reads payloads.
 *
 * Link threads bring the frames of workers, RPC threads those of the driver. It is guarded by its own lock, which is
 * not held while a worker or the driver is written to. The exception is an evaluation's own lock, which keeps the order
 * of its events.
 */
final class Evaluations(maxEvents: Int, maxBytes: Long, attempts: Evaluations.Attempts, toDriver: Array[Byte] => Unit) {
  import Evaluations._

  private val book = mutable.LongMap.empty[Evaluation]

  /** Serves a worker's link until it ends. Frames that have arrived together go to the driver together. */
  def serve(link: Link, limit: Int): Unit = {
    val batch = new Batch(toDriver)
    try while (true) {
      val frame = link.readBytes(limit)
      took(link, frame, batch)
      if (batch.size >= BatchBytes || !link.moreIsThere) batch.flush()
    } finally batch.flush()
  }

  private def took(link: Link, frame: Array[Byte], batch: Batch): Unit = Frames.nameOf(frame) match {
    case "READY" =>
      val ready = Frames.decode(ByteBuffer.wrap(frame))
      val (id, attempt) = (ready.long("evaluation"), ready.long("attempt"))
      val evaluation = new Evaluation(id, link, attempt, new Mailbox(maxEvents, maxBytes))
      synchronized(book(id) = evaluation) // before the driver replies
      val (stageAttempt, partitions) = attempts.stageOf(attempt)
      batch.add("READY", id, ready.text("binding"), ready.long("subtask"), attempt,
        ready.long("number"), ready.long("stage"), ready.long("partition"), stageAttempt.toLong, partitions.toLong)
      batch.flush()
      val ending = synchronized {
        evaluation.announced = true
        evaluation.ending
      }
      ending.foreach { case (outcome, reason) => end(_.id == id, outcome, reason) }
      // The attempt may have ended before the evaluation was booked.
      val failed = attempts.failed(attempt)
      if (failed.nonEmpty || !attempts.runs(attempt)) over(_.id == id, failed)
    case "CREDIT_REQUEST" =>
      val want = Frames.decode(ByteBuffer.wrap(frame))
      find(want.long("evaluation")).foreach { evaluation =>
        evaluation.deliver(_.want(want.long("events"), want.long("bytes")))
      }
    case kind @ ("EVENTS" | "REQUEST" | "FINISH" | "CREDIT") =>
      // Spark has ended its attempt: its frames are dropped.
      val id = Frames.evaluationOf(frame)
      val evaluation = find(id)
      if (kind == "FINISH") evaluation.foreach(_.finishing = Frames.sequenceOf(frame))
      if (evaluation.nonEmpty) batch.add(frame) else link.send("ABORT", id, "its attempt has ended, or it was reset")
    case other => throw new FrameException(s"an evaluation does not send $other")
  }

  /** Handles a sequence of frames from the driver. */
  def arrived(frames: ByteBuffer): Unit = {
    val answers = new Batch(toDriver)
    while (frames.hasRemaining) {
      val frame = new Array[Byte](frames.getInt())
      frames.get(frame)
      take(frame, answers)
    }
    answers.flush()
  }

  private def take(frame: Array[Byte], answers: Batch): Unit = Frames.nameOf(frame) match {
    case "LOST" => end(_ => true, "failed", Frames.decode(ByteBuffer.wrap(frame)).text("reason"))
    case kind => find(Frames.evaluationOf(frame)).foreach(take(_, kind, frame, answers))
  }

  private def take(evaluation: Evaluation, kind: String, frame: Array[Byte], answers: Batch): Unit = kind match {
    case "EVENTS" =>
      val events = Frames.decode(ByteBuffer.wrap(frame))
      evaluation.deliver(_.offer(events.long("first"), events.blobs("payloads"))) match {
        case Mailbox.Accepted(sequence) => answers.add("ACCEPTED", evaluation.id, sequence)
        case Mailbox.Refused(reason) => answers.add("OVERFLOWED", evaluation.id, reason)
      }
    case "REPLY" =>
      // Before the reply is written: the worker may send FINISH as soon as it has the reply.
      if (evaluation.finishing == Frames.sequenceOf(frame)) synchronized(book -= evaluation.id)
      evaluation.link.write(Frames.withLength(frame))
    case "HANDLED" => evaluation.link.write(Frames.withLength(frame))
    case "ABORT" =>
      synchronized(book -= evaluation.id)
      evaluation.link.write(Frames.withLength(frame))
    case other => throw new FrameException(s"the driver does not send $other to an evaluation")
  }

  /** The worker is gone, and its evaluations with it. */
  def gone(link: Link): Unit = end(_.link eq link, "failed", s"$link is gone")

  /** Spark asks an attempt to end, as `attempts` knows already: tasks that wait for a coordinator end at once. */
  def interrupted(attempt: Long): Unit = over(_.attempt == attempt, Some(Killed))

  /** An attempt has ended, as `attempts` knows already. If it did not fail, its unfinished evaluations are
    * abandoned. */
  def attemptOver(attempt: Long, failed: Option[String]): Unit = if (book.nonEmpty) over(_.attempt == attempt, failed)

  private def over(which: Evaluation => Boolean, failed: Option[String]): Unit =
    end(which, if (failed.isEmpty) "abandoned" else "failed", failed.getOrElse(Unneeded))

  /** Ends evaluations on both sides: the coordinator, and the task that waits for it. The driver gets the begin of
    * an evaluation before its end: the thread that sends the begin sends the end too. */
  private def end(which: Evaluation => Boolean, outcome: String, reason: String): Unit = {
    val over = synchronized {
      val (found, unannounced) = book.values.filter(which).toVector.partition(_.announced)
      unannounced.foreach(evaluation => evaluation.ending = evaluation.ending.orElse(Some(outcome -> reason)))
      found.foreach(book -= _.id)
      found
    }
    val batch = new Batch(toDriver)
    over.foreach(evaluation => batch.add("ENDED", evaluation.id, outcome, reason))
    batch.flush()
    over.foreach(evaluation => evaluation.link.send("ABORT", evaluation.id, reason))
  }

  private def find(id: Long): Option[Evaluation] = synchronized(book.get(id))
}

object Evaluations {
  /** The executor's knowledge about attempts. */
  trait Attempts {
    def runs(attempt: Long): Boolean
    /** Why it failed, or that Spark has asked it to end. Called before `runs`. */
    def failed(attempt: Long): Option[String]
    /** The attempt of its stage, and the number of partitions of that: a Python task knows neither. */
    def stageOf(attempt: Long): (Int, Int)
  }

  /** Creates the evaluations of an executor, with their own endpoint for the driver. */
  def on(executor: String, settings: Settings, attempts: Attempts): Evaluations = {
    lazy val driver = Rpc.driver(Coordination.EndpointName)
    lazy val here: Evaluations = new Evaluations(settings.mailboxEvents, settings.mailboxBytes, attempts,
      frames => driver.send(Frames.encode("FROM", executor, frames)))
    lazy val endpoint: Peer = Rpc.endpoint(s"stagecrew-evaluations-$executor", new Handler {
      override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit =
        Log.contained("a coordinator's message")(here.arrived(ByteBuffer.wrap(message)))
    })
    // The endpoint's reference is sent once: Java takes longer for it than for the rest of a message.
    driver.send(Rpc.withSender(endpoint, Frames.encode("FROM", executor, Array.emptyByteArray)))
    here
  }

  private val BatchBytes = 1 << 18
  private val Unneeded = "Spark needed no more of its rows"
  val Killed = "its attempt was killed"
  val Failed = "its attempt failed"

  private final class Evaluation(val id: Long, val link: Link, val attempt: Long, mailbox: Mailbox) {
    /** The sequence number of its FINISH frame: the reply to that is the last one. */
    @volatile var finishing = -1L
    /** Whether the driver knows its begin, and how it ended before that; guarded by the lock of the book. */
    var announced = false
    var ending = Option.empty[(String, String)]

    /** Changes the mailbox, and sends the worker the events that it may have now. */
    def deliver[T](change: Mailbox => T): T = synchronized {
      val answer = change(mailbox)
      mailbox.take().foreach { case (first, events) => link.send("EVENTS", id, first, events) }
      answer
    }
  }

  /** Frames that go to the driver together. Not thread-safe. */
  private final class Batch(send: Array[Byte] => Unit) {
    private val frames = mutable.ArrayBuffer.empty[Array[Byte]]
    private var bytes = 0
    def size: Int = bytes

    def add(frame: Array[Byte]): Unit = {
      frames += frame
      bytes += 4 + frame.length
    }
    def add(kind: String, values: Any*): Unit = add(Frames.withoutLength(Frames.encode(kind, values: _*)))

    def flush(): Unit = if (bytes > 0) {
      val out = ByteBuffer.allocate(bytes)
      frames.foreach(frame => out.putInt(frame.length).put(frame))
      frames.clear()
      bytes = 0
      send(out.array)
    }
  }
}
