package org.apache.spark.stagecrew

import org.scalatest.funsuite.AnyFunSuite
import scala.xml.Elem
import org.apache.spark.stagecrew.ui.{Show, Tab}

class TablesSuite extends AnyFunSuite {
  import Views._

  private val many = model((1 to 250).map(i => topology(f"t$i%03d", listeners = 1)): _*)

  private def ids(parameters: (String, String)*): Seq[String] =
    rows(page("", many, parameters: _*), "topologies").map(_(1))

  private def links(page: Elem): Seq[String] = (page \\ "a").map(_ \@ "href")

  test("a table shows one page of rows, and other pages on request") {
    assert(ids() == (151 to 250).reverse.map(i => f"t$i%03d"))
    assert(ids("topologies.page" -> "3") == (1 to 50).reverse.map(i => f"t$i%03d"))
    assert(ids("topologies.pageSize" -> "10", "topologies.page" -> "25").size == 10)
    assert(ids("topologies.page" -> "99") == ids("topologies.page" -> "3") && ids("topologies.page" -> "-1") == ids())
  }

  test("a table sorts all of its rows by value, ascending or descending") {
    assert(ids("topologies.sort" -> "Id").take(2) == Seq("t001", "t002"))
    assert(ids("topologies.sort" -> "Id", "topologies.desc" -> "true").take(2) == Seq("t250", "t249"))
    val times = model(topology("a").copy(jobs = 9), topology("b").copy(jobs = 10))
    assert(rows(page("", times, "topologies.sort" -> "Jobs"), "topologies").map(_(1)) == Seq("a", "b"))
  }

  test("each table keeps its page and its order while the user turns the page of another table") {
    val html = page("", many, "topologies.page" -> "2", "topologies.sort" -> "Id", "listeners.sort" -> "Scope")
    val next = links(html).find(link => link.contains("topologies.page=3")).get
    assert(next == "/ui/stagecrew/?listeners.sort=Scope&topologies.sort=Id&topologies.desc=false&topologies.page=3" +
      "&topologies.pageSize=100#stagecrew-topologies")
    assert(links(html).exists(link =>
      Seq("listeners.page=2", "topologies.page=2", "topologies.sort=Id").forall(link.contains)))
  }

  test("a table that fits on one page has no page controls, unless the page size was given") {
    def forms(parameters: (String, String)*): Int = (page("", model(topology("a")), parameters: _*) \\ "form").size
    assert(forms() == 0 && forms("topologies.pageSize" -> "5") > 0)
  }

  test("the links that sort the tables of a topology's page keep the topology's id") {
    val html = page("topology", model(busy("a b")), "id" -> Tab.key("a b"))
    val sorts = links(html).filter(_.contains(".sort="))
    assert(sorts.nonEmpty && sorts.forall(_.startsWith(s"/ui/stagecrew/topology/?id=${Tab.key("a b")}&")))
  }

  test("invalid parameters of a table are refused and not echoed, and unknown parameters are dropped") {
    Seq("topologies.page" -> "echo", "topologies.pageSize" -> "9999999999", "topologies.sort" -> "echo",
      "topologies.desc" -> "echo").foreach { parameter =>
      val refused = intercept[IllegalArgumentException](page("", many, parameter))
      assert(refused.getMessage.contains(parameter._1) && !refused.getMessage.contains(parameter._2))
    }
    assert(!page("", many, "name" -> "echo", "other.sort" -> "echo").toString.contains("echo"))
  }

  test("an error is shown as the line that Python chose, with the end of the error's text in the title") {
    val text = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    no()\nValueError: no\nmore\n"
    assert(Show.error(text, "ValueError: no").text == "ValueError: no")
    assert(Show.error(text, "x" * 1000).text == Show.first("x" * 1000, Show.Length))
    val long = Show.error("x" * 10000 + "end", "ValueError: no")
    assert((long \@ "title").length == Show.TitleLength && (long \@ "title").endsWith("end"))
    assert((Show.error("x" * 10000 + "end", jvm = true) \@ "title").startsWith("xxx"))
  }

  test("an error from an earlier version or the JVM has no chosen line, and is shown as a line of its text") {
    val text = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    no()\nValueError: no\n"
    assert(Show.error(text).text == "ValueError: no")
    assert(Show.error("\n java.io.IOException: no\n\tat x.Y\n", jvm = true).text == "java.io.IOException: no")
    assert(Show.error("").text == "")
  }

  test("page sizes are limited, and an empty table has no pages") {
    assert(ids("topologies.pageSize" -> "2147483647").size == 250 && ids("topologies.pageSize" -> "0").size == 1)
    assert(page("", model(), "topologies.pageSize" -> "0", "listeners.pageSize" -> "-1").text.contains("Topologies (0)"))
  }
}
