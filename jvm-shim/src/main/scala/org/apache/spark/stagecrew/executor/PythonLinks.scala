package org.apache.spark.stagecrew
package executor

import wire._

/** Handles an executor's links to Python: to workers (one for listeners, one for evaluations), to the agent, to the
  * daemon's sampler, and to the driver's Python if it is on this host. Called in the threads of the links. */
private[stagecrew] final class PythonLinks(crew: ExecutorCrew) extends LinkHandler {
  import crew.{agent, attempts, closings, descriptions, executor, executorListeners, processes, samples, settings}

  @volatile private var agentKillReason: String = _ // why this executor killed its agent

  override def serve(link: Link, limit: Int): Unit =
    if (link.role == "evaluations") crew.startEvaluations().serve(link, limit)
    else if (link.role == "driver")
      crew.startEvaluations().serveDriver(link, limit, frames => Frames.encode("FROM", executor, frames))
    else super.serve(link, limit)

  override def connected(link: Link): Unit = if (link.role == "worker" || link.role == "agent") {
    processes.connected(link)
    if (link.role == "agent") agent.connected(link)
  }

  override def received(link: Link, frame: Frame): Unit = {
    handle(link, frame)
    if (PythonLinks.AwaitedByClosings(frame.kind)) closings.changed()
  }

  private def handle(link: Link, frame: Frame): Unit = frame.kind match {
    case "BEGIN" => attemptBegan(link, frame.long("attempt"))
    case "END" => processes.ended(link)
    case "DESCRIBE" => describe(link, frame.text("topology"))
    case "HOOK" =>
      val timeoutMs = frame.long("timeout") + PythonLinks.HookGraceMs
      processes.hookBegan(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"),
        System.nanoTime() + timeoutMs * 1000000L)
      crew.later(timeoutMs + 10, "killing overdue processes")(killOverdue())
    case "HOOK_DONE" =>
      processes.hookEnded(link, frame.text("topology"), frame.long("listener").toInt, frame.text("hook"),
        frame.text("outcome") != "ok", frame.long("micros"), frame.text("error"), frame.text("line"))
    case "OPENED" => agent.received(frame)
    case "CLOSED" => processes.closed(link, frame.text("topology"))
    case "SAMPLES" => samples.record(link, Json.read[Samples](frame.text("body")).processes)
    case "GOODBYE" => Log.log.debug(s"$link ended: ${frame.text("reason")}")
    case other => throw new FrameException(s"a process does not send $other")
  }

  /** The attempt may have been killed, or may have ended, while its worker started. A short attempt may also have ended
    * before this frame was read: then the END frame follows. A task without listeners has the attempt -1 (NO_ATTEMPT
    * in python/stagecrew/worker/process.py). */
  private def attemptBegan(link: Link, attempt: Long): Unit = {
    processes.began(link, attempt, crew.table.chainOf(attempt).toSet)
    if (attempts.failureReason(attempt).contains(Evaluations.Killed)) terminate(link)
    else if (attempt >= 0 && !attempts.runs(attempt)) attempts.endAbandoned(attempt)
  }

  private def describe(link: Link, topology: String): Unit = descriptions.known(topology) match {
    case None => link.send("REFUSED", s"topology $topology is unknown on executor $executor")
    case Some(description) =>
      processes.addTopology(link, topology) // first, so that this process gets CLOSE if the agent is lost from now on
      val open = executorListeners.of(topology)
      val opened = open.fold(Opened()())(_.agent)
      if (open.isEmpty && executorListeners.needsOpen(description))
        link.send("REFUSED", s"the agent of executor $executor was lost after the task had begun; run the task again")
      else link.send("TOPOLOGY", topology, description.body, description.blobs, opened.body, opened.values)
  }

  override def disconnected(link: Link): Unit =
    if (link.role == "evaluations") crew.evaluations.foreach(_.disconnected(link)) else if (link.role != "driver") {
    samples.disconnected(link)
    processes.disconnected(link)
    if (link.role == "agent") {
      if (agent.disconnected(link, Option(agentKillReason))) {
        // Workers have copies of the agent's values. They must close the topology, and request new values afterwards.
        executorListeners.agentLost().foreach(topology => processes.linksOf(topology).foreach { case (worker, _) =>
          worker.send("CLOSE", topology)
        })
      }
      agentKillReason = null
    }
    closings.changed()
  }

  /** Kills processes whose hook ignored its timeout. */
  private def killOverdue(): Unit = processes.takeOverdue().foreach { case (link, hook, attempt) =>
    val limit = if (hook.name == "open") settings.openTimeoutMs else settings.closeTimeoutMs
    val topology = descriptions.known(hook.topology).map(_.name).getOrElse(hook.topology)
    val text = s"${hook.name} of listener '${nameOf(hook.topology, hook.index)._1}' " +
      s"(topology '$topology', executor $executor, host ${crew.host}) " +
      s"took longer than $limit ms and did not stop when it was interrupted; process ${link.pid} was killed"
    Log.log.warn(text)
    attempt.flatMap(attempts.get).foreach(_.workerKillReason = Some(text))
    if (link.role == "agent") agentKillReason = text
    kill(link)
  }

  /** The name and the scope of a listener. */
  def nameOf(topology: String, index: Int): (String, String) =
    descriptions.known(topology).flatMap(_.listeners.find(_.index == index)).map { entry =>
      val opened = executorListeners.of(topology).flatMap(_.agent.listeners.find(_.index == index))
      (entry.name, entry.scope.orElse(opened.map(_.scope)).getOrElse("worker"))
    }.getOrElse((s"listener $index", "worker"))

  def terminate(link: Link): Unit = ProcessHandle.of(link.pid).ifPresent(process => process.destroy())

  def kill(link: Link): Unit = ProcessHandle.of(link.pid).ifPresent(process => process.destroyForcibly())
}

object PythonLinks {
  /** The frames after which a topology may continue to close. Frames of hooks and samples change nothing that a closing
    * waits for (`Closings.changed`). */
  private val AwaitedByClosings = Set("BEGIN", "END", "DESCRIBE", "OPENED", "CLOSED")

  /** How long a hook may take to react to the timer signal, after its timeout, before its process is killed. */
  val HookGraceMs = 1000L
}
