// Tests the jar that build/jar.py has built, with the jars of the PySpark that is installed in the project's environment.
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

// The jar that build/jar.py has built for this version of Spark.
val stagecrewJar: File = {
  val Core = """spark-core_.+-(\d+\.\d+)\..+\.jar""".r
  val line = pysparkJars.map(_.getName).collectFirst { case Core(line) => line }
    .getOrElse(sys.error(s"no spark-core jar in $pysparkHome/jars"))
  (file("python/stagecrew/jars").getAbsoluteFile * s"stagecrew-spark-${line}_*.jar").get().headOption
    .getOrElse(sys.error(s"there is no jar for Spark $line; `make jar` builds it"))
}

// HDFS and YARN for the tests, in the version of PySpark's Hadoop client, because both run together.
val Hadoop = config("hadoop").hide
val hadoopJars = taskKey[File]("The folder in build/hadoop with the jars of this version of Hadoop's mini clusters.")
val hadoopVersion: String = {
  val Client = """hadoop-client-api-(.+)\.jar""".r
  pysparkJars.map(_.getName).collectFirst { case Client(version) => version }
    .getOrElse(sys.error(s"no hadoop-client-api jar in $pysparkHome/jars"))
}

lazy val shim = (project in file("jvm-shim"))
  .settings(
    name := "stagecrew",
    organization := "io.stagecrew",
    scalaVersion := pysparkScalaVersion,
    scalaModuleInfo := scalaModuleInfo.value.map(_.withOverrideScalaVersion(true)),
    autoScalaLibrary := false,
    Compile / sources := Nil,
    Compile / resources := Nil,
    Test / unmanagedJars := (stagecrewJar +: pysparkJars).classpath,
    libraryDependencies += "org.scalatest" %% "scalatest" % "3.2.19" % Test,
    ivyConfigurations += Hadoop,
    libraryDependencies ++= Seq(
      ("org.apache.hadoop" % "hadoop-client-minicluster" % hadoopVersion % Hadoop).intransitive(),
      // The mini cluster of YARN uses these, and does not declare them: JUnit 4 and JAXB before Hadoop 3.5.
      "junit" % "junit" % "4.13.2" % Hadoop,
      "com.sun.xml.bind" % "jaxb-impl" % "2.3.3" % Hadoop,
      "javax.xml.bind" % "jaxb-api" % "2.3.1" % Hadoop,
      "org.junit.jupiter" % "junit-jupiter-api" % "5.10.2" % Hadoop,
      "org.bouncycastle" % "bcpkix-jdk18on" % "1.78.1" % Hadoop),
    hadoopJars := {
      val target = (ThisBuild / baseDirectory).value / "build" / "hadoop" / hadoopVersion
      for (jar <- update.value.select(configurationFilter(Hadoop.name)))
        if (jar.length != (target / jar.getName).length) IO.copyFile(jar, target / jar.getName)
      target
    },
    dependencyOverrides += "org.scala-lang" % "scala-library" % pysparkScalaVersion,
    scalacOptions ++= Seq(
      "-release:17", "-deprecation", "-feature", "-unchecked", "-Xlint", "-Wunused", "-Wdead-code", "-Werror"),
    Test / fork := true,
    Test / javaOptions ++= Seq(
      "java.lang", "java.lang.invoke", "java.net", "java.nio", "java.util", "java.util.concurrent",
      "java.util.concurrent.atomic"
    ).map(p => s"--add-opens=java.base/$p=ALL-UNNAMED") ++ Seq(
      "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED", "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
      "-Xmx1g", "-Dlog4j.configurationFile=log4j2-test.properties"),
    Test / testOptions += Tests.Argument(TestFrameworks.ScalaTest, "-oDF"))

lazy val root = (project in file(".")).aggregate(shim).settings(publish / skip := true)
