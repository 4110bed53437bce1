package org.apache.spark.stagecrew
package executor

import scala.collection.mutable

/**
 * The events that a coordinator sent to one evaluation and that its worker has not received yet: a pure state machine.
 * Its owner must synchronize access.
 *
 * Events have the sequence numbers 1, 2, 3, ... A repeated event is accepted only once. An event after a gap, or one
 * for which there is no space, is refused, and so are all later ones. The driver then fails the attempt, so no event is
 * lost silently. The worker receives as many events as it has credit for. The credit is a number of events and a number
 * of bytes; the last event may exceed the bytes.
 */
final class Mailbox(maxEvents: Int, maxBytes: Long) {
  import Mailbox._

  private val waiting = mutable.Queue.empty[Array[Byte]]
  private var bytes = 0L
  private var accepted = 0L
  private var refused = Option.empty[String]
  private var creditEvents = 0L
  private var creditBytes = 0L

  /** Adds events from the coordinator. `first` is the sequence number of the first one. */
  def offer(first: Long, events: Seq[Array[Byte]]): Result = refused match {
    case Some(reason) => Refused(reason)
    case None if first > accepted + 1 => refuse(s"events ${accepted + 1} to ${first - 1} were lost in transit")
    case None =>
      val newEvents = events.drop((accepted + 1 - first).toInt)
      val size = newEvents.map(_.length.toLong).sum
      if (waiting.size + newEvents.size > maxEvents || (waiting.nonEmpty && bytes + size > maxBytes)) {
        refuse(s"its mailbox is full: ${waiting.size} events with $bytes bytes are waiting, " +
          s"because its task does not receive them")
      } else {
        waiting ++= newEvents
        bytes += size
        accepted += newEvents.size
        Accepted(accepted)
      }
  }

  /** Adds to the worker's credit. */
  def addCredit(events: Long, size: Long): Unit = {
    creditEvents += events
    creditBytes += size // may be negative if the last event exceeded the credit; the worker counts the same way
  }

  /** Removes the events that the worker has credit for. Returns them with their first sequence number. */
  def take(): Option[(Long, Vector[Array[Byte]])] = {
    val first = accepted - waiting.size + 1
    val delivered = mutable.ArrayBuffer.empty[Array[Byte]]
    while (waiting.nonEmpty && creditEvents > 0 && creditBytes > 0) {
      val event = waiting.dequeue()
      delivered += event
      bytes -= event.length
      creditEvents -= 1
      creditBytes -= math.max(event.length, 1)
    }
    Option.when(delivered.nonEmpty)(first -> delivered.toVector)
  }

  private def refuse(reason: String): Result = {
    refused = Some(reason)
    Refused(reason)
  }
}

object Mailbox {
  sealed trait Result
  /** All events up to this sequence number are in the mailbox. */
  final case class Accepted(sequence: Long) extends Result
  final case class Refused(reason: String) extends Result
}
