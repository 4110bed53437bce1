package org.apache.spark.stagecrew

import org.apache.spark.SparkConf
import org.scalatest.funsuite.AnyFunSuite
import scala.collection.immutable.VectorMap
import scala.jdk.CollectionConverters._
import org.apache.spark.stagecrew.driver.DriverShim
import org.apache.spark.stagecrew.wire.{Description, Entry, Frames}

class SettingsSuite extends AnyFunSuite {
  private def conf(values: (String, String)*): SparkConf = new SparkConf(false).setAll(values)

  test("every key has a valid default") {
    val settings = new Settings(conf())
    assert(settings.listeners.isEmpty && settings.jvmListeners.isEmpty)
    assert(settings.openTimeoutMs == 60000 && settings.closeTimeoutMs == 10000 && settings.shutdownTimeoutMs == 5000)
    assert(settings.channelTimeoutMs == 10000 && settings.reportIntervalMs == 1000)
    assert(settings.maxFrame == 64 * 1024 * 1024 && settings.retainedTopologies == 1000)
    assert(Settings.allDefaults.keySet.asScala.forall(_.startsWith(Settings.Prefix)))
    val explicit = new Settings(conf(Settings.allDefaults.asScala.toSeq: _*))
    assert(explicit.openTimeoutMs == settings.openTimeoutMs && explicit.maxFrame == settings.maxFrame)
  }

  test("times and sizes may have units, and lists may have spaces and empty entries") {
    val settings = new Settings(conf(Settings.OpenTimeout -> "1500ms", Settings.CloseTimeout -> "2min",
      Settings.MaxFrame -> "1k", Settings.Listeners -> " a:b , ,c:d,", Settings.JvmListeners -> "x.Y"))
    assert(settings.openTimeoutMs == 1500 && settings.closeTimeoutMs == 120000 && settings.maxFrame == 1024)
    assert(settings.listeners == Seq("a:b", "c:d") && settings.jvmListeners == Seq("x.Y"))
  }

  test("a frame is never larger than an array can be") {
    assert(new Settings(conf(Settings.MaxFrame -> "5g")).maxFrame == Int.MaxValue - 16)
  }

  test("an invalid value is refused") {
    intercept[NumberFormatException](new Settings(conf(Settings.OpenTimeout -> "soon")))
    intercept[NumberFormatException](new Settings(conf(Settings.RetainedTopologies -> "many")))
  }

  test("times and numbers that are not positive are refused, and the message contains the default") {
    Seq(Settings.OpenTimeout, Settings.CloseTimeout, Settings.ShutdownTimeout, Settings.ChannelTimeout,
      Settings.ReportInterval, Settings.MaxFrame, Settings.MailboxBytes,
      Settings.RetainedTopologies).foreach { key =>
      val refused = intercept[IllegalArgumentException](new Settings(conf(key -> "0")))
      assert(refused.getMessage.startsWith(s"$key=0") && refused.getMessage.contains(Settings.allDefaults.get(key)))
    }
  }

  test("unknown keys with our prefix are found") {
    val user = conf(Settings.OpenTimeout -> "1s", "spark.stagecrew.open.timeoutt" -> "1s", "spark.other" -> "x")
    assert(Settings.unknown(user) == Seq("spark.stagecrew.open.timeoutt"))
  }

  test("Spark settings that cannot work are refused, and the message names the setting") {
    Seq(DriverShim.DaemonModuleKey -> "mine.daemon", "spark.python.use.daemon" -> "false",
      "spark.sql.execution.udf.unified.execution.enabled" -> "true").foreach { case (key, value) =>
      val refused = intercept[IllegalArgumentException](DriverShim.configure(conf(key -> value)))
      assert(refused.getMessage.contains(key))
    }
  }

  test("the plugin sets the daemon module, does not change the user's PYTHONPATH, and can configure twice") {
    val user = conf("spark.executorEnv.PYTHONPATH" -> "mine")
    DriverShim.configure(user)
    assert(user.get(DriverShim.DaemonModuleKey) == DriverShim.DaemonModule)
    assert(user.get("spark.executorEnv.PYTHONPATH") == "mine")
    DriverShim.configure(user)
    val none = conf()
    DriverShim.configure(none)
    assert(!none.contains("spark.executorEnv.PYTHONPATH")) // it would replace the executors' own PYTHONPATH
  }

  test("the application topology has the listeners of the configuration, JVM listeners first") {
    val user = conf(Settings.Listeners -> "pools:orders", Settings.JvmListeners -> "a.b.Mdc",
      "spark.pyspark.python" -> "python9", "spark.executorEnv.X" -> "y")
    val description = DriverShim.application(user, new Settings(user))
    assert(description.listeners.map(l => (l.index, l.kind, l.name, l.target)) ==
      Vector((0, "jvm", "Mdc", "a.b.Mdc"), (1, "name", "orders", "pools:orders")))
    assert((description.executable, description.environment, description.files) == (("python9", Map("X" -> "y"), Nil)))
  }

  test("an executor receives the same description, with the pickled bytes") {
    val blob = Array.tabulate(256)(_.toByte)
    val entries = Vector(
      Entry(0, "jvm", "Mdc", "a.b.Mdc", Some("jvm"), Some("application"), required = true, None),
      Entry(1, "pickle", "pool \"<\u20ac", "", Some("worker"), Some("execution"), required = false, Some(0)),
      Entry(2, "name", "orders", "pools:orders", None, None, required = true, None))
    val sent = Description("id", "name", Some("parent"), entries, "python3", VectorMap("A" -> "b"),
      Vector("x.zip"))(Vector(blob))
    val frame = Frames.encode("DESCRIPTION", "id", sent.body, sent.blobs)
    assert(!sent.body.contains("AAEC"))
    val got = Description.decode(Frames.decodeMessage(frame))
    assert(got == sent && got.blobs.map(_.toSeq) == Vector(blob.toSeq))
    val both = sent.and(got)
    assert(both.listeners.map(_.index) == (0 to 5) && both.listeners.flatMap(_.blob) == Vector(0, 1) &&
      both.blobs.size == 2)
  }
}
