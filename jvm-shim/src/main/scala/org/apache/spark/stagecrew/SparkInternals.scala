// The only door to Spark's private API: each member names the Spark file (of 4.3) that it relies on, so that a new Spark
// version is this file's work. The packages are Spark's own, because that is what private[...] asks for.
package org.apache.spark {

  package scheduler {

    /** core/scheduler/DAGScheduler.scala: `activeJobs` and `stageIdToStage` are private[scheduler], owned by its loop. */
    private[spark] object StagecrewScheduler {

      /** Active jobs with one of their local properties. Read beside the scheduler's thread: may lag, repeat to be sure. */
      def activeJobs(sc: SparkContext, property: String): Map[Int, String] =
        unlessItChanges {
          sc.dagScheduler.activeJobs.toArray.map { job =>
            job.jobId -> Option(job.properties).flatMap(p => Option(p.getProperty(property))).getOrElse("")
          }.toMap
        }.getOrElse(Map.empty)

      /** The shuffles that each active job needs, with the job's local property. Fails when it cannot be read: what nobody knows to
        * be unused is not to be deleted. */
      def shufflesInUse(sc: SparkContext, property: String): Seq[(String, Seq[Int])] =
        unlessItChanges {
          val stages = sc.dagScheduler.stageIdToStage.values.toArray.collect { case stage: ShuffleMapStage => stage }
          sc.dagScheduler.activeJobs.toArray.toSeq.map { job =>
            Option(job.properties).flatMap(p => Option(p.getProperty(property))).getOrElse("") ->
              stages.toSeq.filter(_.jobIds.contains(job.jobId)).map(_.shuffleDep.shuffleId)
          }
        }.getOrElse(throw new IllegalStateException("Spark's stages changed at each of twenty looks at them"))

      def nextAttempt(sc: SparkContext): Long = sc.taskScheduler match {
        case scheduler: TaskSchedulerImpl => scheduler.nextTaskId.get
        case _ => 0 // not Spark's own: nothing is told by its age
      }

      /** The first of the active jobs that need a stage, as its `activeJobForStage` has it. */
      def jobOfStage(sc: SparkContext, stage: Int): Option[Int] =
        unlessItChanges(
          sc.dagScheduler.stageIdToStage.get(stage).flatMap(_.jobIds.toArray.filter(sc.dagScheduler.jobIdToActiveJob.contains).minOption)
        ).flatten

      // The collections belong to another thread; a read during a change may fail, or miss something: two have to be the same.
      private def unlessItChanges[T](read: => T): Option[T] =
        Iterator.continually(scala.util.Try(read).toOption).take(20).sliding(2).collectFirst { case Seq(Some(one), Some(other)) if one == other => one }
    }
  }

  package sql {

    /** sql/core: `SharedState.activeStreamingQueries` is private[sql]; `SQLExecution.getQueryExecution` says who runs. */
    private[spark] object StagecrewSql {
      import org.apache.spark.sql.execution.SQLExecution

      def executionRuns(id: Long): Boolean = SQLExecution.getQueryExecution(id) != null

      def stopQuery(runId: String): Unit = running(runId).foreach(_.stop())

      def queryRuns(runId: String): Boolean = running(runId).nonEmpty

      def queryName(runId: String): Option[String] =
        running(runId).map(query => Option(query.name).getOrElse(query.id.toString))

      /** The run of the query with this id. */
      def queryRun(id: String): Option[String] = find(_.id.toString == id).map(_.runId.toString)

      private type Query = org.apache.spark.sql.streaming.StreamingQuery

      private def running(runId: String): Option[Query] = find(_.runId.toString == runId)

      private def find(which: Query => Boolean): Option[Query] = {
        import scala.jdk.CollectionConverters._
        classic.SparkSession.getDefaultSession.flatMap { session =>
          session.sharedState.activeStreamingQueries.values.asScala.find(query => which(query) && query.isActive)
        }
      }
    }
  }

  package sql.execution {

    /** sql/core: CacheManager.scala, InMemoryRelation.scala, QueryExecution.scala, ShuffleExchangeExec.scala; what is private there
      * is read as a field, and never computed: whatever is not there has stored nothing. */
    private[spark] object StagecrewPlans {
      import org.apache.spark.rdd.RDD
      import org.apache.spark.sql.classic
      import org.apache.spark.sql.execution.adaptive.{AdaptiveSparkPlanExec, QueryStageExec}
      import org.apache.spark.sql.execution.columnar.{CachedRDDBuilder, InMemoryTableScanExec}
      import org.apache.spark.sql.execution.exchange.{ReusedExchangeExec, ShuffleExchangeExec}
      import org.apache.spark.util.LazyTry

      /** Shuffles, cached datasets, and RDDs to look into. */
      final case class Found(shuffles: Seq[Int] = Nil, caches: Seq[Int] = Nil, rdds: Seq[RDD[_]] = Nil) {
        def +(other: Found): Found = Found(shuffles ++ other.shuffles, caches ++ other.caches, rdds ++ other.rdds)
      }

      def stored(dataset: classic.Dataset[_]): Found = {
        val lazyPlan = field[QueryExecution, LazyTry[SparkPlan]]("lazyExecutedPlan", dataset.queryExecution)
        val materialized = field[LazyTry[_], java.lang.Boolean]("materialized", lazyPlan).booleanValue
        val ran = if (materialized) of(lazyPlan.get) else Found()
        val cached = dataset.sparkSession.sharedState.cacheManager.lookupCachedData(dataset).toSeq
        cached.map(data => of(data.cachedRepresentation.cacheBuilder)).foldLeft(ran)(_ + _)
      }

      /** Takes away a dataset that SQL has cached. Answers whether there was one. */
      def uncache(rdd: Int): Boolean = classic.SparkSession.getDefaultSession.exists { session =>
        val manager = session.sharedState.cacheManager
        val cached = field[CacheManager, scala.collection.immutable.IndexedSeq[CachedData]]("cachedData", manager)
        val mine = cached.filter(data => buffers(data.cachedRepresentation.cacheBuilder).exists(_.id == rdd))
        mine.foreach(data => manager.uncacheQuery(session, data.plan, cascade = false, blocking = true))
        mine.nonEmpty
      }

      private def of(plan: SparkPlan): Found = {
        val own = plan match {
          case adaptive: AdaptiveSparkPlanExec => of(adaptive.executedPlan)
          case stage: QueryStageExec => of(stage.plan)
          case reused: ReusedExchangeExec => of(reused.child)
          case scan: InMemoryTableScanExec => of(scan.relation.cacheBuilder)
          case shuffle: ShuffleExchangeExec =>
            Found(shuffles = Option(field[ShuffleExchangeExec, ShuffleDependency[_, _, _]]("shuffleDependency", shuffle)).map(_.shuffleId).toSeq)
          case scan: RDDScanExec => Found(rdds = Seq(scan.rdd))
          case scan: ExternalRDDScanExec[_] => Found(rdds = Seq(scan.rdd))
          case _ => Found()
        }
        (plan.children ++ plan.subqueries).map(of).foldLeft(own)(_ + _)
      }

      private def of(builder: CachedRDDBuilder): Found = buffers(builder).map(rdd => Found(caches = Seq(rdd.id), rdds = Seq(rdd))).getOrElse(Found())

      private def buffers(builder: CachedRDDBuilder): Option[RDD[_]] = Option(field[CachedRDDBuilder, RDD[_]]("_cachedColumnBuffers", builder))

      private def field[T, R](name: String, of: T)(implicit tag: scala.reflect.ClassTag[T]): R = {
        val field = tag.runtimeClass.getDeclaredField(name)
        field.setAccessible(true)
        field.get(of).asInstanceOf[R]
      }
    }
  }

  package stagecrew {

    import java.util.Properties
    import scala.concurrent.ExecutionContext
    import scala.concurrent.duration._
    import scala.jdk.CollectionConverters._
    import scala.reflect.ClassTag
    import scala.util.{Failure, Success}
    import org.apache.hadoop.fs.Path
    import org.apache.spark.api.python.PythonUtils
    import org.apache.spark.deploy.history.EventLogFileReader
    import org.apache.spark.rpc._
    import org.apache.spark.api.java.JavaRDD
    import org.apache.spark.network.shuffle.ExternalBlockStoreClient
    import org.apache.spark.rdd.RDD
    import org.apache.spark.scheduler._
    import org.apache.spark.shuffle.api.ShuffleDataIO
    import org.apache.spark.shuffle.sort.SortShuffleManager
    import org.apache.spark.shuffle.{IndexShuffleBlockResolver, ShuffleBlockResolver}
    import org.apache.spark.sql.StagecrewSql
    import org.apache.spark.sql.classic.Dataset
    import org.apache.spark.sql.execution.StagecrewPlans
    import org.apache.spark.storage.{RDDBlockId, ShuffleChecksumBlockId, ShuffleDataBlockId, ShuffleIndexBlockId, StorageLevel}
    import org.apache.spark.status.{AppHistoryServerPlugin, ElementTrackingStore, KVUtils}
    import org.apache.spark.ui.{PagedDataSource, PagedTable, SparkUI, SparkUITab, UIUtils, WebUIPage}
    import org.apache.spark.util.{RpcUtils, ShutdownHookManager}
    import org.apache.spark.util.kvstore.{InMemoryStore, KVStore}
    import jakarta.servlet.http.HttpServletRequest
    import org.json4s.JValue
    import org.json4s.jackson.JsonMethods
    import scala.xml.Node

    /** The other side of an RPC connection. */
    private[stagecrew] final class Peer(val ref: RpcEndpointRef) {
      /** Sends a message that is answered: the answer, or what went wrong, reaches `done` on another thread. */
      def ask(message: Any, timeoutMs: Long)(done: Either[Throwable, Array[Byte]] => Unit): Unit =
        try {
          ref.ask[Array[Byte]](message, new RpcTimeout(timeoutMs.millis, "stagecrew"))(ClassTag(classOf[Array[Byte]]))
            .onComplete {
              case Success(reply) => done(Right(reply))
              case Failure(error) => done(Left(error))
            }(ExecutionContext.parasitic)
        } catch { case error: Exception => done(Left(error)) } // an RpcEnv that is stopped throws at once

      def askSync(message: Any, timeoutMs: Long): Array[Byte] =
        ref.askSync[Array[Byte]](message, new RpcTimeout(timeoutMs.millis, "stagecrew"))(ClassTag(classOf[Array[Byte]]))

      def send(message: Any): Unit = ref.send(message)
    }

    /** How an endpoint answers: from any thread, once. */
    private[stagecrew] trait Reply {
      def answer(bytes: Array[Byte]): Unit
      def fail(error: Throwable): Unit
    }

    /** What an endpoint does. Called on RPC threads: hand over, never wait. */
    private[stagecrew] trait Handler {
      /** `from` is the sender's endpoint, when it gave one, and its address. */
      def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit
      def disconnected(address: String): Unit = ()
    }

    /** What a request for a page asks: where the tab is, and its parameters. */
    private[stagecrew] final case class PageRequest(root: String, parameters: Map[String, String] = Map.empty)

    /** A page of the tab. It may refuse a request by an IllegalArgumentException: that is answered with 400, as by Spark. */
    private[stagecrew] trait Page {
      /** Below the tab's own; "" is the tab's first. */
      def path: String
      def title(ask: PageRequest): String
      def html(ask: PageRequest): Seq[Node]
      def json(ask: PageRequest): String
    }

    // core/ui/{WebUI,SparkUI}.scala: the tab's path and, capitalised, its name are the prefix.
    private final class PagesTab(ui: SparkUI, prefix: String, pages: Seq[Page]) extends SparkUITab(ui, prefix) {
      pages.foreach(page => attachPage(new TabPage(this, prefix, page)))
    }

    private final class TabPage(tab: PagesTab, tabPrefix: String, page: Page) extends WebUIPage(page.path) {
      override def render(request: HttpServletRequest): Seq[Node] = {
        val ask = asked(request)
        val content = page.html(ask) // before the header: what is refused is refused whole
        UIUtils.headerSparkPage(request, page.title(ask), content, tab)
      }

      override def renderJson(request: HttpServletRequest): JValue = JsonMethods.parse(page.json(asked(request)))

      private def asked(request: HttpServletRequest): PageRequest = {
        val parameters = request.getParameterNames.asScala.map(name => name -> request.getParameter(name)).toMap
        PageRequest(s"${UIUtils.prependBaseUri(request, tab.basePath)}/$tabPrefix", parameters)
      }
    }

    /** Which part of a table is shown; in its own order when no column is named. */
    private[stagecrew] final case class Paging(page: Int, size: Int, column: Option[String], descending: Boolean)

    /** A table as those of Spark's own pages: core/ui/PagedTable.scala. `rows` are sorted; `link` is a path with a query, to
      * which the table adds its own parameters, named by its tag. */
    private[stagecrew] final class SparkTable[T](
        tag: String, header: Seq[(String, Boolean, Option[String])], rows: IndexedSeq[T], cells: T => Seq[Node], link: String, paging: Paging)
      extends PagedTable[T] {
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
        s"&$tag.sort=${java.net.URLEncoder.encode(name, "UTF-8")}&$tag.desc=${paging.descending}")
      override def pageLink(page: Int): String = s"$link$order&$pageNumberFormField=$page&$pageSizeFormField=${paging.size}#$tableId"
      override def goButtonFormPath: String = s"$link$order#$tableId"
      override def headers: Seq[Node] =
        headerRow(header, paging.descending, paging.size, paging.column.getOrElse(""), link, tag, tableId)
      override def row(one: T): Seq[Node] = <tr>{cells(one)}</tr>

      /** All rows as they are, without what turns pages. */
      def whole: Seq[Node] = <table class={tableCssClass} id={tableId}>{headers}<tbody>{rows.map(row)}</tbody></table>
      def part: Seq[Node] = table(paging.page)
    }

    /** What the History Server keeps of an application: core/status/{ElementTrackingStore,KVUtils}.scala, util/kvstore. */
    private[stagecrew] final class TypedStore[T](store: KVStore, what: Class[T]) {
      def write(one: T): Unit = store match {
        case tracking: ElementTrackingStore => tracking.write(one, checkTriggers = true); ()
        case other => other.write(one)
      }
      def delete(key: String): Unit = store.delete(what, key)
      def all: Seq[T] = KVUtils.viewToSeq(store.view(what))
      def count: Long = store.count(what)
    }

    /** core/status/AppHistoryServerPlugin.scala, made by the History Server for each application. */
    private[stagecrew] abstract class HistoryTab[T](prefix: String, what: Class[T]) extends AppHistoryServerPlugin {
      /** What hears the events of the log. */
      def listener(conf: SparkConf, kept: TypedStore[T]): SparkListener
      /** Called when something is kept. */
      def pages(kept: TypedStore[T]): Seq[Page]

      override def createListeners(conf: SparkConf, store: ElementTrackingStore): Seq[SparkListener] =
        Seq(listener(conf, new TypedStore(store, what)))

      override def setupUI(ui: SparkUI): Unit = {
        val kept = new TypedStore(ui.store.store, what)
        if (kept.count > 0) ui.attachTab(new PagesTab(ui, prefix, pages(kept)))
      }

      override def displayOrder: Int = Int.MaxValue // the last, as in a running application
    }

    private[stagecrew] object SparkInternals {

      // -- RPC: core/rpc/{RpcEnv,RpcEndpoint,RpcEndpointRef}.scala, core/util/RpcUtils.scala.
      // Messages are bytes, or a pair of the sender's endpoint and bytes: classes of ours would kill executors whose jar
      // came by spark.jars (reference: trap 1).

      def endpoint(name: String, handler: Handler): Peer = {
        val env = SparkEnv.get.rpcEnv
        new Peer(env.setupEndpoint(name, new ThreadSafeRpcEndpoint {
          override val rpcEnv: RpcEnv = env

          override def receive: PartialFunction[Any, Unit] = { case message =>
            take(message, "", new Reply {
              def answer(bytes: Array[Byte]): Unit = ()
              def fail(error: Throwable): Unit = ()
            })
          }

          override def receiveAndReply(context: RpcCallContext): PartialFunction[Any, Unit] = { case message =>
            take(message, String.valueOf(context.senderAddress), new Reply {
              def answer(bytes: Array[Byte]): Unit = context.reply(bytes)
              def fail(error: Throwable): Unit = context.sendFailure(error)
            })
          }

          override def onDisconnected(address: RpcAddress): Unit = handler.disconnected(String.valueOf(address))

          private def take(message: Any, address: String, reply: Reply): Unit = message match {
            case (from: RpcEndpointRef, bytes: Array[Byte]) => handler.receive(bytes, Some(new Peer(from)), address, reply)
            case bytes: Array[Byte] => handler.receive(bytes, None, address, reply)
            case other => reply.fail(new SparkException(s"not a message of stagecrew: ${other.getClass.getName}"))
          }
        }))
      }

      def stopEndpoint(peer: Peer): Unit = SparkEnv.get match {
        case null => ()
        case env => env.rpcEnv.stop(peer.ref)
      }

      def driver(name: String): Peer = new Peer(RpcUtils.makeDriverRef(name, SparkEnv.get.conf, SparkEnv.get.rpcEnv))

      /** Where the driver is, as core/util/RpcUtils.scala finds it. */
      def driverAddress(conf: SparkConf): String = String.valueOf(RpcAddress(
        conf.get(internal.config.DRIVER_HOST_ADDRESS.key, "localhost"), conf.getInt(internal.config.DRIVER_PORT.key, 7077)))

      def withSender(sender: Peer, bytes: Array[Byte]): Any = (sender.ref, bytes)

      // -- Tasks: core/TaskContext.scala

      def localProperties(task: TaskContext): Properties = task.getLocalProperties

      /** Keeps the body of the task from running: the attempt ends as killed, which Spark does not count. */
      def markInterrupted(task: TaskContext, reason: String): Unit = task.markInterrupted(reason)

      /** The blocks of cached datasets that a task stored, with their sizes, or dropped: core/executor/TaskMetrics.scala. */
      def updatedBlocks(task: TaskContext): Seq[(CachedBlock, Option[Long])] =
        if (task.taskMetrics() == null) Nil
        else task.taskMetrics().updatedBlockStatuses.collect { case (RDDBlockId(rdd, partition), status) =>
          CachedBlock(rdd, partition) -> (if (status.storageLevel.isValid) Some(status.memSize + status.diskSize) else None)
        }

      // -- Stored partitions on an executor: core/shuffle/{IndexShuffleBlockResolver, ShuffleBlockResolver}.scala

      private def resolver: Option[ShuffleBlockResolver] =
        Option(SparkEnv.get.blockingShuffleManager).flatMap(manager => Option(manager.shuffleBlockResolver))

      /** Deletes a map task's files, as core/shuffle/sort/SortShuffleManager.scala does. Returns whether none of them is left: Spark
        * only logs that it could not delete a file. */
      def deleteOutput(output: Output): Boolean = resolver match {
        case Some(resolver: IndexShuffleBlockResolver) =>
          resolver.removeDataByMap(output.shuffle, output.map)
          val checksums = SparkEnv.get.conf.get(internal.config.SHUFFLE_CHECKSUM_ALGORITHM)
          Seq(resolver.getDataFile(output.shuffle, output.map), resolver.getIndexFile(output.shuffle, output.map),
            resolver.getChecksumFile(output.shuffle, output.map, checksums)).forall(file => java.nio.file.Files.notExists(file.toPath))
        case _ => false
      }

      /** Whether a block of a cached dataset is on this executor, or a file of it that Spark could not delete: core/storage/BlockManager.scala. */
      def hasBlock(block: CachedBlock): Boolean = {
        val (manager, id) = (SparkEnv.get.blockManager, RDDBlockId(block.rdd, block.partition))
        manager.getStatus(id).nonEmpty || manager.diskBlockManager.containsBlock(id)
      }

      /** Whatever is on the disk of these, also half of an output that was deleted while the other half came: core/storage/DiskBlockManager.scala. */
      def outputsOf(shuffles: Set[Int]): Seq[Output] = SparkEnv.get.blockManager.diskBlockManager.getAllBlocks().collect {
        case ShuffleIndexBlockId(shuffle, map, _) => Output(shuffle, map)
        case ShuffleDataBlockId(shuffle, map, _) => Output(shuffle, map)
      }.filter(output => shuffles(output.shuffle)).distinct

      /** Whether an executor is on its way out: core/scheduler/TaskSchedulerImpl.scala. */
      def leaves(sc: SparkContext, executor: String): Boolean = sc.taskScheduler.getExecutorDecommissionState(executor).nonEmpty

      /** Every attempt that has begun has a smaller id. */
      def nextAttempt(sc: SparkContext): Long = StagecrewScheduler.nextAttempt(sc)

      /** Whether executors that leave send their outputs to others. */
      def migrates(conf: SparkConf): Boolean =
        conf.get(internal.config.DECOMMISSION_ENABLED) && conf.get(internal.config.STORAGE_DECOMMISSION_SHUFFLE_BLOCKS_ENABLED)

      /** As core/shuffle/ShuffleDataIOUtils.scala loads it. */
      def shuffleDataIO(name: String, conf: SparkConf): ShuffleDataIO =
        util.Utils.loadExtensions(classOf[ShuffleDataIO], Seq(name), conf).headOption.getOrElse(
          throw new IllegalArgumentException(s"$name is no ShuffleDataIO"))

      // -- Stored partitions on the driver: core/MapOutputTracker.scala, storage/BlockManagerMasterEndpoint.scala

      def shuffleOf(stage: StageInfo): Option[Int] = stage.shuffleDepId
      def cachesOf(stage: StageInfo): Seq[Int] = stage.rddInfos.toSeq.filter(_.storageLevel != StorageLevel.NONE).map(_.id)
      def shufflesInUse(sc: SparkContext, property: String): Seq[(String, Seq[Int])] = StagecrewScheduler.shufflesInUse(sc, property)

      /** Whether Spark's own shuffle manager writes, so through its ShuffleDataIO, and each attempt its own file: core/shuffle/ShuffleManager.scala. */
      def sortsShuffles(conf: SparkConf): Boolean = SortShuffleManagers(conf.get(internal.config.SHUFFLE_MANAGER)) && !oldFetch(conf)

      /** Whether map outputs are named by partition: what is computed again has the names of what was released. */
      def oldFetch(conf: SparkConf): Boolean = conf.get(internal.config.SHUFFLE_USE_OLD_FETCH_PROTOCOL)
      private val SortShuffleManagers = Set("sort", "tungsten-sort", classOf[SortShuffleManager].getName)

      /** Whether shuffles are written through Spark's ShuffleDataIO, to the executors' disks: core/SparkContext.scala. */
      def tracksShuffles(sc: SparkContext): Boolean = sortsShuffles(sc.conf) && !sc.shuffleDriverComponents.supportsReliableStorage()

      private def tracker: MapOutputTrackerMaster = SparkEnv.get.mapOutputTracker.asInstanceOf[MapOutputTrackerMaster]

      def hasShuffle(shuffle: Int): Boolean = tracker.containsShuffle(shuffle)
      def hasOutputs(shuffle: Int): Boolean = tracker.shuffleStatuses.get(shuffle).exists(_.numAvailableMapOutputs > 0)
      def hasCache(sc: SparkContext, rdd: Int): Boolean = sc.persistentRdds.contains(rdd)

      /** What an executor that is gone has left with the external shuffle service of its host. */
      final case class LeftBlocks(host: String, port: Int, executor: String, blocks: Seq[String])

      /** The executors of which the driver's BlockManagerMaster knows: a message to it. */
      def executorsAlive(): Set[String] = SparkEnv.get.blockManager.master.getMemoryStatus.keySet.map(_.executorId).toSet

      /** Takes all outputs of a shuffle off the tracker, and leaves it registered; its executors may be idle. */
      def dropOutputs(sc: SparkContext, shuffle: Int, alive: => Set[String]): Seq[LeftBlocks] = tracker.shuffleStatuses.get(shuffle).toSeq.flatMap { status =>
        val manager = SparkEnv.get.blockManager
        val left = if (!manager.externalShuffleServiceEnabled) Nil else {
          val outputs = status.withMapStatuses(_.toSeq.filter(_ != null).map(s => s.location -> s.mapId))
          val gone = outputs.filterNot { case (location, _) => alive(location.executorId) }
          gone.groupMap(_._1)(_._2).toSeq.map { case (location, maps) =>
            LeftBlocks(location.host, location.port, location.executorId, maps.flatMap { map =>
              val checksum = s"${ShuffleChecksumBlockId(shuffle, map, 0).name}.${sc.conf.get(internal.config.SHUFFLE_CHECKSUM_ALGORITHM)}"
              Seq(ShuffleDataBlockId(shuffle, map, 0).name, ShuffleIndexBlockId(shuffle, map, 0).name, checksum)
            })
          }
        }
        tracker.unregisterAllMapAndMergeOutput(shuffle)
        sc.executorAllocationManager.foreach(_.executorMonitor.shuffleCleaned(shuffle))
        left
      }

      /** Has an external shuffle service delete these: network/shuffle/ExternalBlockStoreClient.java. Waits for it. */
      def deleteLeft(left: LeftBlocks, timeoutMs: Long): Unit = SparkEnv.get.blockManager.blockStoreClient match {
        case client: ExternalBlockStoreClient =>
          client.removeBlocks(left.host, left.port, left.executor, left.blocks.toArray)
            .get(timeoutMs, java.util.concurrent.TimeUnit.MILLISECONDS)
          ()
        case _ => ()
      }

      /** Whether a cached dataset can be released. A local checkpoint cannot: it has no lineage to be computed again from. */
      def mayUncache(sc: SparkContext, rdd: Int): Boolean = sc.persistentRdds.get(rdd).exists(!_.isCheckpointed)

      /** Releases a cached dataset, through SQL's cache when it is one of that. */
      def uncache(sc: SparkContext, rdd: Int): Unit = sc.persistentRdds.get(rdd).foreach { cached =>
        if (!StagecrewPlans.uncache(rdd)) cached.unpersist(blocking = true)
      }

      /** What a Dataset or a JavaRDD has stored: shuffles and cached datasets. */
      def stored(sc: SparkContext, dataset: AnyRef): (Set[Int], Set[Int]) = {
        val found = dataset match {
          case dataset: Dataset[_] => StagecrewPlans.stored(dataset)
          case rdd: JavaRDD[_] => StagecrewPlans.Found(rdds = Seq(rdd.rdd))
          case rdd: RDD[_] => StagecrewPlans.Found(rdds = Seq(rdd))
          case other => throw new IllegalArgumentException(s"a ${other.getClass.getName} is no dataset")
        }
        val seen = scala.collection.mutable.HashSet.empty[Int]
        val shuffles, caches = scala.collection.mutable.HashSet.empty[Int]
        shuffles ++= found.shuffles
        caches ++= found.caches
        def visit(pending: List[RDD[_]]): Unit = pending match {
          case Nil => ()
          case rdd :: rest =>
            val more = if (!seen.add(rdd.id)) Nil else {
              if (sc.persistentRdds.contains(rdd.id)) caches += rdd.id
              rdd.dependencies.toList.map { dependency =>
                dependency match { case shuffle: ShuffleDependency[_, _, _] => shuffles += shuffle.shuffleId; case _ => () }
                dependency.rdd
              }
            }
            visit(more ::: rest)
        }
        visit(found.rdds.toList)
        (shuffles.toSet, caches.toSet)
      }

      /** Executors that are busy with the end of a topology, for core/scheduler/dynalloc/ExecutorMonitor.scala, whose listener
        * thread this is: as if a task ran there. */
      def pin(sc: SparkContext, executor: String, begins: Boolean): Unit = sc.executorAllocationManager.foreach { manager =>
        val task = new TaskInfo(-1L, -1, 0, -1, System.currentTimeMillis(), executor, "", TaskLocality.ANY, false)
        if (begins) manager.executorMonitor.onTaskStart(SparkListenerTaskStart(-1, 0, task))
        else manager.executorMonitor.onTaskEnd(SparkListenerTaskEnd(-1, 0, "", org.apache.spark.Success, task, null, null))
      }

      // -- The driver: core/SparkContext.scala, core/scheduler/LiveListenerBus.scala, DAGScheduler.scala, sql's shared state

      def conf(sc: SparkContext): SparkConf = sc.conf

      def slots(sc: SparkContext): Int = sc.maxNumConcurrentTasks(sc.resourceProfileManager.defaultResourceProfile)

      /** To the queue of executor management, which always has a listener (HeartbeatReceiver.scala) and is quick: a queue
        * of our own would cost each task's start and end another hand-over between threads. */
      def addListener(sc: SparkContext, listener: SparkListener): Unit = sc.listenerBus.addToManagementQueue(listener)

      def activeJobs(sc: SparkContext, property: String): Map[Int, String] = StagecrewScheduler.activeJobs(sc, property)
      def jobOfStage(sc: SparkContext, stage: Int): Option[Int] = StagecrewScheduler.jobOfStage(sc, stage)
      def post(sc: SparkContext, event: SparkListenerEvent): Unit = sc.listenerBus.post(event)
      def executionRuns(id: Long): Boolean = StagecrewSql.executionRuns(id)
      def queryRuns(runId: String): Boolean = StagecrewSql.queryRuns(runId)
      def queryRun(id: String): Option[String] = StagecrewSql.queryRun(id)
      def queryName(runId: String): Option[String] = StagecrewSql.queryName(runId)
      def stopQuery(runId: String): Unit = StagecrewSql.stopQuery(runId)

      /** In local mode the master says it, not the configuration: core/scheduler/TaskSchedulerImpl.scala. */
      def maxTaskFailures(sc: SparkContext): Int = sc.taskScheduler match {
        case scheduler: TaskSchedulerImpl => scheduler.maxTaskFailures
        case _ => sc.conf.getInt("spark.task.maxFailures", 4)
      }

      // -- Processes: core/util/ShutdownHookManager.scala, core/api/python/PythonUtils.scala

      /** Runs a hook before Spark's own stops the SparkContext (priority 50) and before folders are deleted (25). The
        * driver's comes before that of core/executor/Executor.scala (100), which ends the executor's plugin: in a local
        * master the executor must still answer. */
      def addShutdownHook(driver: Boolean)(hook: () => Unit): AnyRef = {
        val priority =
          if (driver) ShutdownHookManager.DEFAULT_SHUTDOWN_PRIORITY + 10
          else ShutdownHookManager.SPARK_CONTEXT_SHUTDOWN_PRIORITY + 10
        ShutdownHookManager.addShutdownHook(priority)(hook)
      }

      def removeShutdownHook(hook: AnyRef): Unit = if (!ShutdownHookManager.inShutdown()) {
        ShutdownHookManager.removeShutdownHook(hook)
      }

      def pythonPath(paths: String*): String = PythonUtils.mergePythonPaths(PythonUtils.sparkPythonPath +: paths: _*)

      /** A folder of this JVM's own, removed when it ends: core/util/Utils.scala. */
      def temporaryFolder(conf: SparkConf): java.io.File = {
        val folder = util.Utils.createTempDir(util.Utils.getLocalDir(conf), "stagecrew")
        java.nio.file.Files.setPosixFilePermissions(
          folder.toPath, java.nio.file.attribute.PosixFilePermissions.fromString("rwx------"))
        folder
      }

      def delete(folder: java.io.File): Unit = util.Utils.deleteRecursively(folder)

      // -- The Spark UI: core/ui/{SparkUI,WebUI,UIUtils}.scala

      /** Adds a tab at this path; nothing when the application has no UI. */
      def attachTab(sc: SparkContext, prefix: String, pages: => Seq[Page]): Unit = sc.ui.foreach(attachTab(_, prefix, pages))

      def attachTab(ui: SparkUI, prefix: String, pages: Seq[Page]): Unit = ui.attachTab(new PagesTab(ui, prefix, pages))

      def hasUi(sc: SparkContext): Boolean = sc.ui.nonEmpty

      def eventLog(sc: SparkContext): Boolean = sc.conf.get(internal.config.EVENT_LOG_ENABLED)

      def keptInMemory[T](what: Class[T]): TypedStore[T] = new TypedStore(new InMemoryStore, what)

      /** Has these hear the events of a log, of the lines that are wanted: core/deploy/history/EventLogFileReaders.scala,
        * core/scheduler/ReplayListenerBus.scala. It may be cut off. */
      def replay(log: String, listeners: Seq[SparkListener], wanted: String => Boolean): Unit = {
        val path = new Path(log)
        val conf = new SparkConf
        val files = path.getFileSystem(deploy.SparkHadoopUtil.get.newConfiguration(conf))
        val reader = EventLogFileReader(files, path).getOrElse(throw new java.io.FileNotFoundException(
          s"$log is no event log: it has to be a file of spark.eventLog.dir, or the folder of a rolling log (eventlog_v2_...)"))
        val bus = new ReplayListenerBus
        listeners.foreach(bus.addListener(_))
        reader.listEventLogFiles.foreach { file =>
          util.Utils.tryWithResource(EventLogFileReader.openEventLog(file.getPath, files)) { in =>
            bus.replay(in, file.getPath.toString, maybeTruncated = true, eventsFilter = wanted)
          }
        }
      }

      def formatDate(ms: Long): String = UIUtils.formatDate(ms)
      def formatDuration(ms: Long): String = UIUtils.formatDuration(ms)
      def formatBytes(bytes: Long): String = util.Utils.bytesToString(bytes)

      def redactionPattern(conf: SparkConf): scala.util.matching.Regex = conf.get(internal.config.SECRET_REDACTION_PATTERN)
    }
  }
}
