package org.apache.spark.stagecrew
package ui

import java.net.URLEncoder
import java.util.Locale
import scala.util.Try
import scala.xml.{Elem, Node, NodeSeq, Text}
import spark._

/** A column of a table. Its name is part of links, so the name consists only of letters, digits and spaces. If the
  * column is zero in all rows, the table does not show it. */
private[stagecrew] final case class Column[T](
  name: String, order: Option[Ordering[T]], help: Option[String], cell: T => Node,
  isZero: T => Boolean = (_: T) => false)

private[stagecrew] object Column {
  def text[T](name: String, help: String = "")(f: T => String): Column[T] = formatted(name, help)(f)(Show.text)
  def number[T](name: String, help: String)(f: T => Long): Column[T] =
    formatted(name, help)(f)(_.toString).copy(isZero = f(_) == 0)
  /** A size in bytes. The cell is empty for 0. */
  def bytes[T](name: String, help: String)(f: T => Long): Column[T] =
    formatted(name, help)(f)(bytes => if (bytes == 0) "" else SparkUi.formatBytes(bytes)).copy(isZero = f(_) == 0)
  /** A time in milliseconds since the epoch. The cell is empty unless the value is positive. */
  def date[T](name: String)(f: T => Long): Column[T] = formatted(name)(f)(Show.date)
  def duration[T](name: String)(ms: T => Long): Column[T] =
    formatted(name, "The time from the start to the end. If there is no end yet: so far")(ms)(SparkUi.formatDuration)
  def micros[T](name: String, help: String)(f: T => Long): Column[T] =
    formatted(name, help)(f)(Show.micros).copy(isZero = f(_) == 0)

  private def formatted[T, K: Ordering](name: String, help: String = "")(f: T => K)(format: K => Any): Column[T] =
    of(name, help)(f)(row => <td>{format(f(row))}</td>)

  /** The number of strings that a row has. The tooltip lists them. `more` strings are counted, but not listed. */
  def count[T](name: String, help: String)(f: T => Seq[String], more: T => Int = (_: T) => 0): Column[T] = {
    def size(row: T): Int = f(row).size + more(row)
    of(name, help)(size)(row => <td title={Show.title(f(row).mkString("\n"))}>{size(row).toString}</td>)
      .copy(isZero = size(_) == 0)
  }

  def of[T, K](name: String, help: String = "")(key: T => K)(cell: T => Node)
    (implicit ordering: Ordering[K]): Column[T] =
    Column(name, Some(ordering.on(key)), Some(help).filter(_.nonEmpty), cell)
}

/** A table. The names of its request parameters begin with its tag, as in `topologies.page`. The rows are in their
  * original order until the user chooses a column. */
private[stagecrew] final case class Table[T](tag: String, rows: Seq[T], columns: Seq[Column[T]]) {
  /** Reads this table's page, page size and order from a request. Limits the page size to 1 to `MaxPageSize`. Throws
    * an `IllegalArgumentException` for any other invalid value. */
  def paging(request: PageRequest): Paging = {
    def parameter[A](name: String, default: A)(read: String => Option[A]): A =
      request.parameters.get(s"$tag.$name").filter(_.nonEmpty).fold(default)(text =>
        read(text).getOrElse(throw new IllegalArgumentException(
          s"the parameter $tag.$name has an invalid value")))
    def sortableColumn(name: String): Option[Option[String]] =
      columns.find(column => column.name == name && column.order.nonEmpty).map(column => Some(column.name))
    Paging(parameter("page", 1)(text => Try(text.toInt).toOption),
      parameter("pageSize", Tables.PageSize)(text => Try(text.toInt).toOption.map(size =>
        math.max(1, math.min(size, Tables.MaxPageSize)))),
      parameter("sort", Option.empty[String])(sortableColumn), parameter("desc", false)(_.toBooleanOption))
  }

  def sorted(paging: Paging): IndexedSeq[T] =
    paging.column.flatMap(name => columns.find(_.name == name)).flatMap(_.order).fold(rows)(order =>
      rows.sorted(if (paging.descending) order.reverse else order)).toIndexedSeq
}

/** The tables of a page. Each link in a table also contains the page, page size and order of the other tables, so that
  * a click in one table does not change the others. Each link also contains the parameters `fixed`. */
private[stagecrew] final class Tables(
    request: PageRequest, path: String, fixed: Seq[(String, String)], tables: Table[_]*) {
  private val pagings = tables.map(table => table.tag -> table.paging(request)).toMap

  def apply[T](table: Table[T]): NodeSeq = {
    val paging = pagings(table.tag)
    val others = tables.filter(_.tag != table.tag).flatMap(other => Tables.parameters(other.tag, pagings(other.tag)))
    val columns = table.columns.filterNot(column => table.rows.nonEmpty && table.rows.forall(column.isZero))
    val query = (fixed ++ others).map { case (name, value) => s"&$name=${URLEncoder.encode(value, "UTF-8")}" }.mkString
    val sparkTable = new SparkTable[T](table.tag, columns.map(c => (c.name, c.order.nonEmpty, c.help)),
      table.sorted(paging),
      row => columns.map(_.cell(row)), s"${request.root}/$path?${query.stripPrefix("&")}", paging)
    val small = table.rows.size <= paging.size && paging.size == Tables.PageSize
    <div class="table-responsive">{if (small) sparkTable.allRows else sparkTable.onePage}</div>
  }
}

private[stagecrew] object Tables {
  val PageSize = 100
  val MaxPageSize = 5000

  /** The parameters of a table that differ from their defaults. */
  private def parameters(tag: String, paging: Paging): Seq[(String, String)] = Seq(
    "page" -> Some(paging.page).filter(_ != 1), "pageSize" -> Some(paging.size).filter(_ != PageSize),
    "sort" -> paging.column, "desc" -> Some(paging.descending).filter(identity)
  ).collect { case (name, Some(value)) => s"$tag.$name" -> value.toString }
}

/** Formats values for pages. Callers must not escape text, because XML nodes do. */
private[stagecrew] object Show {
  /** The maximum length of a string in a cell. */
  val Length = 120
  /** The maximum length of a tooltip. */
  val TitleLength = 4000

  /** A string. If it is long, the cell shows its beginning, and the tooltip shows more of it. `bdi` keeps right-to-left
    * strings from affecting the text around them. */
  def text(text: String): Node =
    if (text.length <= Length) <bdi>{text}</bdi> else <bdi title={title(text)}>{first(text, Length)}</bdi>

  def title(text: String): Option[Text] = if (text.isEmpty) None else Some(Text(first(text, TitleLength)))

  /** The first characters of a string: at most `length`, with the ellipsis. Never splits a surrogate pair. */
  def first(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.take(length - 1)
    s"${if (kept.lastOption.exists(_.isHighSurrogate)) kept.dropRight(1) else kept}\u2026"
  }

  /** The last characters of a string: at most `length`, with the ellipsis. Never splits a surrogate pair. */
  def last(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.takeRight(length - 1)
    s"\u2026${if (kept.headOption.exists(_.isLowSurrogate)) kept.drop(1) else kept}"
  }

  def date(ms: Long): String = if (ms <= 0) "" else SparkUi.formatDate(ms)

  def micros(micros: Long): String = if (micros < 1000000L) String.format(Locale.ROOT, "%.1f ms", micros / 1000.0)
    else SparkUi.formatDuration(micros / 1000)

  /** A cell with the line that describes an error. The tooltip shows the beginning of the text if the error is from
    * the JVM (`jvm`), else its end. `line` is empty for coordinators, and in event logs of earlier versions. Then this
    * finds the line: in a Python traceback, the last line that is not indented; in any other text, the first line. */
  def error(text: String, line: String = "", jvm: Boolean = false): Elem = {
    val lines = text.linesIterator.filterNot(_.isBlank).toVector
    val summary = lines.headOption.filterNot(_.startsWith("Traceback")).orElse(lines.findLast(!_.startsWith(" ")))
      .getOrElse("")
    val shown = first(if (line.nonEmpty) line else summary.trim, Length)
    <td title={title(if (jvm) text else last(text, TitleLength))}><bdi>{shown}</bdi></td>
  }

  /** A list of labels and values, like those above the tables of Spark's own pages. Empty values are left out. */
  def properties(properties: (String, NodeSeq)*): Node =
    <ul class="list-unstyled">{properties.filter(_._2.nonEmpty).map { case (name, value) =>
      <li><strong>{name}:</strong> {value}</li>
    }}</ul>

  def value(text: String): NodeSeq = if (text.isEmpty) NodeSeq.Empty else Text(text)

  /** The first 20 strings, separated by commas, and the number of the others. */
  def list(texts: Seq[String]): NodeSeq = {
    val more = texts.drop(20).size
    val firsts = texts.take(20).flatMap(value => Seq[Node](Text(", "), text(value))).drop(1)
    NodeSeq.fromSeq(firsts ++ Option.when(more > 0)(Text(s" and $more more")))
  }

  def hint(text: String): Node = <p class="alert alert-info stagecrew-hint" role="status">{text}</p>

  def warning(text: String): Node = <p class="alert alert-warning" role="status">{text}</p>
}
