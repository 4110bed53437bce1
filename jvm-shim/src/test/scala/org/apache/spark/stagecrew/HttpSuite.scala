package org.apache.spark.stagecrew

import jakarta.servlet.{Filter, FilterChain, ServletRequest, ServletResponse}
import jakarta.servlet.http.{HttpServletRequest, HttpServletRequestWrapper}
import java.net.URI
import java.net.http.{HttpClient, HttpRequest, HttpResponse}
import org.apache.spark.{SecurityManager, SparkConf}
import org.apache.spark.status.AppStatusStore
import org.apache.spark.ui.SparkUI
import org.apache.spark.util.kvstore.InMemoryStore
import org.scalatest.funsuite.AnyFunSuite
import org.apache.spark.stagecrew.executor.Totals
import org.apache.spark.stagecrew.spark.SparkUi
import org.apache.spark.stagecrew.ui.{PageModel, Snapshot, Tab}

/** An authentication filter that takes the user's name from the header `user`. */
class HeaderUser extends Filter {
  override def doFilter(request: ServletRequest, response: ServletResponse, chain: FilterChain): Unit = {
    val http = request.asInstanceOf[HttpServletRequest]
    chain.doFilter(new HttpServletRequestWrapper(http) { override def getRemoteUser: String = http.getHeader("user") }, response)
  }
}

/** Tests the pages over HTTP, in Spark's own web server. */
class HttpSuite extends AnyFunSuite {
  import Views._

  private val Paths = Seq("", "topology/?id=t1", "processes/", "jobs/", "json/", "topology/json/?id=t1", "processes/json/", "jobs/json/")

  private def serving[T](model: PageModel, settings: (String, String)*)(
      f: ((String, Option[String], String) => HttpResponse[String]) => T): T = {
    val conf = new SparkConf(false).set("spark.ui.port", "0").set("spark.app.name", "suite").setAll(settings)
    val ui = SparkUI.create(None, new AppStatusStore(new InMemoryStore), conf, new SecurityManager(conf), "suite", "", 0L)
    SparkUi.attachTab(ui, Tab.Prefix, Tab.pages(() => model))
    ui.bind()
    try {
      ui.attachAllHandlers()
      val client = HttpClient.newHttpClient()
      f { (path, user, method) =>
        val request = HttpRequest.newBuilder(URI.create(s"http://127.0.0.1:${ui.boundPort}/stagecrew/$path"))
          .method(method, HttpRequest.BodyPublishers.noBody())
        user.foreach(request.header("user", _))
        client.send(request.build(), HttpResponse.BodyHandlers.ofString())
      }
    } finally ui.stop()
  }

  test("only a user with view permission gets pages and JSON") {
    serving(model(busy("t1")), "spark.ui.filters" -> classOf[HeaderUser].getName, "spark.acls.enable" -> "true", "spark.ui.view.acls" -> "alice") { get =>
      Paths.foreach { path =>
        assert(get(path, Some("mallory"), "GET").statusCode == 403, path)
        assert(!get(path, Some("mallory"), "GET").body.contains("listener 0"))
        assert(get(path, Some("alice"), "GET").statusCode == 200, path)
      }
      assert(get("static/live.js", Some("mallory"), "GET").statusCode == 403)
    }
  }

  test("the pages are read-only: methods other than GET are refused") {
    serving(model(busy("t1"))) { get =>
      for (path <- Paths; method <- Seq("POST", "PUT", "DELETE", "TRACE")) assert(get(path, None, method).statusCode == 405, s"$method $path")
    }
  }

  test("a request with invalid parameters returns 400, and the response never contains their markup") {
    serving(model(busy("t1"))) { get =>
      Seq("topology/", "topology/?id=echo%3Cscript%3E", "topology/json/?id=echo", "?topologies.sort=echo", "?topologies.page=echo",
        "topology/?id=t1&listeners.desc=echo").foreach { path =>
        val response = get(path, None, "GET")
        assert(response.statusCode == 400 && !response.body.contains("<script>"), path) // Jetty's error page contains the URL, escaped
      }
      val page = get("?name=echo-me%3Cscript%3E&id=echo-me&other.sort=echo-me", None, "GET")
      assert(page.statusCode == 200 && !page.body.contains("echo-me"))
    }
  }

  test("a page of an application with 1,000 topologies takes less than a second, and shows one page of rows") {
    val many = PageModel(Snapshot((1 to 1000).map(i => busy(s"t$i")).toVector, Totals()), 61000)
    serving(many) { get =>
      Seq("", "?topologies.sort=Duration", "topology/?id=t1").foreach { path =>
        get(path, None, "GET")
        val began = System.nanoTime()
        val body = get(path, None, "GET").body
        assert((System.nanoTime() - began) / 1e9 < 1, path)
        assert(body.contains("name of t1") && "<tr>".r.findAllIn(body).size < 300)
      }
    }
  }
}
