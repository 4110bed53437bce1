package org.apache.spark.stagecrew

import scala.collection.mutable

/**
 * What a coordinator sent to one evaluation, until its worker takes it: a pure state machine, guarded by its owner.
 *
 * Events have the sequence numbers 1, 2, 3… What comes twice is taken once; what leaves a gap, or does not fit, is refused
 * with all that follows: the coordinator's side then fails the attempt, so that no loss is silent. The worker takes what it
 * asked for: so many events, and so many bytes, of which the last event may take more.
 */
final class Mailbox(maxEvents: Int, maxBytes: Long) {
  import Mailbox._

  private val waiting = mutable.Queue.empty[Array[Byte]]
  private var bytes = 0L
  private var accepted = 0L
  private var refused = Option.empty[String]
  private var wantedEvents = 0L
  private var wantedBytes = 0L

  /** The coordinator's events from this sequence number on. */
  def offer(first: Long, events: Seq[Array[Byte]]): Answer = refused match {
    case Some(reason) => Refused(reason)
    case None if first > accepted + 1 => refuse(s"events ${accepted + 1} to ${first - 1} were lost on their way")
    case None =>
      val fresh = events.drop((accepted + 1 - first).toInt)
      val size = fresh.map(_.length.toLong).sum
      if (waiting.size + fresh.size > maxEvents || (waiting.nonEmpty && bytes + size > maxBytes)) {
        refuse(s"its mailbox is full: ${waiting.size} events of $bytes bytes wait there, because its task does not take them")
      } else {
        waiting ++= fresh
        bytes += size
        accepted += fresh.size
        Accepted(accepted)
      }
  }

  /** The worker asks for so many more. */
  def want(events: Long, size: Long): Unit = {
    wantedEvents += events
    wantedBytes += size // it may be below zero, by what the last event took more; the worker counts as we do
  }

  /** What the worker gets now, with its first sequence number. */
  def take(): Option[(Long, Vector[Array[Byte]])] = {
    val first = accepted - waiting.size + 1
    val taken = Vector.newBuilder[Array[Byte]]
    var count = 0
    while (waiting.nonEmpty && wantedEvents > 0 && wantedBytes > 0) {
      val event = waiting.dequeue()
      taken += event
      count += 1
      bytes -= event.length
      wantedEvents -= 1
      wantedBytes -= math.max(event.length, 1)
    }
    if (count == 0) None else Some(first -> taken.result())
  }

  private def refuse(reason: String): Answer = {
    refused = Some(reason)
    Refused(reason)
  }
}

object Mailbox {
  sealed trait Answer
  /** All up to this sequence number are in. */
  final case class Accepted(sequence: Long) extends Answer
  final case class Refused(reason: String) extends Answer
}
