package org.apache.spark.stagecrew

import java.nio.ByteBuffer
import scala.collection.mutable

/**
 * An executor's evaluations: calls of bound functions that talk with coordinators on the driver. Their mailboxes are here, and
 * frames are routed by the evaluation's number alone; payloads are never looked into.
 *
 * Link threads bring what workers say, RPC threads what the driver says. Guarded by its own lock, which is not held while a
 * worker or the driver is written to, but for what one evaluation is sent: that keeps its order.
 */
final class Evaluations(maxEvents: Int, maxBytes: Long, attempts: Evaluations.Attempts, toDriver: Array[Byte] => Unit) {
  import Evaluations._

  private val book = mutable.LongMap.empty[Evaluation]

  /** Serves a worker's link until it ends. Frames go on to the driver in batches: as many as are there. */
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
      synchronized(book(id) = evaluation) // before the driver hears of it, and answers
      val (stageAttempt, partitions) = attempts.stageOf(attempt)
      batch.add("READY", id, ready.text("binding"), ready.long("subtask"), attempt, ready.long("number"), ready.long("stage"),
        ready.long("partition"), stageAttempt.toLong, partitions.toLong)
      batch.flush()
      val ending = synchronized {
        evaluation.announced = true
        evaluation.ending
      }
      ending.foreach { case (outcome, reason) => end(_.id == id, outcome, reason) }
      // Its end may have been told before it was booked.
      val failed = attempts.failed(attempt)
      if (failed.nonEmpty || !attempts.runs(attempt)) over(_.id == id, failed)
    case "CREDIT_REQUEST" =>
      val want = Frames.decode(ByteBuffer.wrap(frame))
      find(want.long("evaluation")).foreach { evaluation =>
        evaluation.deliver(_.want(want.long("events"), want.long("bytes")))
      }
    case kind @ ("EVENTS" | "REQUEST" | "FINISH" | "CREDIT") =>
      // One that is over by Spark's word is not heard any more.
      val id = Frames.evaluationOf(frame)
      val evaluation = find(id)
      if (kind == "FINISH") evaluation.foreach(_.finishing = Frames.sequenceOf(frame))
      if (evaluation.nonEmpty) batch.add(frame) else link.send("ABORT", id, "its attempt is over, or it was reset")
    case other => throw new FrameException(s"an evaluation does not send $other")
  }

  /** What the driver sent: frames, one behind the other. */
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
      // Before it is written: whoever gets the reply to a request may say at once that it has finished.
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

  /** Spark asks an attempt to end, which `attempts` knows by now: whoever waits for its coordinator ends at once. */
  def interrupted(attempt: Long): Unit = over(_.attempt == attempt, Some(Killed))

  /** Spark's word on an attempt, which `attempts` knows by now to be over: "finished", which cuts what had not finished, or why
    * it failed. */
  def attemptOver(attempt: Long, failed: Option[String]): Unit =
    if (book.nonEmpty) over(_.attempt == attempt, failed)

  private def over(which: Evaluation => Boolean, failed: Option[String]): Unit =
    end(which, if (failed.isEmpty) "abandoned" else "failed", failed.getOrElse(Unneeded))

  /** Tells both sides: the coordinator, and whoever waits for it in the task. The driver hears of a begin before it hears of its
    * end: who is about to tell it of one tells it of the other too. */
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
  /** What the executor's books say of an attempt. */
  trait Attempts {
    def runs(attempt: Long): Boolean
    /** Why it failed, or that Spark has asked it to end; asked before `runs`. */
    def failed(attempt: Long): Option[String]
    /** Which attempt at its stage it belongs to, and how many partitions that has: a Python task knows neither. */
    def stageOf(attempt: Long): (Int, Int)
  }

  /** Those of this executor, which hear of the driver by an endpoint of their own. */
  def on(executor: String, settings: Settings, attempts: Attempts): Evaluations = {
    lazy val driver = SparkInternals.driver(Coordination.EndpointName)
    lazy val here: Evaluations = new Evaluations(settings.mailboxEvents, settings.mailboxBytes, attempts,
      frames => driver.send(Frames.encode("FROM", executor, frames)))
    lazy val endpoint: Peer = SparkInternals.endpoint(s"stagecrew-evaluations-$executor", new Handler {
      override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit =
        Log.contained("what a coordinator sent")(here.arrived(ByteBuffer.wrap(message)))
    })
    // Who we are, once and before all else: Java takes longer to write and read a reference than all the rest of a message.
    driver.send(SparkInternals.withSender(endpoint, Frames.encode("FROM", executor, Array.emptyByteArray)))
    here
  }

  private val BatchBytes = 1 << 18
  private val Unneeded = "Spark needed no more of its rows"
  val Killed = "its attempt was killed"
  val Failed = "its attempt failed"

  private final class Evaluation(val id: Long, val link: Link, val attempt: Long, mailbox: Mailbox) {
    /** The sequence number of its end, once its function has ended: the answer to that is the last that it gets. */
    @volatile var finishing = -1L
    /** Whether the driver was told of its begin, and how it ended before; with the book's lock. */
    var announced = false
    var ending = Option.empty[(String, String)]

    /** Changes the mailbox and sends the worker what it may have now. */
    def deliver[T](change: Mailbox => T): T = synchronized {
      val answer = change(mailbox)
      mailbox.take().foreach { case (first, events) => link.send("EVENTS", id, first, events) }
      answer
    }
  }

  /** Frames on their way to the driver. Of one thread. */
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
