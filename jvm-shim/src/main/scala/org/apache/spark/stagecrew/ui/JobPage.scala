package org.apache.spark.stagecrew
package ui

import com.fasterxml.jackson.databind.node.ObjectNode
import scala.xml.{Node, NodeSeq}
import spark._, wire._

/** The page of the stored job that this application runs: the facts and the steps of the job. */
private[stagecrew] object JobPage {
  def html(model: PageModel, request: PageRequest): Seq[Node] = model.snapshot.recovery match {
    case None => <p>This application does not run a stored job. To submit a job that survives its driver, use
      {" "}<code>stagecrew submit</code>.</p>
    case Some(recovery) =>
      val steps = Table("steps", recovery.steps, columns(model))
      val tables = new Tables(request, "jobs/", Nil, steps)
      Seq[NodeSeq](model.notes.getOrElse("", Nil).map(Show.warning),
        Show.properties(recovery.facts.toSeq.map { case (name, value) =>
          name.capitalize -> (Show.text(value): NodeSeq) }: _*),
        <h4>{s"Steps (${recovery.steps.size + recovery.forgottenSteps})"}</h4>,
        if (recovery.forgottenSteps == 0) NodeSeq.Empty
        else <p>{s"The table lists running steps and the last ended steps (${recovery.steps.size})."}</p>,
        if (recovery.steps.isEmpty) <p>No step has begun.</p> else tables(steps)).flatten
  }

  def json(model: PageModel): ObjectNode = model.snapshot.recovery.foldLeft(Tab.head(model))(
    (node, recovery) => node.set[ObjectNode]("recovery", Json.tree(recovery)))

  private def columns(model: PageModel): Seq[Column[StepView]] = Seq(
    Column.text("Step")(_.name), Column.text("State", "found: an earlier run has stored its result")(_.state),
    Column.date("Started")(_.started), Column.date("Ended")(_.ended),
    Column.duration("Duration")(step => if (step.started <= 0) 0L else model.elapsed(step.started, step.ended)))
}
