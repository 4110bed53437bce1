package org.apache.spark.stagecrew.spark;

import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import org.apache.spark.ui.WebUI;

/** A file that the Spark UI serves, such as a script. This is Java, because the Scala compiler would need the classes
 * of Jetty under the names that they had before Spark's build renamed them: core/ui/WebUI.scala. */
final class UiFile extends HttpServlet {
  private static final long serialVersionUID = 1L;
  private final String contentType;
  private final byte[] content;

  private UiFile(String contentType, byte[] content) {
    this.contentType = contentType;
    this.content = content;
  }

  /** Serves the content at this path of the UI. */
  static void attach(WebUI ui, String path, String contentType, byte[] content) {
    ui.attachHandler(path, new UiFile(contentType, content), "/*");
  }

  @Override protected void doGet(HttpServletRequest request, HttpServletResponse response) throws IOException {
    response.setContentType(contentType);
    response.setHeader("Cache-Control", "no-cache");
    response.getOutputStream().write(content);
  }
}
