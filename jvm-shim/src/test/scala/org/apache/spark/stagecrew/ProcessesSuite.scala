package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.{Ledger, ListenerCounts, Processes}
import org.apache.spark.stagecrew.wire.{Json, Link}

class ProcessesSuite extends AnyFunSuite {
  private final class Fixture {
    var now = 0L
    val ledger = new Ledger
    val processes = new Processes(ledger, (_, index) => (s"listener $index", "worker"), () => now)
    private var pids = 100L

    def link(role: String = "worker"): Link = {
      pids += 1
      val link = Links.link(s"p$pids", role, pids)(_ => ())
      processes.connected(link)
      link
    }

    def hook(link: Link, hook: String, topology: String = "t", index: Int = 0, failed: Boolean = false): Unit = {
      processes.hookBegan(link, topology, index, hook, Long.MaxValue)
      processes.hookEnded(link, topology, index, hook, failed, 10, if (failed) "bad" else "")
    }

    def counts(topology: String = "t", index: Int = 0): ListenerCounts =
      ledger.of(topology).listeners.find(_.index == index).get
  }

  test("opens and closes are counted with their durations, and a closed listener is not lost") {
    val f = new Fixture
    val link = f.link()
    f.hook(link, "open")
    assert(f.counts() == ListenerCounts(0, "listener 0", "worker", opens = 1, openMicros = 10))
    f.hook(link, "decorate")
    f.hook(link, "close", failed = true)
    f.processes.disconnected(link)
    assert(f.counts() == ListenerCounts(
      0, "listener 0", "worker", opens = 1, closes = 1, failures = 1, openMicros = 10, closeMicros = 10,
      lastError = "bad"))
    assert(f.ledger.of("t").processes == 1)
    assert(f.ledger.of("t").lostProcesses == 0)
  }

  test("the open listeners of a lost process are lost, per topology and listener, once") {
    val f = new Fixture
    val (gone, stays) = (f.link(), f.link())
    Seq("t", "u").foreach(topology => (0 to 1).foreach(index => f.hook(gone, "open", topology, index)))
    f.hook(gone, "close", "u", 1)
    f.hook(stays, "open")
    f.processes.disconnected(gone)
    f.processes.disconnected(gone)
    assert(f.counts("t", 0).lost == 1 && f.counts("t", 1).lost == 1 && f.counts("u", 0).lost == 1)
    assert(f.counts("u", 1).lost == 0)
    assert(f.counts("t", 0).opens - f.counts("t", 0).closes - f.counts("t", 0).lost == 1)
    assert(f.ledger.of("t").lostProcesses == 1)
    assert(f.processes.all == Seq(stays))
  }

  test("a listener is lost if its process ends during open") {
    val f = new Fixture
    val link = f.link()
    f.processes.hookBegan(link, "t", 0, "open", Long.MaxValue)
    f.processes.disconnected(link)
    f.processes.hookEnded(link, "t", 0, "open", failed = false, 10, "")
    assert(f.counts().opens == 1 && f.counts().lost == 1 && f.counts().openMicros == 0)
  }

  test("a topology is deferred while its process is busy, until the process closes it or ends") {
    val f = new Fixture
    val (one, two) = (f.link(), f.link())
    Seq(one, two).foreach { link =>
      f.processes.addTopology(link, "t")
      f.processes.defer(link, "t")
      f.processes.defer(link, "t")
    }
    assert(f.ledger.of("t").deferred == Set(one.process, two.process))
    f.processes.closed(one, "t")
    assert(f.ledger.of("t").deferred == Set(two.process))
    f.processes.disconnected(two)
    assert(f.ledger.of("t").deferred.isEmpty)
  }

  test("an overdue hook is returned once, and counted as a failure") {
    val f = new Fixture
    val (late, quick) = (f.link(), f.link())
    f.processes.began(late, 7, Set("t"))
    f.processes.hookBegan(late, "t", 0, "open", 100)
    f.processes.hookBegan(quick, "t", 1, "open", 100)
    f.processes.hookEnded(quick, "t", 1, "open", failed = false, 1, "")
    f.now = 99
    assert(f.processes.takeOverdue().isEmpty)
    f.now = 100
    assert(f.processes.takeOverdue() == Seq((late, Processes.Hook("t", 0, "open", 100), Some(7L))))
    assert(f.processes.takeOverdue().isEmpty)
    assert(f.counts().failures == 1 && f.counts().lastError.contains("ignored its timeout"))
    assert(f.counts("t", 1).failures == 0)
    assert(f.processes.unclosed(late, "t") == Seq("listener 0"))
  }

  test("the duration of a killed hook is in the sums and in the timeline") {
    val f = new Fixture
    val timed = scala.collection.mutable.Map.empty[String, Long]
    f.ledger.onDuration = (kind, micros) => timed(kind) = timed.getOrElse(kind, 0L) + micros
    Seq("open", "close").zipWithIndex.foreach { case (hook, n) =>
      f.processes.hookBegan(f.link(), "t", 0, hook, f.now + 1)
      f.now += 1000000L * (n + 2)
      assert(f.processes.takeOverdue().size == 1)
    }
    assert(f.counts().openMicros == 2000 && f.counts().closeMicros == 3000)
    assert(timed == Map("open" -> 2000L, "close" -> 3000L))
  }

  test("finds busy links, links that run an attempt, and links that must close a topology") {
    val f = new Fixture
    val (worker, idle, agent) = (f.link(), f.link(), f.link("agent"))
    f.processes.began(worker, 7, Set("u"))
    f.processes.began(agent, 7, Set("u"))
    Seq(worker, idle).foreach(f.processes.addTopology(_, "t"))
    f.processes.addTopology(worker, "u")
    assert(f.processes.running(7) == Seq(worker))
    assert(f.processes.busy == Seq(worker, agent))
    assert(f.processes.linksOf("t") == Seq(worker -> true, idle -> false))
    assert(f.processes.linksOf("u") == Seq(worker -> false)) // its task belongs to this topology
    assert(f.processes.hasTopologies(idle) && !f.processes.hasTopologies(agent))
    f.processes.ended(worker)
    f.processes.closed(idle, "t")
    assert(f.processes.linksOf("t") == Seq(worker -> false))
    assert(f.processes.running(7).isEmpty)
  }

  test("a report does not grow with the number of ended processes") {
    val f = new Fixture
    (1 to 10000).foreach { n =>
      val link = f.link()
      f.hook(link, "open")
      if (n % 2 == 0) f.hook(link, "close")
      f.processes.disconnected(link)
    }
    assert(f.ledger.of("t").processes == 10000 && f.ledger.of("t").lostProcesses == 5000)
    assert(Json.write(f.ledger.report().get._2).length < 30000)
  }
}
