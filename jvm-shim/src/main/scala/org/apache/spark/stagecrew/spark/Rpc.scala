package org.apache.spark.stagecrew
package spark

import scala.concurrent.ExecutionContext
import scala.concurrent.duration._
import scala.reflect.ClassTag
import scala.util.{Failure, Success}
import org.apache.spark.{SparkConf, SparkEnv, SparkException}
import org.apache.spark.internal.config
import org.apache.spark.rpc._
import org.apache.spark.util.RpcUtils

// Spark's RPC: core/rpc/{RpcEnv,RpcEndpoint,RpcEndpointRef}.scala, core/util/RpcUtils.scala. A message is a byte array,
// or a pair of the sender's endpoint and a byte array. Classes of the shim in messages would kill executors that got
// the jar from spark.jars.

/** The other side of an RPC connection. */
private[stagecrew] final class Peer(val ref: RpcEndpointRef) {
  /** Sends a message. `done` is called with the reply or the error, on another thread. */
  def ask(message: Any, timeoutMs: Long)(done: Either[Throwable, Array[Byte]] => Unit): Unit =
    try ref.ask[Array[Byte]](message, timeout(timeoutMs))(ClassTag(classOf[Array[Byte]])).onComplete {
      case Success(reply) => done(Right(reply))
      case Failure(error) => done(Left(error))
    }(ExecutionContext.parasitic)
      catch { case error: Exception => done(Left(error)) } // a stopped RpcEnv throws immediately

  def askSync(message: Any, timeoutMs: Long): Array[Byte] =
    ref.askSync[Array[Byte]](message, timeout(timeoutMs))(ClassTag(classOf[Array[Byte]]))

  def send(message: Any): Unit = ref.send(message)

  private def timeout(ms: Long) = new RpcTimeout(ms.millis, "stagecrew")
}

/** Sends the reply to a message, once. Any thread. */
private[stagecrew] trait Reply {
  def send(bytes: Array[Byte]): Unit
  def fail(error: Throwable): Unit
}

/** Handles the messages to an endpoint. Called on RPC threads, so it should return quickly: handlers enqueue work, or
  * write it to the link of a Python process. */
private[stagecrew] trait Handler {
  /** Handles a message. `from` is the sender's endpoint if the message contains it, and `address` its address. */
  def receive(message: Array[Byte], from: Option[Peer], address: String, reply: Reply): Unit
  def disconnected(address: String): Unit = ()
}

private[stagecrew] object Rpc {
  def endpoint(name: String, handler: Handler): Peer = {
    val env = SparkEnv.get.rpcEnv
    new Peer(env.setupEndpoint(name, new ThreadSafeRpcEndpoint {
      override val rpcEnv: RpcEnv = env

      override def receive: PartialFunction[Any, Unit] = { case message => dispatch(message, "", new Reply {
        def send(bytes: Array[Byte]): Unit = ()
        def fail(error: Throwable): Unit = ()
      }) }

      override def receiveAndReply(context: RpcCallContext): PartialFunction[Any, Unit] = { case message =>
        dispatch(message, String.valueOf(context.senderAddress), new Reply {
          def send(bytes: Array[Byte]): Unit = context.reply(bytes)
          def fail(error: Throwable): Unit = context.sendFailure(error)
        })
      }

      override def onDisconnected(address: RpcAddress): Unit = handler.disconnected(String.valueOf(address))

      private def dispatch(message: Any, address: String, reply: Reply): Unit = message match {
        case (from: RpcEndpointRef, bytes: Array[Byte]) => handler.receive(bytes, Some(new Peer(from)), address, reply)
        case bytes: Array[Byte] => handler.receive(bytes, None, address, reply)
        case other => reply.fail(new SparkException(s"a ${other.getClass.getName} is not a message of stagecrew"))
      }
    }))
  }

  def stopEndpoint(peer: Peer): Unit = Option(SparkEnv.get).foreach(_.rpcEnv.stop(peer.ref))

  def driver(name: String): Peer = new Peer(RpcUtils.makeDriverRef(name, SparkEnv.get.conf, SparkEnv.get.rpcEnv))

  /** The address of the driver, found as in core/util/RpcUtils.scala. */
  def driverAddress(conf: SparkConf): String = String.valueOf(RpcAddress(
    conf.get(config.DRIVER_HOST_ADDRESS.key, "localhost"), conf.getInt(config.DRIVER_PORT.key, 7077)))

  def withSender(sender: Peer, bytes: Array[Byte]): Any = (sender.ref, bytes)
}
