package org.apache.spark.stagecrew
package executor

import java.nio.ByteBuffer
import java.util.concurrent.CountDownLatch
import java.util.concurrent.TimeUnit.MILLISECONDS
import scala.collection.mutable
import driver._, spark._, wire._

/**
 * The evaluations of an executor: calls of bound functions that exchange messages with coordinators on the driver. This
 * class holds their mailboxes, routes frames by the id of the evaluation, and never reads payloads.
 *
 * Frames reach the driver's Python by one of two routes: `rpc` (Spark's RPC and the driver's JVM), or, if the driver's
 * Python is on this host, `direct` (its own link to this executor). An evaluation keeps the route on which it began, so
 * that its frames stay in order.
 *
 * Threads of links read the frames of workers. Threads of Spark's RPC, or of the direct link, read the frames of the
 * driver. Each of these threads may write to workers and to the driver. No thread holds the lock of this class while it
 * writes. It may hold the lock of one evaluation, which keeps the events of this evaluation in order.
 */
final class Evaluations(maxEvents: Int, maxBytes: Long, attempts: Evaluations.Attempts, rpc: Evaluations.Route) {
  import Evaluations._

  private val byId = mutable.LongMap.empty[Evaluation]
  /** The link of the driver's Python, and the route over it. */
  @volatile private var direct = Option.empty[(Link, Route)]
  /** Open once the driver's Python has connected directly, or has replied that it does not. */
  @volatile private var directSettled = new CountDownLatch(0)

  /** Serves a worker's link with the role `evaluations` until it ends. Frames that have arrived together are sent to
    * the driver together. */
  def serve(link: Link, limit: Int): Unit = {
    val batch = new Batch
    try while (true) {
      val frame = link.readBytes(limit)
      Hops.passed("executor-reads", frame)
      onWorkerFrame(link, frame, batch)
      if (batch.byteCount >= BatchBytes || !link.hasMore) batch.flush()
    } finally batch.flush()
  }

  /** Serves the link of the driver's Python until it ends. `message` wraps frames into one message to the driver. */
  def serveDriver(link: Link, limit: Int, message: Array[Byte] => Array[Byte]): Unit = {
    val route = Route(frames => link.write(message(frames)))
    val before = synchronized {
      val before = direct
      direct = Some(link -> route)
      before
    }
    before.foreach(_._1.close()) // the driver's Python has connected again
    directSettled.countDown()
    val replies = new Batch
    try while (true) {
      val frame = link.readBytes(limit)
      Hops.passed("executor-receives", frame)
      onDriverFrame(frame, replies)
      if (!link.hasMore) replies.flush()
    } finally {
      synchronized(if (isDirect(link)) direct = None)
      end(_.route eq route, "failed", "the executor lost its connection to the coordinators")
    }
  }

  /** Whether evaluations that begin now use this link. */
  private[stagecrew] def isDirect(link: Link): Boolean = direct.exists(_._1 eq link)

  /** The driver's Python is about to connect directly, or to reply that it does not. */
  private[stagecrew] def expectDirect(): Unit = directSettled = new CountDownLatch(1)

  /** The first evaluations wait for the direct link, because without it they would keep the slower route to their
    * end. */
  private def awaitDirect(): Unit = if (directSettled.getCount > 0) {
    directSettled.await(DirectWaitMs, MILLISECONDS)
    directSettled.countDown()
  }

  private def onWorkerFrame(link: Link, frame: Array[Byte], batch: Batch): Unit = Frames.nameOf(frame) match {
    case "READY" =>
      val ready = Frames.decode(ByteBuffer.wrap(frame))
      val (id, attempt) = (ready.long("evaluation"), ready.long("attempt"))
      awaitDirect()
      val evaluation = synchronized { // if the direct link ends now, `serveDriver` finds the evaluation
        val route = direct.map(_._2).getOrElse(rpc)
        val evaluation = new Evaluation(id, link, attempt, route, new Mailbox(maxEvents, maxBytes))
        byId(id) = evaluation // before the driver can reply
        evaluation
      }
      val (stageAttempt, partitions) = attempts.stageOf(attempt)
      batch.add(evaluation.route, "READY", id, ready.text("binding"), ready.long("subtask"), attempt,
        ready.long("number"), ready.long("stage"), ready.long("partition"), stageAttempt.toLong, partitions.toLong)
      batch.flush()
      val ending = synchronized {
        evaluation.announced = true
        evaluation.ending
      }
      ending.foreach { case (outcome, reason) => end(_.id == id, outcome, reason) }
      // The attempt may have ended before the evaluation was added to `byId`.
      val failure = attempts.failureReason(attempt)
      if (failure.nonEmpty || !attempts.runs(attempt)) endAll(_.id == id, failure)
    case "CREDIT" =>
      val credit = Frames.decode(ByteBuffer.wrap(frame))
      find(credit.long("evaluation")).foreach { evaluation =>
        evaluation.deliver(_.addCredit(credit.long("events"), credit.long("bytes")))
      }
    case kind @ ("EVENTS" | "REQUEST" | "FINISH" | "ASK_HANDLED") =>
      // An unknown evaluation has ended: its frames are dropped, and the worker gets ABORT.
      val id = Frames.evaluationOf(frame)
      val evaluation = find(id)
      if (kind == "FINISH") evaluation.foreach(_.finishSequence = Frames.sequenceOf(frame))
      if (evaluation.nonEmpty) batch.add(evaluation.get.route, frame)
      else link.send("ABORT", id, "its attempt has ended, or its coordinator was reset")
    case other => throw new FrameException(s"an evaluation does not send $other")
  }

  /** Handles a message from the driver: a sequence of frames. */
  def onDriverMessage(frames: ByteBuffer): Unit = {
    Hops.allPassed("executor-receives", frames.array)
    val replies = new Batch
    while (frames.hasRemaining) {
      val frame = new Array[Byte](frames.getInt())
      frames.get(frame)
      onDriverFrame(frame, replies)
    }
    replies.flush()
  }

  private def onDriverFrame(frame: Array[Byte], replies: Batch): Unit = Frames.nameOf(frame) match {
    // The driver has lost its connection to the coordinators, so every evaluation ends.
    case "LOST" => end(_ => true, "failed", Frames.decode(ByteBuffer.wrap(frame)).text("reason"))
    case "NO_DIRECT" => directSettled.countDown()
    case kind => find(Frames.evaluationOf(frame)).foreach(onFrame(_, kind, frame, replies))
  }

  private def onFrame(evaluation: Evaluation, kind: String, frame: Array[Byte], replies: Batch): Unit = kind match {
    case "EVENTS" =>
      val events = Frames.decode(ByteBuffer.wrap(frame))
      evaluation.deliver(_.offer(events.long("first"), events.blobs("payloads"))) match {
        case Mailbox.Accepted(sequence) => replies.add(evaluation.route, "ACCEPTED", evaluation.id, sequence)
        case Mailbox.Refused(reason) => replies.add(evaluation.route, "OVERFLOWED", evaluation.id, reason)
      }
    case "REPLY" | "HANDLED" | "ABORT" =>
      val isLast = kind == "ABORT" || (kind == "REPLY" && evaluation.finishSequence == Frames.sequenceOf(frame))
      // Removed before the write: once the worker has this frame, it may send FINISH or disconnect, and then the
      // evaluation must not be found.
      if (isLast) synchronized(byId -= evaluation.id)
      evaluation.link.write(Frames.withLength(frame))
      Hops.passed("executor-written", frame)
    case "ASK_LIVE" => replies.add(evaluation.route, "LIVE", evaluation.id) // if it has ended, ENDED was sent
    case other => throw new FrameException(s"the driver does not send $other to an evaluation")
  }

  /** Ends the evaluations of a worker whose link is closed. */
  def disconnected(link: Link): Unit = end(_.link eq link, "failed", s"$link has disconnected")

  /** Ends the evaluations of an attempt that Spark has asked to end, so that its task does not wait for a coordinator.
    * `attempts` must already know the failure. */
  def interrupted(attempt: Long): Unit = endAll(_.attempt == attempt, Some(Killed))

  /** Ends the evaluations of an attempt that has ended. If it did not fail, they are abandoned. `attempts` must already
    * know its end. */
  def attemptEnded(attempt: Long, failure: Option[String]): Unit =
    if (byId.nonEmpty) endAll(_.attempt == attempt, failure)

  private def endAll(selected: Evaluation => Boolean, failure: Option[String]): Unit =
    end(selected, if (failure.isEmpty) "abandoned" else "failed", failure.getOrElse(Unneeded))

  /** Ends evaluations in the coordinator and in the worker. The driver must get READY before ENDED. So if READY has not
    * been sent yet, the thread that sends it also sends ENDED. */
  private def end(selected: Evaluation => Boolean, outcome: String, reason: String): Unit = {
    val ended = synchronized {
      val (announced, unannounced) = byId.values.filter(selected).toVector.partition(_.announced)
      unannounced.foreach(evaluation => evaluation.ending = evaluation.ending.orElse(Some(outcome -> reason)))
      announced.foreach(byId -= _.id)
      announced
    }
    val batch = new Batch
    ended.foreach(evaluation => batch.add(evaluation.route, "ENDED", evaluation.id, outcome, reason))
    batch.flush()
    ended.foreach(evaluation => evaluation.link.send("ABORT", evaluation.id, reason))
  }

  private def find(id: Long): Option[Evaluation] = synchronized(byId.get(id))
}

object Evaluations {
  /** One way to send messages to the driver's Python. */
  final case class Route(send: Array[Byte] => Unit)

  /** The task attempts of this executor. */
  trait Attempts {
    def runs(attempt: Long): Boolean
    /** Why the attempt failed, or that Spark has asked it to end. None otherwise. Called before `runs`. */
    def failureReason(attempt: Long): Option[String]
    /** The attempt number of the stage, and the stage's number of partitions. A Python task does not know them. */
    def stageOf(attempt: Long): (Int, Int)
  }

  /** Creates the `Evaluations` of an executor, with an RPC endpoint for messages from the driver. */
  def start(executor: String, settings: Settings, attempts: Attempts, addressFile: String): Evaluations = {
    val driver = Rpc.driver(Coordination.EndpointName)
    val evaluations = new Evaluations(settings.mailboxEvents, settings.mailboxBytes, attempts,
      Route(frames => driver.send(Frames.encode("FROM", executor, frames))))
    val endpoint = Rpc.endpoint(s"stagecrew-evaluations-$executor", new Handler {
      override def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit =
        Log.contained("handling a message of a coordinator")(evaluations.onDriverMessage(ByteBuffer.wrap(message)))
    })
    // ANNOUNCE has the address file, so that the driver's Python can connect directly if it is on this host. The
    // endpoint's reference is sent only once, because its Java serialization is slow.
    if (addressFile.nonEmpty) evaluations.expectDirect()
    driver.send(Rpc.withSender(endpoint, Frames.encode("ANNOUNCE", executor, addressFile)))
    evaluations
  }

  private val BatchBytes = 1 << 18
  /** How long the first evaluations wait for the direct link. The driver's Python normally needs a few milliseconds. */
  private val DirectWaitMs = 1000L
  private val Unneeded = "Spark needed no more of its rows"
  val Killed = "its attempt was killed"
  val Failed = "its attempt failed"

  private final class Evaluation(
      val id: Long, val link: Link, val attempt: Long, val route: Route, mailbox: Mailbox) {
    /** The sequence number of the FINISH frame, or -1 before that frame. The reply to it is the last one. */
    @volatile var finishSequence = -1L
    /** Whether READY was sent to the driver, and how the evaluation ended before that. Guarded by the lock of
      * `Evaluations`. */
    var announced = false
    var ending = Option.empty[(String, String)]

    /** Changes the mailbox, and sends the worker the events for which it has credit. */
    def deliver[T](change: Mailbox => T): T = synchronized {
      val result = change(mailbox)
      mailbox.take().foreach { case (first, events) => link.send("EVENTS", id, first, events) }
      result
    }
  }

  /** Frames that are sent to the driver in one message. Before a frame for another route is added, the earlier frames
    * are sent. Not thread-safe. */
  private final class Batch {
    private var route: Route = _
    private val frames = mutable.ArrayBuffer.empty[Array[Byte]]
    private var bytes = 0
    def byteCount: Int = bytes

    def add(to: Route, frame: Array[Byte]): Unit = {
      if (to ne route) flush()
      route = to
      frames += frame
      bytes += 4 + frame.length
    }
    def add(to: Route, kind: String, values: Any*): Unit =
      add(to, Frames.withoutLength(Frames.encode(kind, values: _*)))

    def flush(): Unit = if (bytes > 0) {
      val out = ByteBuffer.allocate(bytes)
      frames.foreach(frame => out.putInt(frame.length).put(frame))
      frames.clear()
      bytes = 0
      route.send(out.array)
      Hops.allPassed("executor-sent", out.array)
    }
  }
}
