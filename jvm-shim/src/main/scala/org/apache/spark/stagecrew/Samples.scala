package org.apache.spark.stagecrew

import java.io.IOException
import java.nio.file.{Files, Path}
import com.fasterxml.jackson.databind.JsonNode
import com.fasterxml.jackson.databind.node.ObjectNode
import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

/**
 * Looks at the Python processes of this executor: its workers, those without listeners too, and its agent.
 *
 * The executor looks itself, in /proc: it sees a worker also while that is in C code, needs no process of its own for it, and
 * nothing installed. Where there is no /proc, there are no samples.
 */
private[stagecrew] final class Sampler(log: SampleLog, agent: () => Option[Long], wall: () => Long = () => System.currentTimeMillis()) {
  import Sampler._

  /** One look. It takes some milliseconds: not on a thread that others wait for. */
  def look(): Unit = if (Files.isDirectory(Proc)) {
    val every = ProcessHandle.current().descendants().iterator.asScala.toVector
    val ours = every.filter(runsDaemon).toSet
    def above(process: ProcessHandle) = parentOf(process).filter(parent => ours(parent) && commandOf(parent) == commandOf(process))
    // A worker is a fork of the daemon; what user code forks of a worker has its command line too, and is none.
    val workers = ours.filter(above(_).exists(above(_).isEmpty))
    val now = wall()
    val found = every.flatMap { process =>
      val role = if (agent().contains(process.pid)) Some("agent") else if (workers(process)) Some("worker") else None
      role.flatMap(of => seen(process).map(one => Seen(process.pid, of, startOf(process), cpuOf(process), one)))
    }
    log.took(now, found)
  }

  private def parentOf(process: ProcessHandle): Option[ProcessHandle] = Option(process.parent.orElse(null))
  private def commandOf(process: ProcessHandle): String = process.info.command.orElse("")
  private def startOf(process: ProcessHandle): Long = process.info.startInstant.map[Long](_.toEpochMilli).orElse(0L)
  private def cpuOf(process: ProcessHandle): Long = process.info.totalCpuDuration.map[Long](_.toMillis).orElse(0L)

  private def runsDaemon(process: ProcessHandle): Boolean =
    try new String(Files.readAllBytes(Proc.resolve(s"${process.pid}/cmdline")), "UTF-8").contains(DriverShim.DaemonModule)
    catch { case _: IOException => false }
}

private[stagecrew] object Sampler {
  private val Proc = Path.of("/proc")

  /** What /proc says of a process: bytes, threads, open files. */
  final case class Now(rss: Long, threads: Long, files: Long)

  /** `cpu`: milliseconds since it started. */
  final case class Seen(pid: Long, role: String, started: Long, cpu: Long, now: Now)

  /** None for one that is gone meanwhile. */
  def seen(process: ProcessHandle): Option[Now] = try {
    val folder = Proc.resolve(process.pid.toString)
    val status = Files.readAllLines(folder.resolve("status")).asScala
    def number(name: String): Long =
      status.find(_.startsWith(s"$name:")).map(_.drop(name.length + 1).trim.takeWhile(_.isDigit)).filter(_.nonEmpty).map(_.toLong).getOrElse(0L)
    if (number("VmRSS") == 0) None // a zombie
    else {
      val files = Files.newDirectoryStream(folder.resolve("fd"))
      try Some(Now(number("VmRSS") * 1024, number("Threads"), files.asScala.size.toLong)) finally files.close()
    }
  } catch { case NonFatal(_) => None }
}

/** The samples of an executor that the driver does not have yet, of each process the last so many. */
private[stagecrew] final class SampleLog(executor: String, host: () => String) {
  import SampleLog._

  private val known = mutable.LinkedHashMap.empty[(Long, Long), Known]

  /** All processes as they are at this time; those that were there before and are not have ended. */
  def took(time: Long, every: Seq[Sampler.Seen]): Unit = synchronized {
    latest = every.map { one =>
      val before = known.getOrElseUpdate((one.pid, one.started), new Known(one.role))
      val since = time - (if (before.time > 0) before.time else one.started)
      val cpu = if (since > 0) math.max(0, (one.cpu - before.cpu) * 1000 / since) else 0L
      val sample = Sample(time, one.now.rss, cpu, one.now.threads, one.now.files)
      before.samples = (before.samples :+ sample).takeRight(ProcessBook.Samples)
      before.time = time
      before.cpu = one.cpu
      one.role -> sample
    }
    val here = every.map(one => (one.pid, one.started)).toSet
    known.foreach { case (key, one) => if (!here(key) && one.ended == 0) one.ended = time }
  }

  /** The last look at those that live, with their roles. */
  def now: Seq[(String, Sample)] = synchronized(latest)
  private var latest = Seq.empty[(String, Sample)]

  /** What is to be reported, and what to do when it has arrived; None when there is nothing. */
  def untold: Option[(ObjectNode, () => Unit)] = synchronized {
    val left = known.toSeq.filter { case (_, one) => one.samples.nonEmpty || one.ended > 0 }
    if (left.isEmpty) None
    else {
      val node = Json.obj()
      Json.put(node, "processes", left.map { case ((pid, started), one) =>
        ProcessView(executor, host(), pid, one.role, started, one.ended, one.samples).json
      })
      val told = left.map { case (key, one) => (key, one, one.samples.lastOption.map(_.time), one.ended) }
      Some(node -> (() => synchronized {
        told.foreach { case (key, one, upTo, ended) =>
          one.samples = one.samples.filterNot(sample => upTo.exists(sample.time <= _))
          if (ended > 0) known -= key
        }
      }))
    }
  }
}

private[stagecrew] object SampleLog {
  private final class Known(val role: String) {
    var samples = Vector.empty[Sample]
    var time = 0L
    var cpu = 0L
    var ended = 0L
  }
}

/** The Python processes of all executors, as their reports said. Of the driver's loop. */
private[stagecrew] final class ProcessBook(ended: Int = ProcessBook.Ended) {
  private val book = mutable.LinkedHashMap.empty[(String, Long, Long), ProcessView]
  private var shown = Option.empty[Vector[ProcessView]]

  /** What a report said: samples that are known already change nothing. */
  def took(node: JsonNode): Unit = Json.items(node.path("processes")).map(ProcessView.of).foreach { said =>
    val key = (said.executor, said.pid, said.started)
    val before = book.get(key)
    val last = before.flatMap(_.samples.lastOption).map(_.time).getOrElse(0L)
    val samples = (before.map(_.samples).getOrElse(Vector.empty) ++ said.samples.filter(_.time > last)).takeRight(ProcessBook.Samples)
    book(key) = said.copy(samples = samples, ended = math.max(said.ended, before.map(_.ended).getOrElse(0L)))
    changed()
  }

  /** An executor is gone, and its processes with it. */
  def lost(executor: String, now: Long): Unit = {
    book.mapValuesInPlace((key, one) => if (key._1 == executor && one.ended == 0) one.copy(ended = now) else one)
    changed()
  }

  def views: Vector[ProcessView] = shown.getOrElse {
    val views = book.values.toVector
    shown = Some(views)
    views
  }

  private def changed(): Unit = {
    shown = None
    book.values.filter(_.ended > 0).toSeq.sortBy(_.ended).dropRight(ended).foreach(one => book -= ((one.executor, one.pid, one.started)))
  }
}

private[stagecrew] object ProcessBook {
  /** How many looks at one process are kept, and how many processes that have ended. */
  val Samples = 60
  val Ended = 200
}
