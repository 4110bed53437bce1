package org.apache.spark.stagecrew.spark;

import java.io.IOException;
import java.net.JarURLConnection;
import java.net.URL;
import java.net.URLConnection;
import java.util.Collections;
import java.util.Map;
import java.util.TreeMap;
import java.util.jar.Attributes;

/**
 * Refuses a jar that was built for another minor version of Spark, and different jars at the same time.
 *
 * <p>This is Java, because Spark 3.5 may run with Scala 2.12, which cannot load the Scala classes of the jar.
 */
public final class JarCheck {
  private JarCheck() {}

  /** Throws an {@link IllegalStateException} if the plugin must not start. */
  public static void check(ClassLoader loader) {
    checkSpark(org.apache.spark.package$.MODULE$.SPARK_VERSION());
    checkJars(loader);
  }

  /** Checks the version of the running Spark. */
  public static void checkSpark(String running) {
    String line = SparkVersion.Line();
    if (!running.startsWith(line + ".")) {
      throw new IllegalStateException(
          "this jar of stagecrew is built for Spark " + line + ", but this is Spark " + running
              + ". `stagecrew jar` prints the path of the jar for the installed Spark");
    }
  }

  /** Checks that all jars of stagecrew that can be loaded are copies of one jar. */
  public static void checkJars(ClassLoader loader) {
    Map<String, URL> jars = new TreeMap<>();
    try {
      for (URL url : Collections.list(loader.getResources("stagecrew/StagecrewPlugin.class"))) {
        URLConnection connection = url.openConnection();
        if (connection instanceof JarURLConnection jar) {
          jar.setUseCaches(false);
          try (var file = jar.getJarFile()) {
            Attributes attributes = file.getManifest().getMainAttributes();
            String version = attributes.getValue("Implementation-Version");
            jars.put(version + " for Spark " + attributes.getValue("Spark-Version"), jar.getJarFileURL());
          }
        }
      }
    } catch (IOException error) {
      throw new IllegalStateException("stagecrew cannot read its jars: " + error.getMessage(), error);
    }
    if (jars.size() > 1) {
      throw new IllegalStateException(
          "two different jars of stagecrew are loaded, but only one can be used: " + jars
              + ". Remove all but one from spark.jars, --jars and the class paths");
    }
  }
}
