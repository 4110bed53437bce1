package org.apache.spark.stagecrew
package executor

import scala.collection.mutable

/**
 * The events of a coordinator for one evaluation, until its worker takes them: a pure state machine, guarded by its
 * owner.
 *
 * Events have the sequence numbers 1, 2, 3, ... A repeated event is accepted once. An event after a gap, or one that
 * does not fit, is refused with all later ones: the coordinator's side then fails the attempt, so that no loss is
 * silent. The worker takes the events that it has credit for: a number of events, and a number of bytes, which the last
 * event may exceed.
 */
final class Mailbox(maxEvents: Int, maxBytes: Long) {
  import Mailbox._

  private val waiting = mutable.Queue.empty[Array[Byte]]
  private var bytes = 0L
  private var accepted = 0L
  private var refused = Option.empty[String]
  private var wantedEvents = 0L
  private var wantedBytes = 0L

  /** Adds the coordinator's events from this sequence number on. */
  def offer(first: Long, events: Seq[Array[Byte]]): Answer = refused match {
    case Some(reason) => Refused(reason)
    case None if first > accepted + 1 => refuse(s"events ${accepted + 1} to ${first - 1} were lost on their way")
    case None =>
      val fresh = events.drop((accepted + 1 - first).toInt)
      val size = fresh.map(_.length.toLong).sum
      if (waiting.size + fresh.size > maxEvents || (waiting.nonEmpty && bytes + size > maxBytes)) {
        refuse(s"its mailbox is full: ${waiting.size} events of $bytes bytes wait there, " +
          s"because its task does not take them")
      } else {
        waiting ++= fresh
        bytes += size
        accepted += fresh.size
        Accepted(accepted)
      }
  }

  /** Adds to the credit of the worker. */
  def want(events: Long, size: Long): Unit = {
    wantedEvents += events
    wantedBytes += size // negative if the last event exceeded it; the worker counts in the same way
  }

  /** Removes the events that the worker has credit for. Returns them with their first sequence number. */
  def take(): Option[(Long, Vector[Array[Byte]])] = {
    val first = accepted - waiting.size + 1
    val taken = mutable.ArrayBuffer.empty[Array[Byte]]
    while (waiting.nonEmpty && wantedEvents > 0 && wantedBytes > 0) {
      val event = waiting.dequeue()
      taken += event
      bytes -= event.length
      wantedEvents -= 1
      wantedBytes -= math.max(event.length, 1)
    }
    Option.when(taken.nonEmpty)(first -> taken.toVector)
  }

  private def refuse(reason: String): Answer = {
    refused = Some(reason)
    Refused(reason)
  }
}

object Mailbox {
  sealed trait Answer
  /** All events up to this sequence number are in the mailbox. */
  final case class Accepted(sequence: Long) extends Answer
  final case class Refused(reason: String) extends Answer
}
