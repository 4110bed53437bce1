package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.util.Random
import org.apache.spark.stagecrew.driver.Topology
import org.apache.spark.stagecrew.executor.{
  ExecutorReport, Ledger, Processes, RunningHook, SpanBook, SpanLog, SpanReport
}
import org.apache.spark.stagecrew.ui.Span
import org.apache.spark.stagecrew.wire.{Description, Json}

class SpansSuite extends AnyFunSuite {
  /** Records a report of the log in the book. Returns the callback for its delivery. */
  private def report(log: SpanLog, book: SpanBook, sequence: Long, executor: String = "1"): () => Unit = {
    val (body, delivered) = log.report
    book.record(executor, sequence, Json.read[SpanReport](Json.write(body)))
    delivered
  }

  test("the first spans and the slowest of the rest are kept, and all others are counted") {
    val random = new Random(11)
    (1 to 50).foreach { _ =>
      val (log, count) = (new SpanLog(first = 5, slowest = 3), random.nextInt(40))
      val lengths = Vector.fill(count)(random.nextInt(1000).toLong * 1000)
      lengths.zipWithIndex.foreach { case (micros, n) => log.add("task", s"$n", n.toLong, micros, failed = false) }
      (0 until 3).foreach(n => log.add("open", s"open $n", n.toLong, 1, failed = n == 1)) // opens have their own slots
      val book = new SpanBook
      report(log, book, 1)
      val (tasks, opens) = book.spans.partition(_.kind == "task")
      val expected = lengths.take(5).sorted ++ lengths.drop(5).sorted.takeRight(3)
      assert(tasks.map(one => (one.ended - one.started) * 1000).sorted == expected.sorted)
      assert((0 until math.min(5, count)).forall(n => tasks.exists(_.name == s"$n")))
      assert(book.dropped == math.max(0, count - 8) && opens.map(_.failed) == Vector(false, true, false))
    }
  }

  test("a report repeats spans until they are delivered; repeated and late reports change nothing") {
    val random = new Random(5)
    (1 to 30).foreach { _ =>
      val (log, book) = (new SpanLog(2, 2), new SpanBook)
      var late = List.empty[(Long, SpanReport)]
      (1L to 60L).foreach { sequence =>
        log.add("task", s"$sequence", sequence, random.nextInt(1000).toLong, failed = false)
        val (body, delivered) = log.report
        random.nextInt(4) match {
          case 0 => late ::= sequence -> body // delivered late, without a confirmation
          case 1 => ()
          case _ =>
            book.record("1", sequence, body)
            delivered()
        }
        if (random.nextBoolean()) late.foreach { case (number, old) => book.record("1", number, old) }
      }
      report(log, book, 100)()
      assert(log.report._1.slots.isEmpty)
      assert(book.size == 4 && book.dropped == 56)
      late.foreach { case (number, old) => book.record("1", number, old) }
      assert(book.size == 4 && book.dropped == 56)
    }
  }

  test("the driver limits spans per topology and in total; topologies that closed first lose theirs first") {
    def topology(id: String, ended: Long, spans: Int) = {
      val created = new Topology(Description(id, id, None, Vector.empty)(), "named")
      if (ended > 0) { created.state = "closed"; created.ended = ended }
      val log = new SpanLog(100, 100)
      (0 until spans).foreach(n => log.add("task", "t", n.toLong, 1, failed = false))
      report(log, created.spans, 1)
      created
    }
    val (older, newer, active) = (topology("a", 1, 10), topology("b", 2, 10), topology("c", 0, 10))
    SpanBook.trim(Seq(newer, active, older), inAll = 25)
    assert((older.view.spans.size, older.view.spansDropped, newer.view.spans.size, active.view.spans.size)
      == ((0, 10L, 10, 10)))
    SpanBook.trim(Seq(newer, active, older), inAll = 5)
    assert(newer.view.spans.isEmpty && active.view.spans.size == 10)
    val small = new SpanBook(limit = 3)
    val log = new SpanLog
    (0 until 9).foreach(n => log.add("open", "o", n.toLong, 1, failed = false))
    report(log, small, 1)
    assert(small.size == 3 && small.dropped == 6)
  }

  test("without timelines no span is recorded, but durations are still reported") {
    val ledger = new Ledger(() => 10000, timelines = false)
    val durations = scala.collection.mutable.ArrayBuffer.empty[(String, Long)]
    ledger.onDuration = (kind, micros) => durations += kind -> micros
    val processes = new Processes(ledger, (_, _) => ("pool", "worker"), () => 5000000)
    val link = Links.link("p", "worker", 1)(_ => ())
    processes.connected(link)
    processes.hookBegan(link, "t", 0, "open", Long.MaxValue)
    processes.hookEnded(link, "t", 0, "open", failed = false, 700, "")
    ledger.span("t", "task", fail("the name of a span is computed although it is not recorded"), 900, failed = false)
    val report = ledger.report().get._2
    assert(report.spans.isEmpty && report.topologies("t").totals.opens == 1)
    assert(durations.toSeq == Seq("open" -> 700L, "task" -> 900L) && ledger.report().isEmpty)
    assert(ledger.full("t")._2.spans.isEmpty)
  }

  test("an open, a close and a hanging hook have a span that ends when they are reported, but a decorate has none") {
    val ledger = new Ledger(() => 10000)
    val processes = new Processes(ledger, (_, _) => ("pool", "worker"), () => 5000000)
    val link = Links.link("p", "worker", 1)(_ => ())
    processes.connected(link)
    Seq("open", "decorate", "close").foreach { hook =>
      processes.hookBegan(link, "t", 0, hook, Long.MaxValue)
      processes.hookEnded(link, "t", 0, hook, failed = hook == "close", 2000000, "")
    }
    processes.hookBegan(link, "t", 0, "open", 1)
    processes.takeOverdue()
    val book = new SpanBook
    book.record("1", 1, ledger.report().get._2.spans("t"))
    assert(book.spans.map(one => (one.kind, one.name, one.started, one.ended, one.failed)) == Vector(
      ("open", "pool", 8000L, 10000L, false), ("close", "pool", 8000L, 10000L, true),
        ("open", "pool", 10000L, 10000L, true)))
  }

  test("a running hook is reported when it begins and when it ends, and is lost with its process") {
    val ledger = new Ledger(() => 10000)
    val processes = new Processes(ledger, (_, _) => ("pool", "worker"), () => 5000000)
    ledger.runningHooks = () => processes.runningHooks.map(hook => hook.copy(span = hook.span.copy(started = 7)))
    val link = Links.link("p", "worker", 1)(_ => ())
    processes.connected(link)
    processes.hookBegan(link, "t", 0, "open", Long.MaxValue)
    val (first, body) = ledger.report().get
    assert(body.hooks.get == Vector(RunningHook("t", Span("", "open", "pool", 7, 0, failed = false))))
    ledger.delivered(first)
    assert(ledger.report().isEmpty)
    ledger.notDelivered(first)
    assert(ledger.report().get._2.hooks.get.size == 1)
    processes.disconnected(link)
    val last = ledger.report().get._2
    assert(last.hooks.contains(Vector.empty))
    val book = new SpanBook
    assert(book.record("1", 9, last.spans("t")).map(one => (one.kind, one.failed, one.lost)) ==
      Vector(("open", true, true)))
    assert(book.record("1", 10, last.spans("t")).isEmpty) // a repeated report has no new spans
    book.lost(Span("2", "open", "pool", 1, 2, failed = true, lost = true))
    book.forget("2")
    assert(book.size == 2 && book.dropped == 0)
  }

  test("new spans alone cause a report, are repeated if that report was lost, and are forgotten with their topology") {
    val ledger = new Ledger
    def slots(report: ExecutorReport) = report.spans("t").slots.map(_.span.name)
    ledger.span("t", "task", "a", 1, failed = false)
    val (first, body) = ledger.report().get
    assert(slots(body) == Seq("a") && ledger.report().isEmpty)
    ledger.notDelivered(first)
    ledger.span("t", "task", "b", 1, failed = false)
    val (second, next) = ledger.report().get
    assert(slots(next) == Seq("a", "b"))
    ledger.delivered(second)
    ledger.span("t", "task", "c", 1, failed = false)
    assert(slots(ledger.full("t")._2) == Seq("c"))
    val (third, last) = ledger.report().get // the driver may have dropped the full report
    assert(slots(last) == Seq("c"))
    ledger.delivered(third)
    assert(ledger.forget("t") && ledger.report().isEmpty)
  }

  test("dropped spans are counted, even if the book is full and reports are repeated") {
    val random = new Random(3)
    (1 to 30).foreach { _ =>
      val book = new SpanBook(limit = 3)
      val logs = Vector("1", "2").map(_ -> new SpanLog(2, 2))
      val count = random.nextInt(60)
      (1 to count).foreach { sequence =>
        val (executor, log) = logs(random.nextInt(2))
        log.add("task", s"$sequence", sequence.toLong, random.nextInt(1000).toLong, failed = false)
        val delivered = report(log, book, sequence.toLong, executor)
        report(log, book, sequence.toLong, executor) // a repeated report
        if (random.nextBoolean()) delivered()
      }
      logs.foreach { case (executor, log) => report(log, book, 100, executor) }
      assert(book.size + book.dropped == count && book.size <= 3)
      book.forget("1")
      assert(book.size + book.dropped == count)
      book.clear()
      assert(book.size == 0 && book.dropped == count)
    }
  }
}
