package org.apache.spark.stagecrew
package partitions

import java.io.File
import java.util.{Collections, HashMap => JHashMap, Map => JMap, Optional}
import org.apache.spark.SparkConf
import org.apache.spark.shuffle.api._
import org.apache.spark.shuffle.api.metadata.MapOutputCommitMessage
import spark._

/**
 * Wraps the configured ShuffleDataIO (the delegate), and records its outputs in this executor's `Partitions`. Data is
 * not copied, because the delegate writes it. Outputs are not recorded if the delegate stores them outside the
 * executors' disks, or if the shuffle manager is not Spark's own.
 */
final class TrackedShuffleDataIO(conf: SparkConf) extends ShuffleDataIO {
  import TrackedShuffleDataIO._

  private val delegate: ShuffleDataIO = SparkInternals.shuffleDataIO(conf.get(DelegateKey, LocalDisk), conf)

  override def executor(): ShuffleExecutorComponents =
    new TrackedExecutor(delegate.executor(), SparkInternals.sortsShuffles(conf))

  override def driver(): ShuffleDriverComponents = new TrackedDriver(delegate.driver())
}

object TrackedShuffleDataIO {
  val Key = "spark.shuffle.sort.io.plugin.class"
  val DelegateKey = "spark.stagecrew.shuffle.delegate"
  val LocalDisk = "org.apache.spark.shuffle.sort.io.LocalDiskShuffleDataIO"
  private val ElsewhereKey = "stagecrew.elsewhere"

  private final class TrackedDriver(delegate: ShuffleDriverComponents) extends ShuffleDriverComponents {
    override def initializeApplication(): JMap[String, String] = {
      val config = new JHashMap[String, String](
        Option(delegate.initializeApplication()).getOrElse(Collections.emptyMap()))
      if (delegate.supportsReliableStorage) {
        config.put(ElsewhereKey, "true")
        Log.log.info("the configured ShuffleDataIO stores shuffles outside the executors: they are not tracked")
      }
      config
    }
    override def cleanupApplication(): Unit = delegate.cleanupApplication()
    override def registerShuffle(shuffle: Int): Unit = delegate.registerShuffle(shuffle)
    override def removeShuffle(shuffle: Int, blocking: Boolean): Unit = delegate.removeShuffle(shuffle, blocking)
    override def supportsReliableStorage(): Boolean = delegate.supportsReliableStorage()
  }

  private final class TrackedExecutor(delegate: ShuffleExecutorComponents, usesSparkManager: Boolean)
    extends ShuffleExecutorComponents {
    private var isTracked = usesSparkManager

    override def initializeExecutor(application: String, executor: String, config: JMap[String, String]): Unit = {
      isTracked = usesSparkManager && !"true".equals(config.get(ElsewhereKey))
      delegate.initializeExecutor(application, executor, config)
    }

    override def createMapOutputWriter(shuffle: Int, map: Long, partitions: Int): ShuffleMapOutputWriter =
      tracked(shuffle, map) match {
        case None => delegate.createMapOutputWriter(shuffle, map, partitions)
        case Some(output) =>
          val writer = output.reportingFailure(delegate.createMapOutputWriter(shuffle, map, partitions))
          new ShuffleMapOutputWriter {
            override def getPartitionWriter(partition: Int): ShufflePartitionWriter =
              writer.getPartitionWriter(partition)
            override def commitAllPartitions(checksums: Array[Long]): MapOutputCommitMessage = {
              val message = writer.commitAllPartitions(checksums)
              output.finished(message.getPartitionLengths)
              message
            }
            override def abort(error: Throwable): Unit = try writer.abort(error) finally output.failed()
          }
      }

    override def createSingleFileMapOutputWriter(
      shuffle: Int, map: Long): Optional[SingleSpillShuffleMapOutputWriter] = {
      val writer = delegate.createSingleFileMapOutputWriter(shuffle, map)
      if (!writer.isPresent) writer
      else tracked(shuffle, map) match {
        case None => writer
        case Some(output) => Optional.of(new SingleSpillShuffleMapOutputWriter {
          override def transferMapSpillFile(file: File, lengths: Array[Long], checksums: Array[Long]): Unit = {
            output.reportingFailure(writer.get.transferMapSpillFile(file, lengths, checksums))
            output.finished(lengths)
          }
        })
      }
    }

    private def tracked(shuffle: Int, map: Long): Option[Partitions#OutputInProgress] =
      Partitions.here.filter(_ => isTracked).flatMap(_.setUp(Output(shuffle, map)))
  }
}
