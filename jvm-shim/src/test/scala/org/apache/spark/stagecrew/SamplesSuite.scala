package org.apache.spark.stagecrew

import org.scalatest.concurrent.Eventually._
import org.scalatest.funsuite.AnyFunSuite
import org.scalatest.time.SpanSugar._

class SamplesSuite extends AnyFunSuite {
  private def seen(pid: Long, cpu: Long, rss: Long = 7) = Sampler.Seen(pid, "worker", 500, cpu, Sampler.Now(rss, 2, 3))

  private def reported(log: SampleLog, book: ProcessBook, arrives: Boolean = true): Unit = log.untold.foreach { case (node, told) =>
    book.took(Json.parse(Json.write(node)))
    if (arrives) told()
  }

  test("CPU is since the look before, at first since the process began; one that is gone has ended") {
    val (log, book) = (new SampleLog("1", () => "h"), new ProcessBook)
    log.took(1500, Seq(seen(7, 500)))
    log.took(2500, Seq(seen(7, 750), seen(8, 100)))
    reported(log, book)
    reported(log, book)
    log.took(3500, Seq(seen(8, 100)))
    assert(log.now.map(_._2.cpu) == Seq(0))
    reported(log, book)
    assert(log.untold.isEmpty)
    assert(book.views == Vector(
      ProcessView("1", "h", 7, "worker", 500, 3500, Vector(Sample(1500, 7, 500, 2, 3), Sample(2500, 7, 250, 2, 3))),
      ProcessView("1", "h", 8, "worker", 500, 0, Vector(Sample(2500, 7, 50, 2, 3), Sample(3500, 7, 0, 2, 3)))))
  }

  test("a report that is lost or comes twice changes nothing, and all is bounded") {
    val (log, book) = (new SampleLog("1", () => "h"), new ProcessBook(ended = 2))
    (1 to 100).foreach { n =>
      log.took(1000L * n, Seq(seen(7, n.toLong)))
      if (n % 3 == 0) reported(log, book, arrives = n % 2 == 0)
    }
    reported(log, book)
    val only = book.views.head
    assert(only.samples.map(_.time) == (41 to 100).map(_ * 1000L))
    (1 to 5).foreach { n =>
      log.took(200000L + n, Seq(seen(n.toLong, 0)))
      reported(log, book)
    }
    assert(book.views.map(_.pid) == Vector(3, 4, 5) && book.views.map(_.ended > 0) == Vector(true, true, false))
    book.lost("1", 300000)
    assert(book.views.map(_.pid) == Vector(4, 5) && book.views.last.ended == 300000)
  }

  test("a process is looked at as /proc has it, and one that is gone is not there") {
    val child = new ProcessBuilder("sleep", "60").start()
    try {
      eventually(timeout(30.seconds)) { // until it is `sleep`
        val now = Sampler.seen(child.toHandle).get
        assert(now.rss > 100000 && now.threads == 1 && now.files >= 3)
      }
      new Sampler(new SampleLog("1", () => "h"), () => None).look() // no Python here: nothing is found, nothing is thrown
    } finally {
      child.destroyForcibly()
      child.waitFor()
    }
    assert(Sampler.seen(child.toHandle).isEmpty)
  }
}
