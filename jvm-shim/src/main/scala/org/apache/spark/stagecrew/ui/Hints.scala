package org.apache.spark.stagecrew
package ui

import driver._, spark._

/** Sentences at the top of a page about problems that a reader should see. Each rule is a pure function. */
private[stagecrew] object Hints {
  /** A hook is slow if it takes at least this share of the run. */
  private val SlowShare = 0.5
  private val SlowRunMs = 1000L
  /** A topology without a running task for this long may have been forgotten. */
  private val ForgottenMs = 10 * 60 * 1000L
  private val ManyMessages = 1000L
  /** Few tasks are at most this share of all tasks. */
  private val FewTasks = 0.1
  private val MostTime = 0.8
  private val EnoughTasks = 10

  /** The hints for the page of a topology that is known up to the time `until`. */
  def of(topology: TopologyView, until: Long): Seq[String] = slowOpen(topology, until).toSeq ++ failures(topology) ++
    lost(topology) ++ unevenTasks(topology) ++ unevenSplits(topology) ++ waitingMessages(topology) ++
    notDeleted(topology)

  /** The hints for the first page. */
  def of(model: PageModel): Seq[String] = forgotten(model).toSeq ++
    model.snapshot.topologies.flatMap { topology =>
      of(topology, model.until(topology)).map(hint => s"${Show.first(topology.name, Show.Length)}: $hint")
    }.takeRight(5)

  /** The slowest listener, if its `open` takes most of the run. Processes open their listeners at the same time. */
  def slowOpen(topology: TopologyView, until: Long): Option[String] = {
    val ms = until - topology.started
    val opens = topology.executors.values.flatMap(_.listeners).groupBy(_.name).view.mapValues { same =>
      same.map(_.openMicros).sum / math.max(1L, same.map(_.opens).sum) / 1000
    }
    opens.toSeq.sortBy(_._1).maxByOption(_._2).collect {
      case (name, each) if ms >= SlowRunMs && each >= SlowShare * ms =>
        s"open of ${Show.first(name, Show.Length)} takes ${math.min(100, 100 * each / ms)} % of this run."
    }
  }

  def failures(topology: TopologyView): Option[String] = {
    val failed = topology.executors.values.flatMap(_.listeners).map(_.failures).sum
    Option.when(failed > 0)(s"${count(failed, "hook")} failed. The table of listeners shows the last errors.")
  }

  def lost(topology: TopologyView): Option[String] = {
    val processes = topology.executors.values.map(_.lostProcesses).sum
    Option.when(processes > 0)(s"${count(processes, "Python process", "es")} ended before closing all listeners. " +
      "SIGKILL is a usual cause, for example because memory ran out.")
  }

  /** A few tasks that take most of the time. Only if every task was recorded: otherwise the record has the slowest. */
  def unevenTasks(topology: TopologyView): Option[String] = {
    val times = topology.spans.filter(span => span.kind == "task" && span.ended > 0)
      .map(span => span.ended - span.started).sorted.reverse
    val total = times.sum
    val few = times.scanLeft(0L)(_ + _).indexWhere(_ >= MostTime * total)
    Option.when(topology.spansDropped == 0 && times.size >= EnoughTasks && total >= SlowRunMs &&
      few <= FewTasks * times.size)(s"${count(few, "task")} of ${times.size} take ${(100 * MostTime).toInt} % of the " +
      "time of all tasks. Splits balance such work.")
  }

  /** What Python's coordinator of splits has found: python/stagecrew/operators/split_progress.py. */
  def unevenSplits(topology: TopologyView): Seq[String] = topology.operators.flatMap(_.progress.get("uneven"))
    .map(text => s"${Show.first(text, Show.Length)}.")

  def waitingMessages(topology: TopologyView): Seq[String] = topology.operators.filter(_.queued >= ManyMessages)
    .map(o => s"coordinator ${Show.first(o.name, Show.Length)} has not handled ${o.queued} messages yet.")

  def notDeleted(topology: TopologyView): Option[String] = {
    val failed = topology.executors.values.map(_.partitions.releaseFailures).sum
    Option.when(failed > 0)(s"${count(failed, "partition")} could not be deleted. The logs of the executors say why.")
  }

  /** Named topologies that are active, and had no running task for `ForgottenMs`. */
  def forgotten(model: PageModel): Option[String] = {
    val open = model.snapshot.topologies.filter(t => t.kind == DriverCrew.NamedKind && t.state == "active" &&
      !model.snapshot.running.contains(t.id) && model.now - math.max(t.started, lastTask(t)) >= ForgottenMs)
    Option.when(open.nonEmpty)(s"${count(open.size.toLong, "topology", "", "topologies")} began more than " +
      s"${SparkUi.formatDuration(ForgottenMs)} ago, ${if (open.size == 1) "has" else "have"} no running task, and " +
      s"${if (open.size == 1) "is" else "are"} not closed: " +
      open.take(3).map(t => Show.first(t.name, Show.Length)).mkString(", ") + (if (open.size > 3) ", ..." else "."))
  }

  private def lastTask(topology: TopologyView): Long = topology.spans.map(_.ended).maxOption.getOrElse(0L)

  private def count(number: Long, one: String, suffix: String = "s", many: String = ""): String =
    if (number == 1) s"1 $one" else s"$number ${if (many.nonEmpty) many else one + suffix}"
}
