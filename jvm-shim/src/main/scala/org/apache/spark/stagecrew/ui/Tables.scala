package org.apache.spark.stagecrew
package ui

import java.net.URLEncoder
import java.util.Locale
import scala.util.Try
import scala.xml.{Elem, Node, NodeSeq, Text}
import spark._

/** A column: its cells and its order. Its name is part of links: letters, digits and spaces. */
private[stagecrew] final case class Column[T](
  name: String, order: Option[Ordering[T]], help: Option[String], cell: T => Node)

private[stagecrew] object Column {
  def text[T](name: String, help: String = "")(f: T => String): Column[T] =
    of(name, help)(f)(row => <td>{Show.text(f(row))}</td>)

  def number[T](name: String, help: String = "")(f: T => Long): Column[T] =
    of(name, help)(f)(row => <td>{f(row).toString}</td>)

  def bytes[T](name: String, help: String = "")(f: T => Long): Column[T] =
    of(name, help)(f)(row => <td>{if (f(row) == 0) "" else SparkUi.formatBytes(f(row))}</td>)

  /** A time in milliseconds since the epoch; empty for 0. */
  def date[T](name: String, help: String = "")(f: T => Long): Column[T] =
    of(name, help)(f)(row => <td>{Show.date(f(row))}</td>)

  def duration[T](name: String, help: String = "")(ms: T => Long): Column[T] =
    of(name, help)(ms)(row => <td>{SparkUi.formatDuration(ms(row))}</td>)

  def micros[T](name: String, help: String = "")(f: T => Long): Column[T] =
    of(name, help)(f)(row => <td>{Show.micros(f(row))}</td>)

  /** The number of texts, with the texts in the title. There may be more than these. */
  def several[T](name: String, help: String = "")(f: T => Seq[String], more: T => Int = (_: T) => 0): Column[T] = {
    def size(row: T): Int = f(row).size + more(row)
    of(name, help)(size)(row => <td title={Show.title(f(row).mkString("\n"))}>{size(row).toString}</td>)
  }

  def of[T, K](name: String, help: String = "")(key: T => K)(cell: T => Node)
    (implicit ordering: Ordering[K]): Column[T] =
    Column(name, Some(ordering.on(key)), Some(help).filter(_.nonEmpty), cell)
}

/** A table. The names of its parameters begin with its tag, as in `topologies.page`. It keeps its own order until a
  * column is chosen. */
private[stagecrew] final case class Table[T](tag: String, rows: Seq[T], columns: Seq[Column[T]]) {
  /** The parameters of a request. A value that the table cannot have is rejected. */
  def paging(request: PageRequest): Paging = {
    def parameter[A](name: String, default: A)(read: String => Option[A]): A =
      request.parameters.get(s"$tag.$name").filter(_.nonEmpty).fold(default)(text =>
        read(text).getOrElse(throw new IllegalArgumentException(
          s"the parameter $tag.$name has a value that it cannot have")))
    def known(name: String): Option[Option[String]] =
      columns.find(column => column.name == name && column.order.nonEmpty).map(column => Some(column.name))
    Paging(parameter("page", 1)(text => Try(text.toInt).toOption),
      parameter("pageSize", Tables.PageSize)(text => Try(text.toInt).toOption.map(size =>
        math.max(1, math.min(size, Tables.MaxPageSize)))),
      parameter("sort", Option.empty[String])(known), parameter("desc", false)(_.toBooleanOption))
  }

  def sorted(paging: Paging): IndexedSeq[T] =
    paging.column.flatMap(name => columns.find(_.name == name)).flatMap(_.order) match {
    case Some(order) => rows.sorted(if (paging.descending) order.reverse else order).toIndexedSeq
    case None => rows.toIndexedSeq
  }
}

/** The tables of a page. Each keeps its state while another one is turned or sorted. */
private[stagecrew] final class Tables(
    request: PageRequest, path: String, fixed: Seq[(String, String)], tables: Table[_]*) {
  private val pagings = tables.map(table => table.tag -> table.paging(request)).toMap

  def apply[T](table: Table[T]): NodeSeq = {
    val paging = pagings(table.tag)
    val others = tables.filter(_.tag != table.tag).flatMap(other => Tables.parameters(other.tag, pagings(other.tag)))
    val query = (fixed ++ others).map { case (name, value) => s"&$name=${URLEncoder.encode(value, "UTF-8")}" }.mkString
    val sparkTable = new SparkTable[T](table.tag, table.columns.map(c => (c.name, c.order.nonEmpty, c.help)),
      table.sorted(paging),
      row => table.columns.map(_.cell(row)), s"${request.root}/$path?${query.stripPrefix("&")}", paging)
    val small = table.rows.size <= paging.size && paging.size == Tables.PageSize
    <div class="table-responsive">{if (small) sparkTable.allRows else sparkTable.onePage}</div>
  }
}

private[stagecrew] object Tables {
  val PageSize = 100
  val MaxPageSize = 5000

  /** The parameters of a table that differ from the defaults. */
  private def parameters(tag: String, paging: Paging): Seq[(String, String)] = Seq(
    "page" -> Some(paging.page).filter(_ != 1), "pageSize" -> Some(paging.size).filter(_ != PageSize),
    "sort" -> paging.column, "desc" -> Some(paging.descending).filter(identity)
  ).collect { case (name, Some(value)) => s"$tag.$name" -> value.toString }
}

/** How values are shown. XML nodes escape all text. */
private[stagecrew] object Show {
  /** The length of a text in a cell, and in its title. */
  val Length = 120
  val TitleLength = 4000

  /** A user's text. A long text is cut, with the whole text in the title. Its direction does not affect its
    * surroundings. */
  def text(text: String): Node =
    if (text.length <= Length) <bdi>{text}</bdi> else <bdi title={title(text)}>{cut(text, Length)}</bdi>

  def title(text: String): Option[Text] = if (text.isEmpty) None else Some(Text(cut(text, TitleLength)))

  /** The beginning of a text. Surrogate pairs stay together. */
  def cut(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.take(length - 1)
    s"${if (kept.lastOption.exists(_.isHighSurrogate)) kept.dropRight(1) else kept}\u2026"
  }

  /** The end of a text. Surrogate pairs stay together. */
  def end(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.takeRight(length - 1)
    s"\u2026${if (kept.headOption.exists(_.isLowSurrogate)) kept.drop(1) else kept}"
  }

  def date(ms: Long): String = if (ms <= 0) "" else SparkUi.formatDate(ms)

  def micros(micros: Long): String = if (micros < 1000000L) String.format(Locale.ROOT, "%.1f ms", micros / 1000.0)
    else SparkUi.formatDuration(micros / 1000)

  /** The line of an error that says what happened, with its text in the title: of a JVM's error the beginning, of a
    * Python traceback the end. Event logs of earlier versions do not have the line: it is the last line of a
    * traceback that is not indented, and the first line of any other text. */
  def error(text: String, line: String = "", jvm: Boolean = false): Elem = {
    val lines = text.linesIterator.filterNot(_.isBlank).toVector
    val first = lines.headOption.filterNot(_.startsWith("Traceback")).orElse(lines.findLast(!_.startsWith(" ")))
      .getOrElse("")
    val summary = cut(if (line.nonEmpty) line else first.trim, Length)
    <td title={title(if (jvm) text else end(text, TitleLength))}><bdi>{summary}</bdi></td>
  }

  /** A list of facts, as in Spark's own pages above their tables. */
  def facts(facts: (String, NodeSeq)*): Node =
    <ul class="list-unstyled">{facts.filter(_._2.nonEmpty).map { case (name, value) =>
      <li><strong>{name}:</strong> {value}</li>
    }}</ul>

  def fact(text: String): NodeSeq = if (text.isEmpty) NodeSeq.Empty else Text(text)

  /** The first of a user's texts, and the number of the others. */
  def several(texts: Seq[String], most: Int = 20): NodeSeq = {
    val first = texts.take(most).flatMap(one => Seq[Node](Text(", "), text(one))).drop(1)
    NodeSeq.fromSeq(if (texts.size > most) first :+ Text(s" and ${texts.size - most} more") else first)
  }

  def note(text: String): Node = <p class="alert alert-warning" role="status">{text}</p>
}
