package org.apache.spark.stagecrew

import java.util.jar.JarFile

import scala.collection.mutable
import scala.jdk.CollectionConverters._
import scala.reflect.NameTransformer
import scala.reflect.runtime.{universe => ru}
import scala.util.Using

import org.apache.xbean.asm9.{ClassReader, ClassVisitor, MethodVisitor, Opcodes}
import org.scalatest.funsuite.AnyFunSuite

/** Only the package `spark` uses code that is private to Spark: `SparkInternals`, and one file for each version. */
final class PrivateSparkSuite extends AnyFunSuite {
  import PrivateSparkSuite._

  test("only the package spark uses classes, methods and fields that are private to Spark") {
    val found = for (use <- uses if !isAllowed(use.user) && isPrivate(use)) yield use.toString
    assert(found.toSeq.sorted === Nil)
  }

  test("the check recognizes private classes, methods and constructors") {
    assert(isPrivate(Use("x", "org/apache/spark/SparkEnv", "blockManager")) === false)
    assert(isPrivate(Use("x", "org/apache/spark/SparkContext", "schedulerBackend")))
    assert(isPrivate(Use("x", "org/apache/spark/rpc/RpcEndpointRef", "send")))
    assert(isPrivate(Use("x", "org/apache/spark/util/Utils$", "tryLogNonFatalError")))
    assert(isPrivate(Use("x", "org/apache/spark/SparkContext", "defaultParallelism")) === false)
    assert(uses.exists(use => isAllowed(use.user) && isPrivate(use)))
  }
}

object PrivateSparkSuite {

  /** A class uses a member of a class of Spark. The name is empty if it uses the class itself. */
  private final case class Use(user: String, owner: String, name: String)

  private val Ours = "org/apache/spark/stagecrew/"

  private def isAllowed(user: String): Boolean = user.startsWith(s"${Ours}spark/")

  /** What the classes of the jar use of Spark. */
  private lazy val uses: Set[Use] = {
    val found = mutable.Set[Use]()
    Using.resource(new JarFile(classOf[Shim].getProtectionDomain.getCodeSource.getLocation.getPath)) { jar =>
      for (entry <- jar.entries.asScala if entry.getName.endsWith(".class"))
        Using.resource(jar.getInputStream(entry)) { bytes =>
          new ClassReader(bytes).accept(new Collector(found), ClassReader.SKIP_DEBUG)
        }
    }
    found.toSet
  }

  private final class Collector(found: mutable.Set[Use]) extends ClassVisitor(Opcodes.ASM9) {
    private var user = ""

    private def add(owner: String, name: String): Unit =
      if (owner.startsWith("org/apache/spark/") && !owner.startsWith(Ours)) found += Use(user, owner, name)

    override def visit(
        version: Int, access: Int, name: String, signature: String, parent: String, interfaces: Array[String]): Unit = {
      user = name
      (parent +: interfaces.toSeq).foreach(add(_, ""))
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
