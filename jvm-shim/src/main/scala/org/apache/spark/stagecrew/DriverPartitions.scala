package org.apache.spark.stagecrew

import java.util.concurrent.ConcurrentHashMap
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.ObjectNode
import org.apache.spark.SparkContext

/**
 * The driver's part of the bookkeeping: who uses which shuffles and cached datasets, and what goes when a topology ends.
 * Of the driver's loop, but for `keep` and `lookForKept`.
 *
 * Shuffles are never unregistered, which would abort a job that happens to run on one: their outputs are taken off the
 * tracker before executors delete the files, and who needs them again computes them again.
 */
private[stagecrew] final class DriverPartitions(sc: SparkContext) {
  import DriverPartitions._

  // Where shuffles are stored by somebody else, that one's outputs are left alone.
  private lazy val tracked = SparkInternals.tracksShuffles(sc)
  private val shuffles = new DatasetUsage
  private val caches = new DatasetUsage
  private val datasets = new ConcurrentHashMap[String, List[AnyRef]]() // topology -> what is to be kept of it
  private val kept = new ConcurrentHashMap[String, (Set[Int], Set[Int])]()
  private val migrates = SparkInternals.migrates(SparkInternals.conf(sc))
  private val stale = mutable.HashMap.empty[Int, Long] // released shuffles: outputs of attempts before these are nobody's

  /** A job of this topology needs these. */
  def used(topology: String, shuffled: Iterable[Int], cached: Iterable[Int]): Unit = {
    if (tracked) shuffles.use(topology, shuffled)
    caches.use(topology, cached)
  }

  /** What a dataset stores stays when the topology ends. */
  def keep(topology: String, dataset: AnyRef): Unit = { datasets.merge(topology, List(dataset), (a, b) => b ++ a); () }

  /** Looks what datasets that these topologies keep have stored by now: their plans may be large, so not on the loop. */
  def lookForKept(topologies: Iterable[String]): Unit = topologies.foreach { topology =>
    Option(datasets.get(topology)).foreach { ones =>
      var shuffled, cached = Set.empty[Int]
      ones.foreach(one => Log.contained("looking for what a dataset that is kept has stored") {
        val (itsShuffles, itsCaches) = SparkInternals.stored(sc, one)
        shuffled ++= itsShuffles
        cached ++= itsCaches
      })
      kept.put(topology, (shuffled, cached))
      if (!datasets.containsKey(topology)) kept.remove(topology) // it has ended meanwhile
    }
  }

  /** The topology, which lies in these, ends: what nobody else uses is taken off the tracker. Attempts `before` this one had
    * begun when it was looked who uses what. Answers what executors are told. */
  def end(topology: String, policy: String, around: Seq[String], before: Long): Released = {
    datasets.remove(topology)
    Option(kept.remove(topology)).foreach { case (shuffled, cached) => used(Description.Application, shuffled, cached) }
    around.foreach(outer => Option(kept.get(outer)).foreach { case (shuffled, cached) => used(outer, shuffled, cached) })
    val (alone, heirs) = shuffles.end(topology)
    val (aloneCaches, cacheHeirs) = caches.end(topology)
    // What stays is the application's: the end of a topology that only reads it does not take it away.
    if (policy == KeepsAll) shuffles.use(Description.Application, alone ++ heirs.keys)
    if (policy == KeepsAll) caches.use(Description.Application, cacheHeirs.keys)
    if (policy != ReleasesAll) caches.use(Description.Application, aloneCaches)
    val released = if (policy == KeepsAll) Nil else alone
    if (migrates) stale ++= released.map(_ -> before)
    Released(policy, released, before, heirs, if (policy == ReleasesAll) aloneCaches else Nil, cacheHeirs.keySet, drop(released))
  }

  /** Takes outputs off the tracker. Answers what executors that are gone have left. */
  def drop(shuffles: Iterable[Int]): Seq[SparkInternals.LeftBlocks] = if (!tracked) Nil else {
    lazy val alive = SparkInternals.executorsAlive()
    shuffles.toSeq.flatMap { shuffle =>
      // Spark's own cleaner may take it at the same time.
      try SparkInternals.dropOutputs(sc, shuffle, alive) catch {
        case Failure(error) =>
          Log.log.debug(s"the outputs of shuffle $shuffle could not be taken off the tracker", error)
          Nil
      }
    }
  }

  /** Whether nobody uses a cached dataset now. */
  def unused(cache: Int): Boolean = caches.heir(cache).isEmpty

  /** What an executor has of each topology. Answers what of it is over, topologies that ended and datasets that are gone, and
    * what executors that are gone have left of these topologies. While executors leave (`leaving`), what they still send of
    * shuffles that were released goes too: outputs that were on their way come back into the tracker. `claim` looks which
    * shuffles jobs use that run now, and is called when anything may go. */
  def inventory(
      told: ObjectNode, leaving: Boolean, stateOf: String => String, claim: () => Unit): (ObjectNode, Seq[SparkInternals.LeftBlocks]) = {
    lazy val before = {
      val next = SparkInternals.nextAttempt(sc)
      claim()
      next
    }
    def free(shuffle: Int): Boolean = before >= 0 && shuffles.heir(shuffle).isEmpty
    val answer = Json.obj()
    val ended = answer.putObject("ended")
    val left = mutable.ArrayBuffer.empty[SparkInternals.LeftBlocks]
    val goneShuffles, goneCaches, unclaimed = mutable.LinkedHashSet.empty[Int]
    Option(told.get("topologies")).toSeq.flatMap(_.properties.asScala).foreach { entry =>
      val shuffled = Json.integers(entry.getValue.get("shuffles"))
      val cached = Json.integers(entry.getValue.get("caches"))
      goneShuffles ++= shuffled.filterNot(SparkInternals.hasShuffle)
      goneCaches ++= cached.filterNot(SparkInternals.hasCache(sc, _))
      val state = stateOf(entry.getKey)
      if (entry.getKey == Description.Application) unclaimed ++= shuffled.filter(free)
      else if (state == "active") used(entry.getKey, shuffled.filterNot(goneShuffles), cached.filterNot(goneCaches))
      else if (state == "closed") {
        val (alone, passed) = shuffled.filterNot(goneShuffles).partition(free)
        val heirs = passed.map(shuffle => shuffle -> shuffles.heir(shuffle).get).toMap
        if (migrates) stale ++= alone.map(_ -> before)
        val released = Released(ReleasesShuffles, alone, before, heirs, Nil, Set.empty, drop(alone))
        left ++= released.left
        ended.set[JsonNode](entry.getKey, released.json)
      }
    }
    left ++= drop(unclaimed)
    if (migrates) stale ++= unclaimed.map(_ -> before)
    val late = if (leaving) stale.filter { case (shuffle, _) => free(shuffle) } else Nil
    // Half an output that arrives comes into no tracker, but Spark takes its executor for one that has something.
    val found = Json.integers(told.get("found")).filter(free)
    left ++= drop((late.map(_._1).filter(SparkInternals.hasOutputs) ++ found).toSet)
    val outputs = answer.putObject("stale")
    late.foreach { case (shuffle, before) => outputs.put(shuffle.toString, before) }
    answer.set[JsonNode]("unclaimed", Json.numbers(unclaimed))
    answer.set[JsonNode]("shuffles", Json.numbers(goneShuffles))
    answer.set[JsonNode]("caches", Json.numbers(goneCaches))
    (answer, left.toSeq)
  }

  /** Forgets what Spark itself has deleted. */
  def prune(): Unit = {
    shuffles.prune(SparkInternals.hasShuffle)
    caches.prune(SparkInternals.hasCache(sc, _))
    stale.filterInPlace((shuffle, _) => SparkInternals.hasShuffle(shuffle))
  }
}

private[stagecrew] object DriverPartitions {
  val ReleasesShuffles = "shuffles"
  val ReleasesAll = "all"
  val KeepsAll = "none"

  /** What a topology's end releases: of the shuffles what attempts `before` this one have written. `left` is what executors that
    * are gone have left with an external shuffle service. */
  final case class Released(
      policy: String, shuffles: Seq[Int], before: Long, heirs: Map[Int, String], caches: Seq[Int], keptCaches: collection.Set[Int],
      left: Seq[SparkInternals.LeftBlocks]) {

    def json: ObjectNode = {
      val node = Json.obj().put("outputs", policy != KeepsAll).put("blocks", policy == ReleasesAll).put("before", before)
      node.set[JsonNode]("shuffles", Json.numbers(shuffles))
      node.set[JsonNode]("keptCaches", Json.numbers(keptCaches))
      val to = node.putObject("heirs")
      heirs.foreach { case (shuffle, heir) => to.put(shuffle.toString, if (heir == Description.Application) "" else heir) }
      node
    }
  }

  def ending(node: ObjectNode): Ending = Ending(
    node.get("outputs").asBoolean,
    node.get("blocks").asBoolean,
    Json.fields(node.get("heirs")).map { case (shuffle, heir) => shuffle.toInt -> Some(heir).filter(_.nonEmpty) },
    Json.integers(node.get("keptCaches")).toSet,
    Json.integers(node.get("shuffles")).toSet)
}
