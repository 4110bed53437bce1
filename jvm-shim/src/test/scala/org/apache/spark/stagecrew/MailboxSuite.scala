package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.Mailbox

/** The events that wait for an evaluation are delivered in order and once, and their number is bounded. */
class MailboxSuite extends AnyFunSuite {
  private def events(names: String*): Seq[Array[Byte]] = names.map(_.getBytes)

  private def take(mailbox: Mailbox): Option[(Long, Seq[String])] =
    mailbox.take().map { case (first, found) => first -> found.map(new String(_)) }

  test("events are taken in order, within the credit") {
    val mailbox = new Mailbox(10, 1000)
    assert(mailbox.offer(1, events("a", "b", "c")) == Mailbox.Accepted(3))
    assert(take(mailbox).isEmpty)
    mailbox.addCredit(2, 1000)
    assert(take(mailbox).contains(1L -> Seq("a", "b")) && take(mailbox).isEmpty)
    mailbox.addCredit(5, 1000)
    assert(take(mailbox).contains(3L -> Seq("c")))
    mailbox.offer(4, events("d"))
    assert(take(mailbox).contains(4L -> Seq("d")))
  }

  test("the last event may exceed the credit in bytes, and the next one waits") {
    val mailbox = new Mailbox(10, 1000)
    mailbox.offer(1, events("aaaa", "bbbb", "cccc"))
    mailbox.addCredit(10, 5)
    assert(take(mailbox).contains(1L -> Seq("aaaa", "bbbb")))
    mailbox.addCredit(0, 3)
    assert(take(mailbox).isEmpty, "the worker has received three bytes more than its credit")
    mailbox.addCredit(0, 1)
    assert(take(mailbox).contains(3L -> Seq("cccc")))
  }

  test("repeated events are accepted once, and acknowledged again") {
    val mailbox = new Mailbox(10, 1000)
    mailbox.addCredit(100, 1000)
    mailbox.offer(1, events("a", "b"))
    assert(mailbox.offer(1, events("a", "b")) == Mailbox.Accepted(2))
    assert(mailbox.offer(2, events("b", "c")) == Mailbox.Accepted(3))
    assert(take(mailbox).contains(1L -> Seq("a", "b", "c")))
  }

  test("after a gap all events are refused") {
    val mailbox = new Mailbox(10, 1000)
    mailbox.offer(1, events("a"))
    assert(mailbox.offer(3, events("c")) == Mailbox.Refused("events 2 to 2 were lost in transit"))
    assert(mailbox.offer(2, events("b")).isInstanceOf[Mailbox.Refused])
  }

  test("a mailbox is full by number or by bytes and then refuses events; an empty one accepts one event of any size") {
    val few = new Mailbox(2, 1000)
    few.offer(1, events("a", "b"))
    assert(few.offer(3, events("c")).asInstanceOf[Mailbox.Refused].reason.contains("2 events with 2 bytes are waiting"))
    val small = new Mailbox(10, 4)
    assert(small.offer(1, events("aaaaaaaa")) == Mailbox.Accepted(1))
    assert(small.offer(2, events("b")).isInstanceOf[Mailbox.Refused])
  }

  test("space becomes free when events are taken") {
    val mailbox = new Mailbox(2, 4)
    mailbox.addCredit(100, 1000)
    (1 to 50).foreach { n =>
      assert(mailbox.offer(2L * n - 1, events("aa", "bb")) == Mailbox.Accepted(2L * n))
      assert(take(mailbox).contains(2L * n - 1 -> Seq("aa", "bb")))
    }
  }
}
