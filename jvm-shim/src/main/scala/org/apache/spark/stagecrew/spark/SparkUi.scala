package org.apache.spark.stagecrew
package spark

import jakarta.servlet.http.HttpServletRequest
import java.net.URLEncoder
import scala.jdk.CollectionConverters._
import scala.xml.Node
import org.apache.hadoop.fs.Path
import org.apache.spark.{SparkConf, SparkContext}
import org.apache.spark.deploy.SparkHadoopUtil
import org.apache.spark.deploy.history.EventLogFileReader
import org.apache.spark.internal.config
import org.apache.spark.scheduler.{ReplayListenerBus, SparkListener}
import org.apache.spark.status.{AppHistoryServerPlugin, ElementTrackingStore, KVUtils}
import org.apache.spark.ui.{PagedDataSource, PagedTable, SparkUI, SparkUITab, UIUtils, WebUIPage}
import org.apache.spark.util.Utils
import org.apache.spark.util.kvstore.{InMemoryStore, KVStore}
import org.json4s.JValue
import org.json4s.jackson.JsonMethods

/** A request for a page: the URL of the tab, and the parameters. */
private[stagecrew] final case class PageRequest(root: String, parameters: Map[String, String] = Map.empty)

/** A page of the tab. `path` is relative to the tab ("" is the first page). To reject a request, it throws an
  * IllegalArgumentException, for which Spark returns status 400. */
private[stagecrew] final case class Page(
    path: String, title: PageRequest => String, html: PageRequest => Seq[Node], json: PageRequest => String)

// core/ui/{WebUI,SparkUI}.scala: the prefix is the path of the tab. Capitalized, it is the tab's name.
private final class PagesTab(ui: SparkUI, prefix: String, pages: Seq[Page]) extends SparkUITab(ui, prefix) {
  pages.foreach(page => attachPage(new TabPage(this, prefix, page)))
}

private final class TabPage(tab: PagesTab, tabPrefix: String, page: Page) extends WebUIPage(page.path) {
  override def render(http: HttpServletRequest): Seq[Node] = {
    val request = requestOf(http)
    val content = page.html(request) // before the header, because it may reject the request
    UIUtils.headerSparkPage(http, page.title(request), content, tab)
  }

  override def renderJson(http: HttpServletRequest): JValue = JsonMethods.parse(page.json(requestOf(http)))

  private def requestOf(http: HttpServletRequest): PageRequest = PageRequest(
    s"${UIUtils.prependBaseUri(http, tab.basePath)}/$tabPrefix",
    http.getParameterNames.asScala.map(name => name -> http.getParameter(name)).toMap)
}

/** The rows of a table to show. Without a column, the rows are in their original order. */
private[stagecrew] final case class Paging(page: Int, size: Int, column: Option[String], descending: Boolean)

/** A table like those of Spark's own pages: core/ui/PagedTable.scala. `rows` are already sorted. `link` is a path with
  * a query. The table appends its own parameters, whose names begin with its tag. */
private[stagecrew] final class SparkTable[T](
    tag: String, header: Seq[(String, Boolean, Option[String])], rows: IndexedSeq[T],
    cells: T => Seq[Node], link: String, paging: Paging) extends PagedTable[T] {
  override def tableId: String = s"stagecrew-$tag"
  override def tableCssClass: String =
    "table table-bordered table-sm table-striped table-head-clickable table-cell-width-limited"
  override def pageSizeFormField: String = s"$tag.pageSize"
  override def pageNumberFormField: String = s"$tag.page"
  override def dataSource: PagedDataSource[T] = new PagedDataSource[T](paging.size) {
    override protected def dataSize: Int = rows.size
    override protected def sliceData(from: Int, to: Int): Seq[T] = rows.slice(from, to)
  }
  private val order = paging.column.fold("")(name =>
    s"&$tag.sort=${URLEncoder.encode(name, "UTF-8")}&$tag.desc=${paging.descending}")
  override def pageLink(page: Int): String =
    s"$link$order&$pageNumberFormField=$page&$pageSizeFormField=${paging.size}#$tableId"
  override def goButtonFormPath: String = s"$link$order#$tableId"
  override def headers: Seq[Node] =
    headerRow(header, paging.descending, paging.size, paging.column.getOrElse(""), link, tag, tableId)
  override def row(row: T): Seq[Node] = <tr>{cells(row)}</tr>

  /** All rows, without page controls. */
  def allRows: Seq[Node] = <table class={tableCssClass} id={tableId}>{headers}<tbody>{rows.map(row)}</tbody></table>
  /** One page of rows, with page controls. */
  def onePage: Seq[Node] = table(paging.page)
}

/** The objects of one type in the KVStore of an application: core/status/{ElementTrackingStore,KVUtils}.scala,
  * util/kvstore. */
private[stagecrew] final class TypedStore[T](store: KVStore, valueClass: Class[T]) {
  def write(value: T): Unit = store match {
    case tracking: ElementTrackingStore => tracking.write(value, checkTriggers = true); ()
    case other => other.write(value)
  }
  def delete(key: String): Unit = store.delete(valueClass, key)
  def all: Seq[T] = KVUtils.viewToSeq(store.view(valueClass))
  def count: Long = store.count(valueClass)
}

/** A tab in the History Server: core/status/AppHistoryServerPlugin.scala. */
private[stagecrew] abstract class HistoryTab[T](prefix: String, valueClass: Class[T]) extends AppHistoryServerPlugin {
  /** Creates the listener that handles the events of an event log. */
  def listener(conf: SparkConf, store: TypedStore[T]): SparkListener
  /** Creates the pages. Called if the store is not empty. */
  def pages(store: TypedStore[T]): Seq[Page]

  override def createListeners(conf: SparkConf, store: ElementTrackingStore): Seq[SparkListener] =
    Seq(listener(conf, new TypedStore(store, valueClass)))

  override def setupUI(ui: SparkUI): Unit = {
    val store = new TypedStore(ui.store.store, valueClass)
    if (store.count > 0) SparkUi.attachTab(ui, prefix, pages(store))
  }

  override def displayOrder: Int = Int.MaxValue // last, as in a running application
}

private[stagecrew] object SparkUi {
  /** Attaches a tab and its script, whose path is below the root of the UI, if the application has a UI. */
  def attachTab(sc: SparkContext, prefix: String, pages: => Seq[Page], path: String, script: Array[Byte]): Unit =
    sc.ui.foreach { ui =>
      attachTab(ui, prefix, pages)
      UiFile.attach(ui, s"/$path", "text/javascript", script)
    }

  def attachTab(ui: SparkUI, prefix: String, pages: Seq[Page]): Unit = ui.attachTab(new PagesTab(ui, prefix, pages))

  def hasUi(sc: SparkContext): Boolean = sc.ui.nonEmpty
  def hasEventLog(sc: SparkContext): Boolean = sc.conf.get(config.EVENT_LOG_ENABLED)
  def inMemory[T](valueClass: Class[T]): TypedStore[T] = new TypedStore(new InMemoryStore, valueClass)

  /** Replays selected lines of an event log, which may be truncated: core/deploy/history/EventLogFileReaders.scala,
    * core/scheduler/ReplayListenerBus.scala. */
  def replay(log: String, listeners: Seq[SparkListener], isRelevant: String => Boolean): Unit = {
    val path = new Path(log)
    val files = path.getFileSystem(SparkHadoopUtil.get.newConfiguration(new SparkConf))
    val reader = EventLogFileReader(files, path).getOrElse(throw new java.io.FileNotFoundException(
      s"$log is not an event log: it must be a file of spark.eventLog.dir, " +
        s"or the folder of a rolling log (eventlog_v2_...)"))
    val bus = new ReplayListenerBus
    listeners.foreach(bus.addListener(_))
    reader.listEventLogFiles.foreach { file =>
      Utils.tryWithResource(EventLogFileReader.openEventLog(file.getPath, files)) { in =>
        bus.replay(in, file.getPath.toString, maybeTruncated = true, eventsFilter = isRelevant)
      }
    }
  }

  /** A bar like those of stages on Spark's own pages. */
  def progressBar(running: Int, done: Int, total: Int): Seq[Node] =
    UIUtils.makeProgressBar(running, done, failed = 0, skipped = 0, Map.empty, total)

  def formatDate(ms: Long): String = UIUtils.formatDate(ms)
  def formatDuration(ms: Long): String = UIUtils.formatDuration(ms)
  def formatBytes(bytes: Long): String = Utils.bytesToString(bytes)
}
