package org.apache.spark.stagecrew

import java.net.URLClassLoader
import java.nio.file.{Files, Path}
import java.util.jar.{Attributes, JarEntry, JarOutputStream, Manifest}
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.spark.{JarCheck, SparkVersion}

class JarCheckSuite extends AnyFunSuite {
  private def refusal(check: => Unit): String = intercept[IllegalStateException](check).getMessage

  /** Creates a jar of stagecrew with this version of stagecrew and of Spark. */
  private def jar(version: String, spark: String): Path = {
    val manifest = new Manifest
    manifest.getMainAttributes.put(Attributes.Name.MANIFEST_VERSION, "1.0")
    manifest.getMainAttributes.put(Attributes.Name.IMPLEMENTATION_VERSION, version)
    manifest.getMainAttributes.putValue("Spark-Version", spark)
    val path = Files.createTempFile("stagecrew", ".jar")
    path.toFile.deleteOnExit()
    val out = new JarOutputStream(Files.newOutputStream(path), manifest)
    try out.putNextEntry(new JarEntry("stagecrew/StagecrewPlugin.class")) finally out.close()
    path
  }

  private def load(jars: Path*): Unit = {
    val loader = new URLClassLoader(jars.map(_.toUri.toURL).toArray, null)
    try JarCheck.checkJars(loader) finally loader.close()
  }

  test("another Spark version is refused, and both versions are named") {
    JarCheck.checkSpark(s"${SparkVersion.Line}.0")
    Seq("3.5.9", s"${SparkVersion.Line}0.0", "5.0.0").foreach { version =>
      val message = refusal(JarCheck.checkSpark(version))
      assert(message.contains(s"Spark $version") && message.contains(s"Spark ${SparkVersion.Line},"))
    }
  }

  test("two different jars are refused, and copies of one jar are not") {
    load(jar("1", "4.3"))
    load(jar("1", "4.3"), jar("1", "4.3"))
    Seq("1" -> "4.2", "2" -> "4.3").foreach { case (version, spark) =>
      val (one, other) = (jar("1", "4.3"), jar(version, spark))
      val message = refusal(load(one, other))
      assert(message.contains(one.toString) && message.contains(other.toString))
    }
  }

  test("the jar of these tests is accepted by this Spark") {
    JarCheck.check(getClass.getClassLoader)
  }
}
