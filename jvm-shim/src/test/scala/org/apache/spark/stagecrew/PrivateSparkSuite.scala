package org.apache.spark.stagecrew

import java.nio.file.{Files, Path}
import java.util.jar.JarFile

import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.reflect.NameTransformer
import scala.reflect.runtime.{universe => ru}
import scala.util.Using

import org.apache.xbean.asm9.{ClassReader, ClassVisitor, MethodVisitor, Opcodes}
import org.scalatest.funsuite.AnyFunSuite

/**
 * Only the folder `spark` uses code that is private to Spark: `SparkInternals` and the files beside it, and one file for
 * each version of Spark.
 */
final class PrivateSparkSuite extends AnyFunSuite {
  import PrivateSparkSuite._

  test("only the folder spark uses classes, methods and fields that are private to Spark") {
    assert(allowed("SparkInternals.scala") && allowed("SparkVersion.scala"))
    assert(allowed.intersect(others) === Set(), "a class file has only the name of its source, without the folder")
    val found = for (use <- uses if !allowed(use.file) && isPrivate(use)) yield s"${use.file}: ${use.owner} ${use.name}"
    assert(found.toSeq.sorted === Nil)
  }

  test("the check recognizes private classes, methods and constructors") {
    assert(isPrivate(Use("A.scala", "org/apache/spark/SparkEnv", "blockManager")) === false)
    assert(isPrivate(Use("A.scala", "org/apache/spark/SparkContext", "schedulerBackend")))
    assert(isPrivate(Use("A.scala", "org/apache/spark/rpc/RpcEndpointRef", "send")))
    assert(isPrivate(Use("A.scala", "org/apache/spark/util/Utils$", "tryLogNonFatalError")))
    assert(isPrivate(Use("A.scala", "org/apache/spark/SparkContext", "defaultParallelism")) === false)
    assert(uses.exists(use => use.file == "SparkInternals.scala" && isPrivate(use)))
  }
}

object PrivateSparkSuite {

  /** A file of our sources uses a member of a class of Spark. The name is empty if it uses the class itself. */
  private final case class Use(file: String, owner: String, name: String)

  /** The names of the files in the folder `spark`, which may use private code, and of the other files. */
  private val (allowed: Set[String], others: Set[String]) = {
    val main = Path.of("src", "main")  // the tests run in the folder jvm-shim
    val files = Using.resource(Files.walk(main))(_.iterator.asScala.filter(Files.isRegularFile(_)).toSeq)
    val (inside, outside) = files.partition(_.getParent.endsWith("org/apache/spark/stagecrew/spark"))
    (inside.map(_.getFileName.toString).toSet, outside.map(_.getFileName.toString).toSet)
  }

  /** The uses of Spark in the classes of the jar. */
  private lazy val uses: Set[Use] = {
    val found = mutable.Set[Use]()
    val location = classOf[_root_.stagecrew.StagecrewPlugin].getProtectionDomain.getCodeSource.getLocation
    Using.resource(new JarFile(location.getPath)) { jar =>
      val classes = jar.entries.asScala.filter(_.getName.endsWith(".class")).toSeq
      val ours = classes.map(_.getName.stripSuffix(".class")).toSet
      for (entry <- classes)
        Using.resource(jar.getInputStream(entry))(new ClassReader(_).accept(new Collector(ours, found), 0))
    }
    found.toSet
  }

  private final class Collector(ours: Set[String], found: mutable.Set[Use]) extends ClassVisitor(Opcodes.ASM9) {
    private var file = ""
    private var parents = Seq[String]()

    private def add(owner: String, name: String): Unit =
      if (owner.startsWith("org/apache/spark/") && !ours(owner)) found += Use(file, owner, name)

    override def visit(
        version: Int, access: Int, name: String, signature: String, parent: String, interfaces: Array[String]): Unit =
      parents = parent +: interfaces.toSeq

    override def visitSource(source: String, debug: String): Unit = {
      file = source
      parents.foreach(add(_, ""))
    }

    override def visitMethod(
        access: Int, name: String, descriptor: String, signature: String, exceptions: Array[String]): MethodVisitor =
      new MethodVisitor(Opcodes.ASM9) {
        override def visitMethodInsn(
            code: Int, owner: String, name: String, descriptor: String, isInterface: Boolean): Unit = add(owner, name)
        override def visitFieldInsn(code: Int, owner: String, name: String, descriptor: String): Unit = add(owner, name)
        override def visitTypeInsn(code: Int, name: String): Unit = add(name, "")
      }
  }

  private val mirror = ru.runtimeMirror(getClass.getClassLoader)

  private def isPrivate(use: Use): Boolean = {
    val owner = mirror.classSymbol(Class.forName(use.owner.replace('/', '.'), false, getClass.getClassLoader))
    Iterator.iterate[ru.Symbol](owner)(_.owner).takeWhile(_ != ru.NoSymbol).exists(isRestricted) || {
      val name =
        if (use.name == "<init>") ru.termNames.CONSTRUCTOR else ru.TermName(NameTransformer.decode(use.name))
      val members = if (use.name.isEmpty) Nil else owner.toType.member(name).alternatives
      members.nonEmpty && members.forall(isRestricted)
    }
  }

  private def isRestricted(symbol: ru.Symbol): Boolean =
    !symbol.isJava && (symbol.isPrivate || symbol.privateWithin != ru.NoSymbol)
}
