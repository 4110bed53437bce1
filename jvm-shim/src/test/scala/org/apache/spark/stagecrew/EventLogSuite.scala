package org.apache.spark.stagecrew

import java.nio.file.{Files, Path}
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import org.apache.spark.SparkConf
import org.apache.spark.util.JsonProtocol
import org.apache.spark.util.kvstore.InMemoryStore
import org.apache.spark.stagecrew.driver.DriverCrew
import org.apache.spark.stagecrew.executor.{ExecutorCounts, ListenerCounts, Totals}
import org.apache.spark.stagecrew.spark.{PageRequest, TypedStore}
import org.apache.spark.stagecrew.ui.{EventLogWriter, History, HistoryPlugin, KeptState, PageModel, ProcessView, RecoveryView, Span}
import org.apache.spark.stagecrew.ui.{Sample, Show, Snapshot, StepView, Tab, TopologyView}
import org.apache.spark.stagecrew.wire.Json

class EventLogSuite extends AnyFunSuite {
  import Views._

  /** A driver that writes an event log. The clock changes only when a test sets `now`. */
  private final class Run(interval: Long = 1000, maxEvents: Int = 3) {
    var now = 100000L
    val posted = mutable.ArrayBuffer.empty[StagecrewState]
    val log = new EventLogWriter(interval, maxEvents, () => now, {
      case state: StagecrewState => posted += state
      case other => fail(s"$other")
    })
    def of(id: String): Seq[StagecrewState] = posted.toSeq.filter(_.id == id)
  }

  private def jobs(state: StagecrewState): Int = Json.read[TopologyView](state.body).jobs

  /** The content of the History Server's store after reading these events as Spark writes them. */
  private def history(events: Seq[String], retained: Any = 1000): PageModel = {
    val kept = new TypedStore(new InMemoryStore, classOf[KeptState])
    val conf = new SparkConf(false).set(Settings.RetainedTopologies, retained.toString)
    val listener = new HistoryPlugin().listener(conf, kept)
    events.map(JsonProtocol.sparkEventFromJson).foreach(listener.onOtherEvent)
    History.of(kept.all)
  }

  private def written(state: StagecrewState): String = JsonProtocol.sparkEventToJsonString(state)

  test("the beginning and the end of a topology are stored immediately, and changes once per interval") {
    val run = new Run()
    run.log.changed(snapshot(topology("a")))
    (1 to 15).foreach { i =>
      run.now += 100
      val view = snapshot(topology("a").copy(jobs = i))
      run.log.changed(view)
      run.log.tick(view)
    }
    assert(run.of("a").map(jobs) == Seq(2, 10))
    run.log.changed(snapshot(topology("a", state = "closed").copy(jobs = 16)))
    assert(run.of("a").map(jobs) == Seq(2, 10, 16) && run.of("a").map(_.number) == Seq(1, 2, 3))
  }

  test("unchanged state is not stored again") {
    val run = new Run()
    (1 to 5).foreach { _ =>
      run.now += 5000
      run.log.tick(snapshot(topology("a")))
    }
    assert(run.posted.map(_.kind).sorted == Seq("application", "topology"))
  }

  test("the number of events of a topology is limited, which its page mentions, and its end is always stored") {
    val run = new Run()
    (1 to 20).foreach { i =>
      run.now += 5000
      run.log.tick(snapshot(topology("a").copy(jobs = i)))
    }
    assert(run.of("a").map(state => (jobs(state), state.capped)) == Seq((1, false), (2, false), (3, true)))
    assert(history(run.posted.map(written).toSeq).notes("a").exists(_.contains(Settings.EventLogMaxEvents)))
    run.log.changed(snapshot(topology("a", state = "closed").copy(jobs = 21)))
    assert(jobs(run.of("a").last) == 21)
    assert(history(run.posted.map(written).toSeq).snapshot.topologies.map(_.jobs) == Vector(21))
  }

  test("the page of an ended topology mentions missing events only if there are any") {
    val run = new Run(maxEvents = 2)
    run.log.tick(snapshot(topology("a"), topology("b"), topology("c")))
    run.now += 5000
    run.log.tick(snapshot(topology("a"), topology("b"), topology("c").copy(jobs = 3))) // the last event of c before its end
    run.now += 500
    run.log.tick(snapshot(topology("a"), topology("b"), topology("c").copy(jobs = 4))) // is not due
    run.log.changed(snapshot(topology("a", state = "closed"), topology("b"), topology("c", state = "closed").copy(jobs = 5)))
    assert(run.of("a").map(_.capped) == Seq(false, false) && run.of("c").map(_.capped) == Seq(false, true, false))
    val model = history(run.posted.map(written).toSeq)
    assert(model.notes("a").isEmpty && model.notes("c").isEmpty)
    (6 to 9).foreach { i =>
      run.now += 5000
      run.log.tick(snapshot(topology("b").copy(jobs = i)))
    }
    run.log.changed(snapshot(topology("b", state = "closed").copy(jobs = 9)))
    assert(run.of("b").map(_.capped) == Seq(false, true, true))
    assert(history(run.posted.map(written).toSeq).notes("b").exists(note => note.contains("are missing") && note.contains(Settings.EventLogMaxEvents)))
  }

  test("the sums of a killed application are as recent as its topologies, and a note says which parts are older") {
    val run = new Run(interval = 1000, maxEvents = 1)
    def all(application: String, a: String, opens: Int) = {
      val totals = Totals(opens = opens, openMicros = 1500L * opens, closeMicros = 2500000L * opens)
      snapshot(topology("application", DriverCrew.ApplicationKind, application), topology("a", state = a, listeners = opens)).copy(totals = totals)
    }
    run.log.tick(all("active", "active", 1))
    (2 to 4).foreach { i =>
      run.now += 5000
      run.log.tick(all("active", "active", i))
    }
    run.log.changed(all("active", "closed", 7))
    val killed = history(run.posted.map(written).toSeq)
    assert(killed.snapshot.totals == killed.find("a").get.executors.values.map(_.totals).reduce(_ + _) && killed.snapshot.totals.opens == 7)
    assert(page("", killed).text.contains("opens 7,"))
    assert(killed.notes("").exists(_.contains(Show.date(100000))) && killed.notes("").forall(note => !note.contains("its end")))
    run.log.changed(all("closed", "closed", 7))
    run.log.flush(all("closed", "closed", 7))
    val ended = history(run.posted.map(written).toSeq)
    assert(ended.snapshot.topologies.toSet == all("closed", "closed", 7).topologies.toSet && ended.snapshot.totals.opens == 7)
    assert(ended.notes("").nonEmpty && ended.notes("").forall(_.contains("are missing")))
    val quiet = new Run(maxEvents = 1)
    quiet.log.tick(all("active", "closed", 1))
    quiet.log.changed(all("closed", "closed", 1))
    quiet.log.flush(all("closed", "closed", 1))
    assert(history(quiet.posted.map(written).toSeq).notes.values.flatten.isEmpty)
  }

  test("sums of coordinators are as recent as the topologies, even for a killed application") {
    val run = new Run(interval = 1000, maxEvents = 2)
    def all(state: String, events: Long, live: Long = 1) = {
      val one = operator("splits").copy(eventsIn = events, live = live, progress = VectorMap.empty)
      snapshot(topology("application", DriverCrew.ApplicationKind), topology("a", state = state).copy(operators = Vector(one)))
        .copy(coordinators = Some(one), processes = Vector(ProcessView("1", "h", 1, "worker", 1, 0, Vector(Sample(events, 1, 1, 1, 1)))))
    }
    (1 to 5).foreach { i =>
      run.now += 5000
      run.log.tick(all("active", i))
    }
    run.now += 5000
    run.log.changed(all("closed", 7, live = 0))
    val events = run.posted.map(written).toSeq
    val killed = history(events).snapshot
    assert(killed.processes.flatMap(_.samples.map(_.time)) == Vector(2)) // the application's own event is older
    assert(killed.coordinators == all("closed", 7, live = 0).coordinators)
    // There are no sums at the beginning of a topology whose coordinators have not reported yet, and in an older log.
    assert(history(events.map(_.replace("\\\"coordinators\\\"", "\\\"unknown\\\""))).snapshot.coordinators.isEmpty)
    val older = run.posted.toSeq.map(s => if (s.kind == StagecrewState.Topology) s.copy(body = s.body.replace("\"coordinators\"", "\"unknown\"")) else s)
    assert(history(older.map(written)).snapshot.coordinators.exists(_.eventsIn == 2))
  }

  test("at the end of the application all changes are stored, due or not") {
    val run = new Run(interval = 100000, maxEvents = 2)
    run.log.tick(snapshot(topology("a"), topology("b")))
    run.log.flush(snapshot(topology("a").copy(jobs = 9), topology("b")).copy(totals = Totals(9, 2, 3, 4)))
    assert(run.of("a").map(jobs) == Seq(2, 9) && run.of("b").size == 1)
    assert(history(run.posted.map(written).toSeq).snapshot == snapshot(topology("a").copy(jobs = 9), topology("b")).copy(totals = Totals(9, 2, 3, 4)))
  }

  test("a body that is too large is trimmed, beginning with its spans") {
    val run = new Run()
    run.log.changed(snapshot(busy("a", spans = 20000)))
    val state = run.of("a").head
    val view = Json.read[TopologyView](state.body)
    assert(state.trimmed && state.body.length <= StagecrewState.MaxBytes)
    assert(view.spans == busy("a", 20000).spans.takeRight(500) && view.spansDropped == 19500 && view.operators == busy("a").operators)
    assert(history(Seq(written(state))).notes("a").exists(_.contains("too large")))
    val texts = topology("b", listeners = 2000, error = "x" * 5000).copy(name = "n" * 100000)
    run.log.changed(snapshot(texts))
    assert(run.of("b").exists(state => state.trimmed && state.body.length <= StagecrewState.MaxBytes))
    val processes = Snapshot(Vector.empty, Totals(1), (1 to 3000).map(i => ProcessView("1", "h", i.toLong, "worker", 1, 0,
      (1 to 100).map(t => Sample(t.toLong, 1, 1, 1, 1)).toVector)).toVector)
    run.log.tick(processes)
    assert(run.of("").exists(state => state.trimmed && state.body.length <= StagecrewState.MaxBytes))
  }

  test("the last event of a topology applies, and the number of closed topologies is limited") {
    val run = new Run()
    val all = topology("application", DriverCrew.ApplicationKind, "closed") +: topology("runs") +: (1 to 9).map(i => topology(s"t$i", state = "closed"))
    all.foreach(view => run.log.changed(snapshot(view)))
    val events = run.posted.map(written).toSeq
    assert(history(events, retained = 2).snapshot.topologies.map(_.id).toSet == Set("application", "runs", "t8", "t9"))
  }

  test("the overview counts all closed topologies, including those that are not kept") {
    val run = new Run()
    (1 to 7).foreach { i =>
      run.log.changed(snapshot(topology(s"t$i")))
      run.log.changed(snapshot(topology(s"t$i", state = "closed")))
    }
    run.log.changed(snapshot(topology("t8")))
    val events = run.posted.map(written).toSeq
    val some = history(events :+ events(1) :+ events(events.size - 2), 3) // two of the events are repeated
    assert(some.snapshot.topologies.size == 4 && some.snapshot.forgottenTopologies == 4)
    assert(page("", some).text.contains("1 active, 7 closed; the last 3 closed ones are listed"))
    val all = history(events)
    assert(all.snapshot.forgottenTopologies == 0 && page("", all).text.contains("1 active, 7 closed") && !page("", all).text.contains("are listed"))
    run.posted.clear()
    run.log.tick(snapshot().copy(forgottenTopologies = 1))
    run.now += 5000
    run.log.tick(snapshot().copy(forgottenTopologies = 2))
    assert(run.posted.map(_.kind) == Seq("application")) // nothing to store
  }

  test("a topology without an end in the event log is shown up to its last event") {
    val run = new Run()
    run.log.changed(snapshot(topology("a"), topology("b", state = "closed")))
    val model = history(run.posted.map(written).toSeq)
    assert(model.until(model.find("a").get) == run.now && model.notes("a").exists(_.contains("before the end")))
    assert(model.until(model.find("b").get) == 31000 && model.notes("b").isEmpty)
  }

  test("events with missing, unknown or null fields, unknown kinds or invalid bodies do not stop the reader") {
    val name = classOf[StagecrewState].getName
    val good = s"""{"Event":"$name","version":7,"kind":"topology","id":"a","time":5,"more":{"x":[1]},"body":"{\\"id\\":\\"a\\",\\"new\\":1}"}"""
    val model = history(Seq(
      s"""{"Event":"$name"}""",
      s"""{"Event":"$name","version":1,"kind":null,"id":null,"body":null}""",
      s"""{"Event":"$name","version":1,"kind":"topology","id":"x","body":null}""",
      s"""{"Event":"$name","version":1,"kind":"topology","id":"x","body":"no JSON"}""",
      s"""{"Event":"$name","version":1,"kind":"topology","id":"x","body":"[1]"}""",
      s"""{"Event":"$name","version":1,"kind":"topology","id":"y","body":"{\\"spans\\":[1,2],\\"operators\\":7}"}""",
      s"""{"Event":"$name","version":9,"kind":"from the future","id":"z","body":"{}"}""",
      good))
    assert(model.find("a").exists(_.state == "") && model.notes("a").exists(_.contains("newer version of stagecrew")))
    Tab.pages(() => model).foreach(page => page.html(PageRequest("", Map("id" -> "a"))))
  }

  test("each page of the History Server shows an event log from before the first release") {
    val log = Iterator.iterate(Path.of("").toAbsolutePath)(_.getParent).takeWhile(_ != null)
      .map(_.resolve("tests/data/event-log-before-the-first-release/recorded")).find(Files.exists(_)).get
    val lines = Files.readAllLines(log).asScala.toSeq.filter(_.contains(classOf[StagecrewState].getName))
    val model = history(lines)
    assert(lines.nonEmpty && model.snapshot.topologies.map(_.name) == Vector("application", "enrich"))
    assert(rows(page("", model), "listeners").map(row => (row(1), row(4), row(5))) == Seq(("pool", "4", "4")))
    assert(rows(page("topology", model, "id" -> model.snapshot.topologies.last.id), "executors").nonEmpty)
    Tab.pages(() => model).foreach { page =>
      val request = PageRequest("", Map("id" -> model.snapshot.topologies.last.id))
      assert(page.html(request).nonEmpty && Json.parse(page.json(request)).get("version").asInt == 1)
    }
    assert(Json.as[Snapshot](Report.of(log.toString)).topologies == model.snapshot.topologies)
  }

  test("an invalid setting of the History Server does not prevent its pages") {
    val run = new Run()
    run.log.changed(snapshot(topology("a")))
    assert(history(run.posted.map(written).toSeq, retained = "many").find("a").nonEmpty)
  }

  test("a log without our events has no content, and the History Server finds the plugin of the tab") {
    assert(history(Nil).snapshot == Snapshot(Vector.empty, Totals()))
    val found = java.util.ServiceLoader.load(classOf[org.apache.spark.status.AppHistoryServerPlugin])
    assert(scala.jdk.CollectionConverters.IterableHasAsScala(found).asScala.exists(_.isInstanceOf[HistoryPlugin]))
  }

  test("the end of a very large topology is stored with its sums, and its page has a note") {
    val failing = ExecutorCounts((0 until 8).map(i => ListenerCounts(i, s"listener $i", "worker", 3, 2, 1, lastError = "e" * 500)).toVector)
    val progress = (0 until 20).map(i => s"of source $i" -> "p" * 120).to(VectorMap)
    val all = Seq(
      topology("executors").copy(executors = (1 to 50).map(i => s"$i" -> failing).to(VectorMap)),
      topology("operators").copy(operators = (1 to 100).map(i => operator(s"operator $i").copy(progress = progress)).toVector),
      topology("both").copy(executors = (1 to 1000).map(i => s"$i" -> failing).to(VectorMap), askedBy = Vector.fill(1000)("x" * 1000),
        lostExecutors = Vector.fill(1000)("\u0001" * 1000), unclosed = Vector.fill(1000)("u" * 1000), parent = Some("p" * 10000),
        operators = (1 to 1000).map(i => operator(s"operator $i").copy(progress = VectorMap("\u0001" * 9000 -> "\u0001" * 9000))).toVector))
    all.foreach { begun =>
      val run = new Run()
      val ended = begun.copy(state = "closed", ended = 31000)
      run.log.changed(snapshot(begun))
      run.log.changed(snapshot(ended))
      assert(run.posted.map(_.trimmed) == Seq(true, true) && run.posted.forall(_.body.length <= StagecrewState.MaxBytes), begun.id)
      val model = history(run.posted.map(written).toSeq)
      assert(model.notes(begun.id).exists(_.contains("too large")))
      val stored = model.find(begun.id).get
      assert(stored.state == "closed" && cell(page("", model), "topologies", "Failures") ==
        cell(page("", Views.model(ended)), "topologies", "Failures"))
    }
  }

  test("running tasks are not stored: the log would still show them after the application has ended") {
    val run = new Run()
    val task = Span("1", "task", "one", 1000, 0, failed = false)
    run.log.tick(snapshot(topology("a")).copy(totals = Totals(7), running = VectorMap("a" -> Vector(task))))
    assert(run.posted.nonEmpty && run.posted.forall(!_.body.contains("\"one\"")))
  }

  test("the application is stored, even if its processes and its stored job are very large") {
    val run = new Run()
    val long = "\u0001" * 5000
    run.log.tick(Snapshot(Vector.empty, Totals(7), (1 to 100).map(i => ProcessView(long, long, i.toLong, long, 1, 0, Vector.empty)).toVector,
      Some(RecoveryView((1 to 100).map(i => s"$i$long" -> long).to(VectorMap), Vector.fill(100)(StepView(long, "running", 1, 0))))))
    assert(run.posted.map(_.trimmed) == Seq(true) && run.posted.head.body.length <= StagecrewState.MaxBytes)
    assert(history(run.posted.map(written).toSeq).snapshot.totals.opens == 7)
  }

  test("a closed topology whose spans were dropped is not stored again") {
    val run = new Run()
    val ended = busy("a", spans = 100)
    run.log.changed(snapshot(ended))
    val trimmed = ended.copy(spans = Vector.empty, spansDropped = 100)
    (1 to 3).foreach { _ =>
      run.now += 5000
      run.log.tick(snapshot(trimmed))
    }
    run.log.flush(snapshot(trimmed))
    assert(run.of("a").size == 1 && history(run.posted.map(written).toSeq).find("a").get.spans.size == 100)
    run.now += 5000
    run.log.tick(snapshot(trimmed.copy(jobs = 9)))
    assert(run.of("a").map(jobs) == Seq(2, 9))
  }

  test("of a long Python traceback the end is stored, and of a long JVM error the beginning") {
    def stored(scope: String, error: String, line: String = ""): String = {
      val run = new Run()
      val view = topology("a", listeners = 200, error = error, scope = scope)
      run.log.changed(snapshot(view.copy(executors = view.executors.map { case (id, counts) =>
        id -> counts.copy(listeners = counts.listeners.map(_.copy(lastErrorLine = line)))
      })))
      assert(run.of("a").exists(_.trimmed))
      rows(page("", history(run.posted.map(written).toSeq)), "listeners").head.last
    }
    val frames = "  File \"x.py\", line 1, in open\n" * 250
    val text = s"Traceback (most recent call last):\n${frames}ValueError: no pool\n${"SELECT\n" * 200}"
    assert(stored("worker", text, "ValueError: no pool") == "ValueError: no pool")
    assert(stored("jvm", "java.io.IOException: no pool\n" + "\tat x.Y\n" * 900) == "java.io.IOException: no pool")
  }
}
