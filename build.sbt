// The shim is compiled and tested against the jars of the PySpark that is installed in the project's environment.
// So the installed PySpark alone determines the Spark version and the Scala version.

val pysparkHome: File = {
  val given = sys.env.get("STAGECREW_PYSPARK_HOME").map(file)
  given.filter(home => (home / "jars").isDirectory).getOrElse(
    sys.error(
      "STAGECREW_PYSPARK_HOME must be the folder of an installed PySpark, which contains jars/. " +
        "Run `make jar` or `build/sbt`: both find it in .venv."))
}

val pysparkJars: Seq[File] = (pysparkHome / "jars" ** "*.jar").get().sortBy(_.getName)

val pysparkScalaVersion: String = {
  val Library = """scala-library-(.+)\.jar""".r
  pysparkJars.map(_.getName).collectFirst { case Library(version) => version }
    .getOrElse(sys.error(s"no scala-library jar in $pysparkHome/jars"))
}

// The Spark version as major.minor. It selects the compatibility file in src/main/scala-<version>.
val sparkLine: String = {
  val Core = """spark-core_.+-(\d+\.\d+)\..+\.jar""".r
  pysparkJars.map(_.getName).collectFirst { case Core(line) => line }
    .getOrElse(sys.error(s"no spark-core jar in $pysparkHome/jars"))
}

// An HDFS for the tests of sinks, in the version of PySpark's Hadoop client, because both run together.
val Hdfs = config("hdfs").hide
val hdfsJar = taskKey[File]("The jar of Hadoop's mini cluster, in build/hdfs.jar.")
val hadoopVersion: String = {
  val Client = """hadoop-client-api-(.+)\.jar""".r
  pysparkJars.map(_.getName).collectFirst { case Client(version) => version }
    .getOrElse(sys.error(s"no hadoop-client-api jar in $pysparkHome/jars"))
}

// The wheel and the jar share one version, from python/stagecrew/_version.py.
val stagecrewVersion: String = {
  val Line = """__version__ = "(.+)"""".r
  IO.readLines(file("python/stagecrew/_version.py")).collectFirst { case Line(version) => version }
    .getOrElse(sys.error("python/stagecrew/_version.py contains no __version__"))
}

lazy val shim = (project in file("jvm-shim"))
  .settings(
    name := "stagecrew",
    organization := "io.stagecrew",
    version := stagecrewVersion,
    scalaVersion := pysparkScalaVersion,
    scalaModuleInfo := scalaModuleInfo.value.map(_.withOverrideScalaVersion(true)),
    autoScalaLibrary := false,
    target := baseDirectory.value / "target" / sparkLine,
    Compile / unmanagedSourceDirectories += baseDirectory.value / "src" / "main" / s"scala-$sparkLine",
    Compile / unmanagedJars := pysparkJars.classpath,
    Test / unmanagedJars := pysparkJars.classpath,
    libraryDependencies += "org.scalatest" %% "scalatest" % "3.2.19" % Test,
    ivyConfigurations += Hdfs,
    libraryDependencies += ("org.apache.hadoop" % "hadoop-client-minicluster" % hadoopVersion % Hdfs).intransitive(),
    hdfsJar := {
      val target = (ThisBuild / baseDirectory).value / "build" / "hdfs.jar"
      update.value.select(configurationFilter(Hdfs.name)).filter(_.length != target.length)
        .foreach(IO.copyFile(_, target))
      target
    },
    dependencyOverrides += "org.scala-lang" % "scala-library" % pysparkScalaVersion,
    scalacOptions ++= Seq(
      "-release:17", "-deprecation", "-feature", "-unchecked", "-Xlint", "-Wunused", "-Wdead-code", "-Werror"),
    javacOptions ++= Seq("--release", "17", "-Xlint:all", "-Werror"),
    Compile / doc / sources := Nil,
    // The jar contains the Python package, so that executors need only PySpark.
    Compile / packageBin / mappings ++= {
      val root = (ThisBuild / baseDirectory).value / "python"
      (root / "stagecrew" ** "*.py").get().map(source => source -> IO.relativize(root, source).get)
    },
    Compile / packageBin / packageOptions += Package.ManifestAttributes(
      "Implementation-Version" -> stagecrewVersion, "Spark-Version" -> sparkLine),
    Compile / packageBin / artifactPath := (ThisBuild / baseDirectory).value / "python" / "stagecrew" / "jars" /
      s"stagecrew-spark-${sparkLine}_${scalaBinaryVersion.value}-$stagecrewVersion.jar",
    Test / fork := true,
    Test / javaOptions ++= Seq(
      "java.lang", "java.lang.invoke", "java.net", "java.nio", "java.util", "java.util.concurrent",
      "java.util.concurrent.atomic"
    ).map(p => s"--add-opens=java.base/$p=ALL-UNNAMED") ++ Seq(
      "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
      "-Xmx1g", "-Dlog4j.configurationFile=log4j2-test.properties"),
    Test / testOptions += Tests.Argument(TestFrameworks.ScalaTest, "-oDF"))

lazy val root = (project in file(".")).aggregate(shim).settings(publish / skip := true)
