package org.apache.spark.stagecrew

import com.fasterxml.jackson.databind.ObjectMapper
import java.nio.file.{Files, Path}
import org.scalatest.funsuite.AnyFunSuite
import scala.jdk.CollectionConverters._
import scala.xml.Elem

class TablesSuite extends AnyFunSuite {
  import Views._

  private val many = shown((1 to 250).map(i => topology(f"t$i%03d", listeners = 1)): _*)

  private def ids(parameters: (String, String)*): Seq[String] = rows(page("", many, parameters: _*), "topologies").map(_(1))

  private def links(page: Elem): Seq[String] = (page \\ "a").map(_ \@ "href")

  test("a table shows a page of its rows, and turns") {
    assert(ids() == (151 to 250).reverse.map(i => f"t$i%03d"))
    assert(ids("topologies.page" -> "3") == (1 to 50).reverse.map(i => f"t$i%03d"))
    assert(ids("topologies.pageSize" -> "10", "topologies.page" -> "25").size == 10)
    assert(ids("topologies.page" -> "99") == ids("topologies.page" -> "3") && ids("topologies.page" -> "-1") == ids())
  }

  test("a table sorts all of its rows, both ways, by value") {
    assert(ids("topologies.sort" -> "Id").take(2) == Seq("t001", "t002"))
    assert(ids("topologies.sort" -> "Id", "topologies.desc" -> "true").take(2) == Seq("t250", "t249"))
    val times = shown(topology("a").copy(jobs = 9), topology("b").copy(jobs = 10))
    assert(rows(page("", times, "topologies.sort" -> "Jobs"), "topologies").map(_(1)) == Seq("a", "b"))
  }

  test("each table keeps its place while another is turned") {
    val html = page("", many, "topologies.page" -> "2", "topologies.sort" -> "Id", "listeners.sort" -> "Scope")
    val next = links(html).find(link => link.contains("topologies.page=3")).get
    assert(next == "/ui/stagecrew/?&listeners.sort=Scope&topologies.sort=Id&topologies.desc=false&topologies.page=3&topologies.pageSize=100#stagecrew-topologies"
      .replace("?&", "?"))
    assert(links(html).exists(link => link.contains("listeners.page=2") && link.contains("topologies.page=2") && link.contains("topologies.sort=Id")))
  }

  test("a table that fits has nothing to turn pages with, unless its size was asked for") {
    def forms(parameters: (String, String)*): Int = (page("", shown(topology("a")), parameters: _*) \\ "form").size
    assert(forms() == 0 && forms("topologies.pageSize" -> "5") > 0)
  }

  test("a topology's page keeps its id while its tables sort") {
    val html = page("topology", shown(busy("a b")), "id" -> Tab.key("a b"))
    val sorts = links(html).filter(_.contains(".sort="))
    assert(sorts.nonEmpty && sorts.forall(_.startsWith(s"/ui/stagecrew/topology/?id=${Tab.key("a b")}&")))
  }

  test("parameters that a table cannot have are refused without an echo, and others are not carried on") {
    Seq("topologies.page" -> "echo", "topologies.pageSize" -> "9999999999", "topologies.sort" -> "echo", "topologies.desc" -> "echo").foreach { one =>
      val refused = intercept[IllegalArgumentException](page("", many, one))
      assert(refused.getMessage.contains(one._1) && !refused.getMessage.contains(one._2))
    }
    assert(!page("", many, "name" -> "echo", "other.sort" -> "echo").toString.contains("echo"))
  }

  test("the line of an error that says what happened is the one that Python finds") {
    val file = Iterator.iterate(Path.of("").toAbsolutePath)(_.getParent).takeWhile(_ != null)
      .map(_.resolve("tests/error-lines.json")).find(Files.exists(_)).get
    val texts = new ObjectMapper().readTree(file.toFile).elements.asScala.toSeq
    texts.foreach { one =>
      assert(Show.errorLine(one.get("text").asText) == Show.cut(one.get("line").asText, Show.Length), one.get("name").asText)
    }
    assert(texts.size > 15)
  }

  test("the end of an error keeps the line that says what happened") {
    val frames = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    no()\n"
    val cut = Show.errorEnd(s"${frames}ValueError: refused\n${"SELECT\n" * 200}end\n", 500)
    assert(cut.length == 500 && Show.errorLine(cut) == "ValueError: refused" && cut.endsWith("SELECT\nend\n"))
    val deep = s"${frames * 100}ValueError: no\n"
    assert(Show.errorEnd(deep, 500) == Show.end(deep, 500) && Show.errorEnd("short", 500) == "short")
    assert(Show.errorEnd("x" * 1000, 130).length <= 130)
    val group = "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1, in f\n  |     g()\n" +
      "  | ExceptionGroup: many (40 sub-exceptions)\n  +-+---------------- 1 ----------------\n" +
      "    | Traceback (most recent call last):\n    |   File \"a.py\", line 3, in h\n    |     x()\n    | ValueError: sub\n" * 40
    assert(Show.errorLine(group) == "ExceptionGroup: many (40 sub-exceptions)")
    assert(Show.errorLine(Show.errorEnd(group, 500)) == Show.errorLine(group) && Show.errorEnd(group, 500).length <= 500)
  }

  test("sizes of pages are bounded, and an empty table turns to nothing") {
    assert(ids("topologies.pageSize" -> "2147483647").size == 250 && ids("topologies.pageSize" -> "0").size == 1)
    assert(page("", shown(), "topologies.pageSize" -> "0", "listeners.pageSize" -> "-1").text.contains("Topologies (0)"))
  }
}
