package org.apache.spark.stagecrew

import java.net.URLEncoder
import java.util.Locale
import scala.util.Try
import scala.xml.{Elem, Node, NodeSeq, Text}

/** A column: how a row's cell is made, and by what it sorts. Names stand in links: letters, digits and spaces. */
private[stagecrew] final case class Column[T](name: String, order: Option[Ordering[T]], help: Option[String], cell: T => Node)

private[stagecrew] object Column {
  def text[T](name: String, help: String = "")(f: T => String): Column[T] = of(name, help)(f)(row => <td>{Show.text(f(row))}</td>)

  def number[T](name: String, help: String = "")(f: T => Long): Column[T] = of(name, help)(f)(row => <td>{f(row).toString}</td>)

  def bytes[T](name: String, help: String = "")(f: T => Long): Column[T] =
    of(name, help)(f)(row => <td>{if (f(row) == 0) "" else SparkInternals.formatBytes(f(row))}</td>)

  /** Of a time in ms since the epoch; empty for one that has not come. */
  def date[T](name: String, help: String = "")(f: T => Long): Column[T] = of(name, help)(f)(row => <td>{Show.date(f(row))}</td>)

  def duration[T](name: String, help: String = "")(ms: T => Long): Column[T] =
    of(name, help)(ms)(row => <td>{SparkInternals.formatDuration(ms(row))}</td>)

  def micros[T](name: String, help: String = "")(f: T => Long): Column[T] = of(name, help)(f)(row => <td>{Show.micros(f(row))}</td>)

  /** How many, and which in the title; there may be more than these. */
  def several[T](name: String, help: String = "")(f: T => Seq[String], more: T => Int = (_: T) => 0): Column[T] = {
    def size(row: T): Int = f(row).size + more(row)
    of(name, help)(size)(row => <td title={Show.title(f(row).mkString("\n"))}>{size(row).toString}</td>)
  }

  def of[T, K](name: String, help: String = "")(key: T => K)(cell: T => Node)(implicit ordering: Ordering[K]): Column[T] =
    Column(name, Some(ordering.on(key)), Some(help).filter(_.nonEmpty), cell)
}

/** A table: its parameters are named by its tag, as in `topologies.page`. In its own order until a column is chosen. */
private[stagecrew] final case class Table[T](tag: String, rows: Seq[T], columns: Seq[Column[T]]) {
  /** Its parameters of a request: what they say is known, or refused. */
  def paging(ask: PageRequest): Paging = {
    def asked[A](name: String, otherwise: A)(read: String => Option[A]): A =
      ask.parameters.get(s"$tag.$name").filter(_.nonEmpty).fold(otherwise)(text =>
        read(text).getOrElse(throw new IllegalArgumentException(s"the parameter $tag.$name has a value that it cannot have")))
    def known(name: String): Option[Option[String]] =
      columns.find(column => column.name == name && column.order.nonEmpty).map(column => Some(column.name))
    Paging(
      asked("page", 1)(text => Try(text.toInt).toOption),
      asked("pageSize", Tables.PageSize)(text => Try(text.toInt).toOption.map(size => math.max(1, math.min(size, Tables.MaxPageSize)))),
      asked("sort", Option.empty[String])(known),
      asked("desc", false)(_.toBooleanOption))
  }

  def sorted(paging: Paging): IndexedSeq[T] = paging.column.flatMap(name => columns.find(_.name == name)).flatMap(_.order) match {
    case Some(order) => rows.sorted(if (paging.descending) order.reverse else order).toIndexedSeq
    case None => rows.toIndexedSeq
  }
}

/** The tables of a page at this path: each keeps its place while another is turned or sorted. */
private[stagecrew] final class Tables(ask: PageRequest, path: String, fixed: Seq[(String, String)], tables: Table[_]*) {
  private val pagings = tables.map(table => table.tag -> table.paging(ask)).toMap

  def apply[T](table: Table[T]): NodeSeq = {
    val paging = pagings(table.tag)
    val others = tables.filter(_.tag != table.tag).flatMap(other => Tables.parameters(other.tag, pagings(other.tag)))
    val query = (fixed ++ others).map { case (name, value) => s"&$name=${URLEncoder.encode(value, "UTF-8")}" }.mkString
    val shown = new SparkTable[T](table.tag, table.columns.map(c => (c.name, c.order.nonEmpty, c.help)), table.sorted(paging),
      row => table.columns.map(_.cell(row)), s"${ask.root}/$path?${query.stripPrefix("&")}", paging)
    val small = table.rows.size <= paging.size && paging.size == Tables.PageSize
    <div class="table-responsive">{if (small) shown.whole else shown.part}</div>
  }
}

private[stagecrew] object Tables {
  val PageSize = 100
  val MaxPageSize = 5000

  /** What of a table's state is not as it is without parameters. */
  private def parameters(tag: String, paging: Paging): Seq[(String, String)] = Seq(
    "page" -> Some(paging.page).filter(_ != 1), "pageSize" -> Some(paging.size).filter(_ != PageSize),
    "sort" -> paging.column, "desc" -> Some(paging.descending).filter(identity)
  ).collect { case (name, Some(value)) => s"$tag.$name" -> value.toString }
}

/** How things are shown. All text goes into XML nodes, which escape it. */
private[stagecrew] object Show {
  /** Of one text, in a cell and in its title. */
  val Length = 120
  val TitleLength = 4000

  /** A user's text by itself: cut where it is long, with the whole in the title, and its direction is not its surroundings'. */
  def text(text: String): Node =
    if (text.length <= Length) <bdi>{text}</bdi> else <bdi title={title(text)}>{cut(text, Length)}</bdi>

  def title(text: String): Option[Text] = if (text.isEmpty) None else Some(Text(cut(text, TitleLength)))

  /** At most so many characters; no pair of surrogates is torn. */
  def cut(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.take(length - 1)
    s"${if (kept.lastOption.exists(_.isHighSurrogate)) kept.dropRight(1) else kept}\u2026"
  }

  /** The end of a text, of at most so many characters; no pair of surrogates is torn. */
  def end(text: String, length: Int): String = if (text.length <= length) text else {
    val kept = text.takeRight(length - 1)
    s"\u2026${if (kept.headOption.exists(_.isLowSurrogate)) kept.drop(1) else kept}"
  }

  def date(ms: Long): String = if (ms <= 0) "" else SparkInternals.formatDate(ms)

  def micros(micros: Long): String =
    if (micros < 1000000L) String.format(Locale.ROOT, "%.1f ms", micros / 1000.0) else SparkInternals.formatDuration(micros / 1000)

  private val Looks = 200 // frames at which is looked, the last ones
  private val Cut = "\u2026" // behind the line that says what happened, where what was between is left out

  /** A frame of a Python traceback, with the bar of an exception group in front where it is one's. */
  private val Frame = """^( *\| )?( +)File ".*", line \d""".r

  /** The line that says what happened: of a text with a Python traceback its exception's, else the first that is not empty. An exception's
    * line stands behind its last frame, and is not indented as that is. Of a group it is its own (python/stagecrew/observability/error_summary.py). */
  def errorLine(error: String): String = {
    val lines = error.split('\n')
    if (lines.lift(1).contains(Cut)) return cut(lines(0).trim, Length)
    // The first line behind a frame that is indented less than it: not its code, its marks, or that it was repeated.
    def behind(frame: Int, bar: String, indentation: String): Option[String] =
      lines.iterator.drop(frame + 1).takeWhile(_.startsWith(bar)).map(_.drop(bar.length))
        .find(said => !said.isBlank && !said.startsWith(indentation)).map(_.trim)
    var found = Option.empty[(String, Int)] // and how deep it stands in groups
    val frames = lines.indices.reverseIterator.flatMap(number => Frame.findFirstMatchIn(lines(number)).map(number -> _)).take(Looks)
    while (frames.hasNext && !found.exists(_._2 == 0)) {
      val (number, frame) = frames.next()
      val bar = Option(frame.group(1)).getOrElse("")
      if (found.nonEmpty && bar.isEmpty) found = found.map(_._1 -> 0)
      else if (found.forall(bar.length < _._2)) found = behind(number, bar, frame.group(2)).map(_ -> bar.length).orElse(found)
    }
    cut(found.map(_._1).orElse(lines.iterator.map(_.trim).find(_.nonEmpty)).getOrElse(""), Length)
  }

  /** The end of an error's text, with the line that says what happened before it where it is not there any more. */
  def errorEnd(error: String, length: Int): String = {
    val (kept, line) = (end(error, length), errorLine(error))
    if (errorLine(kept) == line) kept else s"$line\n$Cut\n${end(error, math.max(1, length - line.length - 3))}"
  }

  /** That line, with more of what stands beside it in the title. */
  def error(error: String, jvm: Boolean): Elem = <td title={title(if (jvm) error else end(error, TitleLength))}><bdi>{errorLine(error)}</bdi></td>

  /** What is known, one under the other, as Spark's own pages have it above their tables. */
  def facts(facts: (String, NodeSeq)*): Node =
    <ul class="list-unstyled">{facts.filter(_._2.nonEmpty).map { case (name, value) => <li><strong>{name}:</strong> {value}</li> }}</ul>

  def fact(text: String): NodeSeq = if (text.isEmpty) NodeSeq.Empty else Text(text)

  /** A few of a user's texts, and how many more there are. */
  def several(texts: Seq[String], most: Int = 20): NodeSeq = {
    val shown = texts.take(most).flatMap(one => Seq[Node](Text(", "), text(one))).drop(1)
    NodeSeq.fromSeq(if (texts.size > most) shown :+ Text(s" and ${texts.size - most} more") else shown)
  }

  def note(text: String): Node = <p class="alert alert-warning" role="status">{text}</p>
}
