package org.apache.spark.stagecrew

import java.io.File
import java.util.concurrent.ConcurrentHashMap
import driver._

/** The version and the location of this jar, and the running drivers, which Python looks up. */
object Shim {
  /** The version of this jar and of the Python package in it. */
  val version: String = {
    val in = getClass.getClassLoader.getResourceAsStream("stagecrew/_version.py")
    def text = new String(in.readAllBytes(), "UTF-8")
    if (in == null) "unknown"
    else try """__version__ = "(.+)"""".r.findFirstMatchIn(text).fold("unknown")(_.group(1)) finally in.close()
  }

  /** The path of this jar on this host. */
  def jar: String = new File(getClass.getProtectionDomain.getCodeSource.getLocation.toURI).getAbsolutePath

  private val drivers = new ConcurrentHashMap[String, DriverFacade]()

  /** For Python: the facade of an application's driver. Null if the plugin is not running in the application. */
  def driver(application: String): DriverFacade = drivers.get(application)

  private[stagecrew] def running(application: String, facade: DriverFacade): Unit = drivers.put(application, facade)
  private[stagecrew] def ended(facade: DriverFacade): Unit = drivers.values.remove(facade)
}
