package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.ObjectNode
import scala.collection.mutable

/** What happened to the listeners of one topology on one executor, counted since it began. */
final case class ListenerCounts(
    name: String,
    scope: String,
    opens: Long = 0, // attempted
    closes: Long = 0, // attempted
    failures: Long = 0, // of open, close or decorate
    lost: Long = 0, // opened in a process that is gone without a close
    openMicros: Long = 0,
    closeMicros: Long = 0,
    lastError: String = "") {

  def stillOpen: Long = opens - closes - lost

  /** An open or a close of it took so long, however it ended. */
  private[stagecrew] def took(hook: String, micros: Long): ListenerCounts = hook match {
    case "open" => copy(openMicros = openMicros + micros)
    case "close" => copy(closeMicros = closeMicros + micros)
    case _ => this
  }

  /** The same listener elsewhere. */
  def +(other: ListenerCounts): ListenerCounts = copy(
    opens = opens + other.opens, closes = closes + other.closes, failures = failures + other.failures, lost = lost + other.lost,
    openMicros = openMicros + other.openMicros, closeMicros = closeMicros + other.closeMicros,
    lastError = if (other.lastError.nonEmpty) other.lastError else lastError)

  private[stagecrew] def json(index: Int): ObjectNode = Json.obj()
    .put("index", index).put("name", name).put("scope", scope)
    .put("opens", opens).put("closes", closes).put("failures", failures).put("lost", lost)
    .put("openMicros", openMicros).put("closeMicros", closeMicros).put("lastError", lastError)
}

object ListenerCounts {
  /** How much is kept of an error, as of Python's (ERROR_LENGTH of python/stagecrew/worker/hooks.py). */
  val ErrorLength = 8000

  private[stagecrew] def of(node: JsonNode): (Int, ListenerCounts) =
    node.path("index").asInt -> ListenerCounts(
      node.path("name").asText, node.path("scope").asText, node.path("opens").asLong, node.path("closes").asLong,
      node.path("failures").asLong, node.path("lost").asLong, node.path("openMicros").asLong,
      node.path("closeMicros").asLong, node.path("lastError").asText)
}

/** Sums over listeners, and what was released. They never go down: what a topology that is forgotten had counted stays in them. */
final case class Totals(
    opens: Long = 0, closes: Long = 0, failures: Long = 0, lost: Long = 0,
    openMicros: Long = 0, closeMicros: Long = 0, released: Long = 0, releasedBytes: Long = 0) {
  def +(other: Totals): Totals =
    Totals(opens + other.opens, closes + other.closes, failures + other.failures, lost + other.lost,
      openMicros + other.openMicros, closeMicros + other.closeMicros, released + other.released, releasedBytes + other.releasedBytes)

  /** The newer of both: no sum goes down. */
  private[stagecrew] def max(other: Totals): Totals =
    Totals(math.max(opens, other.opens), math.max(closes, other.closes), math.max(failures, other.failures), math.max(lost, other.lost),
      math.max(openMicros, other.openMicros), math.max(closeMicros, other.closeMicros), math.max(released, other.released),
      math.max(releasedBytes, other.releasedBytes))

  private[stagecrew] def json: ObjectNode =
    Json.obj().put("opens", opens).put("closes", closes).put("failures", failures).put("lost", lost)
      .put("openMicros", openMicros).put("closeMicros", closeMicros).put("released", released).put("releasedBytes", releasedBytes)
}

object Totals {
  private[stagecrew] def of(node: JsonNode): Totals =
    Totals(node.path("opens").asLong, node.path("closes").asLong, node.path("failures").asLong, node.path("lost").asLong,
      node.path("openMicros").asLong, node.path("closeMicros").asLong, node.path("released").asLong, node.path("releasedBytes").asLong)
}

/** One topology on one executor. */
final case class ExecutorCounts(
    listeners: Map[Int, ListenerCounts] = Map.empty,
    processes: Long = 0, // Python processes that opened something
    lostProcesses: Long = 0, // those of them that were gone before they had closed it
    deferred: Set[String] = Set.empty, // ids of those that close after their task
    stored: Stored = Stored(),
    released: Long = 0, // partitions that are gone for certain
    releasedBytes: Long = 0,
    releaseFailures: Long = 0) { // partitions that could not be deleted

  def totals: Totals = listeners.valuesIterator.foldLeft(Totals(released = released, releasedBytes = releasedBytes))((sum, c) =>
    sum + Totals(c.opens, c.closes, c.failures, c.lost, c.openMicros, c.closeMicros))

  /** Those of another executor with them. */
  def +(other: ExecutorCounts): ExecutorCounts = ExecutorCounts(
    other.listeners.foldLeft(listeners) { case (sums, (index, one)) => sums.updated(index, sums.get(index).fold(one)(_ + one)) },
    processes + other.processes, lostProcesses + other.lostProcesses, deferred ++ other.deferred, stored + other.stored,
    released + other.released, releasedBytes + other.releasedBytes, releaseFailures + other.releaseFailures)

  private[stagecrew] def json: ObjectNode = {
    val node = Json.obj()
    val entries = node.putArray("listeners")
    listeners.toSeq.sortBy(_._1).foreach { case (index, counts) => entries.add(counts.json(index)) }
    node.put("processes", processes).put("lostProcesses", lostProcesses)
    node.set[ObjectNode]("deferred", Json.arr(deferred))
    node.putObject("partitions")
      .put("inProgress", stored.inProgress).put("outputs", stored.outputs).put("outputBytes", stored.outputBytes)
      .put("blocks", stored.blocks).put("blockBytes", stored.blockBytes)
      .put("released", released).put("releasedBytes", releasedBytes).put("releaseFailures", releaseFailures)
    node
  }
}

object ExecutorCounts {
  private[stagecrew] def of(node: JsonNode): ExecutorCounts = ExecutorCounts(
    Json.items(node.get("listeners")).map(ListenerCounts.of).toMap,
    node.path("processes").asLong,
    node.path("lostProcesses").asLong,
    Json.strings(node.get("deferred")).toSet,
    Stored(
      node.at("/partitions/inProgress").asLong, node.at("/partitions/outputs").asLong, node.at("/partitions/outputBytes").asLong,
      node.at("/partitions/blocks").asLong, node.at("/partitions/blockBytes").asLong),
    node.at("/partitions/released").asLong,
    node.at("/partitions/releasedBytes").asLong,
    node.at("/partitions/releaseFailures").asLong)
}

/**
 * The counts of one executor. Reports carry the counts themselves, not changes, and a sequence number: the driver replaces
 * what it has, so that a report that is lost or doubled changes nothing.
 *
 * @param timelines whether spans are kept: somebody shows them
 */
final class Ledger(wall: () => Long = () => System.currentTimeMillis(), timelines: Boolean = true) {
  import Ledger._

  /** The executor's Python processes, where it looks at them. */
  @volatile var samples = Option.empty[SampleLog]
  /** Is told how many microseconds what took time has taken: for the executor's own metrics. */
  @volatile var timed: (String, Long) => Unit = (_, _) => ()
  private val topologies = mutable.LinkedHashMap.empty[String, ExecutorCounts]
  private val dirty = mutable.LinkedHashSet.empty[String]
  private val spans = mutable.HashMap.empty[String, SpanLog]
  private val dirtySpans = mutable.LinkedHashSet.empty[String]
  private val sent = mutable.LinkedHashMap.empty[Long, Sent] // reports of which it is not known that they arrived
  private var sequence = 0L
  private var forgotten = Totals()

  def change(topology: String)(f: ExecutorCounts => ExecutorCounts): Unit = synchronized {
    topologies(topology) = f(topologies.getOrElse(topology, ExecutorCounts()))
    dirty += topology
  }

  def listener(topology: String, index: Int, name: => String, scope: => String)(f: ListenerCounts => ListenerCounts): Unit =
    change(topology) { counts =>
      val before = counts.listeners.getOrElse(index, ListenerCounts(name, scope))
      counts.copy(listeners = counts.listeners.updated(index, f(before)))
    }

  /** Something of the topology took so long, until now. */
  def span(topology: String, kind: String, name: => String, micros: Long, failed: Boolean): Unit = {
    val started = wall() - micros / 1000
    timed(kind, micros)
    if (timelines) synchronized {
      spans.getOrElseUpdate(topology, new SpanLog).add(kind, name, started, micros, failed)
      dirtySpans += topology
    }
  }

  def of(topology: String): ExecutorCounts = synchronized(topologies.getOrElse(topology, ExecutorCounts()))

  /** The number and the body of a report of all that changed since the last one; None when nothing did. */
  def report(): Option[(Long, String)] = synchronized {
    val looks = samples.flatMap(_.untold)
    if (dirty.isEmpty && dirtySpans.isEmpty && looks.isEmpty) None
    else {
      val (changed, timed) = (dirty.toSeq, dirtySpans.toSeq)
      dirty.clear()
      dirtySpans.clear()
      val (number, node, arrived) = body(changed, timed)
      looks.foreach { case (more, _) => node.setAll[ObjectNode](more) }
      sent(number) = Sent(changed, timed, arrived ++ looks.map(_._2))
      Some(number -> Json.write(node))
    }
  }

  /** The driver has the report with this number. */
  def delivered(number: Long): Unit = synchronized(sent.remove(number).foreach(_.arrived.foreach(_())))

  /** A report may not have arrived: what it said is said again. */
  def notDelivered(number: Long): Unit = synchronized {
    sent.remove(number).foreach { report =>
      dirty ++= report.topologies.filter(topologies.contains)
      dirtySpans ++= report.spans.filter(spans.contains)
    }
  }

  /** A report of one topology, whether it changed or not. */
  def full(topology: String): (Long, String) = synchronized {
    dirty -= topology
    dirtySpans -= topology
    val (number, node, _) = body(Seq(topology), Seq(topology))
    number -> Json.write(node)
  }

  // The sums stand in each report beside its number, so that the driver's never go back to older ones.
  private def body(which: Seq[String], timed: Seq[String]): (Long, ObjectNode, Seq[() => Unit]) = {
    sequence += 1
    val node = Json.obj()
    val counts = node.putObject("topologies")
    which.foreach(topology => topologies.get(topology).foreach(c => counts.set[ObjectNode](topology, c.json)))
    node.set[ObjectNode]("totals", totals.json)
    val logs = node.putObject("spans")
    val arrived = timed.flatMap(topology => spans.get(topology).map { log =>
      val (untold, told) = log.untold
      logs.set[ObjectNode](topology, untold)
      told
    })
    (sequence, node, arrived)
  }

  /** A closed topology; answers false when the driver does not have its counts yet. */
  def forget(topology: String): Boolean = synchronized {
    val reported = !dirty.contains(topology) && !sent.valuesIterator.exists(_.topologies.contains(topology))
    if (reported) {
      spans -= topology
      dirtySpans -= topology
    }
    if (reported) topologies.remove(topology).foreach(counts => forgotten += counts.totals)
    reported
  }

  /** What is stored now, of all topologies. */
  def stored: Stored = synchronized(topologies.valuesIterator.map(_.stored).foldLeft(Stored())(_ + _))

  /** Sums over all topologies that ever were here, for metrics. */
  def totals: Totals = synchronized(topologies.valuesIterator.map(_.totals).foldLeft(forgotten)(_ + _))
}

object Ledger {
  private final case class Sent(topologies: Seq[String], spans: Seq[String], arrived: Seq[() => Unit])
}
