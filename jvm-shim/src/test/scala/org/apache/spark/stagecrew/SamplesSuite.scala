package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.{ProcessBook, SampleLog, Samples}
import org.apache.spark.stagecrew.ui.{PageModel, ProcessView, Sample}
import org.apache.spark.stagecrew.wire.Json

class SamplesSuite extends AnyFunSuite {
  private val daemon = new Object

  private def process(pid: Long, cpu: Long = 0, rss: Long = 7) =
    ProcessView("", "", pid, "worker", 500, 0, Vector(Sample(0, rss, cpu, 2, 3)))

  private final class Fixture(maxEnded: Int = ProcessBook.MaxEnded) {
    var now = 0L
    val log = new SampleLog("1", () => "h", () => now)
    val book = new ProcessBook(maxEnded)

    def sample(at: Long, processes: ProcessView*): Unit = {
      now = at
      log.record(daemon, processes.toVector)
    }

    def report(arrives: Boolean = true): Unit = log.unreported.foreach { case (processes, confirm) =>
      book.record(Json.read[Samples](Json.write(Samples(processes))).processes)
      if (arrives) confirm()
    }
  }

  test("samples get their arrival time, and a process that is no longer sampled has ended") {
    val f = new Fixture
    f.sample(1500, process(7, cpu = 500))
    f.sample(2500, process(7, cpu = 250), process(8, cpu = 50))
    f.report()
    f.report()
    f.sample(3500, process(8))
    assert(f.log.now.map(_.pid) == Seq(8))
    f.report()
    assert(f.log.unreported.isEmpty)
    assert(f.book.views == Vector(
      ProcessView("1", "h", 7, "worker", 500, 3500, Vector(Sample(1500, 7, 500, 2, 3), Sample(2500, 7, 250, 2, 3))),
      ProcessView("1", "h", 8, "worker", 500, 0, Vector(Sample(2500, 7, 50, 2, 3), Sample(3500, 7, 0, 2, 3)))))
  }

  test("a process has the topology and the task that it was running at its last sample") {
    var task = Option("enrich-1" -> "stage 3.0 partition 5 attempt 41")
    val log = new SampleLog("1", () => "h", () => 7, pid => task.filter(_ => pid == 7))
    log.record(daemon, Vector(process(7), process(8)))
    assert(log.now.map(p => (p.topology, p.task)) == Seq(("enrich-1", "stage 3.0 partition 5 attempt 41"), ("", "")))
    task = None
    log.record(daemon, Vector(process(7), process(8)))
    assert(log.now.forall(p => p.topology.isEmpty && p.task.isEmpty))
  }

  test("a report that is lost or repeated changes nothing; the numbers of samples and ended processes are bounded") {
    val f = new Fixture(maxEnded = 2)
    (1 to 100).foreach { n =>
      f.sample(1000L * n, process(7, n.toLong))
      if (n % 3 == 0) f.report(arrives = n % 2 == 0)
    }
    f.report()
    assert(f.book.views.head.samples.map(_.time) == (41 to 100).map(_ * 1000L))
    (1 to 5).foreach { n =>
      f.sample(200000L + n, process(n.toLong))
      f.report()
    }
    assert(f.book.views.map(_.pid) == Vector(3, 4, 5) && f.book.views.map(_.ended > 0) == Vector(true, true, false))
    f.book.lost("1", 300000)
    assert(f.book.views.map(_.pid) == Vector(4, 5) && f.book.views.last.ended == 300000)
  }

  test("two sources are independent, and the processes of a disconnected one have ended") {
    val f = new Fixture
    val agent = new Object
    f.sample(1000, process(7))
    f.log.record(agent, Vector(process(9).copy(role = "agent")))
    assert(f.log.now.map(_.pid) == Seq(7, 9))
    f.log.disconnected(daemon)
    f.log.disconnected(daemon)
    f.report()
    assert(f.log.now.map(_.pid) == Seq(9))
    assert(f.book.views.map(one => one.pid -> (one.ended > 0)) == Vector(7L -> true, 9L -> false))
  }

  test("the page names an executor that cannot sample, with the remedy") {
    val problem = process(70).copy(executor = "3", host = "h3", role = "daemon", problem = "install psutil")
    val model = PageModel(Views.snapshot().copy(processes = Vector(problem)), 61000)
    val page = Views.page("processes", model)
    assert(page.text.contains("Executor 3 (host h3): install psutil") &&
      page.text.contains("No Python process has been sampled"))
    assert(!Views.page("", model).text.contains("running with"))
    assert(Metrics.lastSamples(Vector(problem)).forall(_._1 != "worker"))
  }
}
