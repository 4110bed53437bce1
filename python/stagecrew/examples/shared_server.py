"""A server that all workers of an executor share: it is opened once per executor, and workers find it by its port."""

from __future__ import annotations

import http.server
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import stagecrew
from pyspark.sql import SparkSession


@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def counting_server(context: stagecrew.ListenerContext) -> Iterator[str]:
    class Count(http.server.BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            Count.count += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(str(Count.count).encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    httpd = http.server.HTTPServer(("127.0.0.1", 0), Count)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/"  # the workers get a copy of this value
    httpd.shutdown()
    thread.join()
    httpd.server_close()


server = counting_server()


def numbered(rows: Iterable[str]) -> Iterator[tuple[str, int]]:
    for row in rows:
        with urllib.request.urlopen(server.get()) as reply:
            yield row, int(reply.read())


spark = stagecrew.configure(SparkSession.builder.master("local[2]").appName("shared server")).getOrCreate()
with stagecrew.crew(spark).topology("count", listeners=[server]) as topology:
    found = spark.sparkContext.parallelize("abcdef", 3).mapPartitions(numbered).collect()

assert sorted(number for _, number in found) == [1, 2, 3, 4, 5, 6]
print(f"{len(found)} rows numbered by {topology.report.opens} server")
spark.stop()
