"""Simulates a Kubernetes cluster on this host: an image, an API server, and pods that are processes. Needs bubblewrap.

The API server stores the objects that Spark creates. It supports polling, but not watches. A pod is one process with
the pod's user, environment and process ids. It sees the folder /opt of the image, and may write only into the pod's
volumes. All pods share the network of this host; each has a loopback address of its own.

The operating system, Java and Python are those of this host. Spark is the installed PySpark. This module builds the
command of a pod, as the entrypoint of Spark's image does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import io
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dockerfile_parse import DockerfileParser

from support.checkout import ROOT, copy_checkout
from support.processes import terminate
from support.sessions import PLAIN_JVM_OPTIONS
from support.spark_home import installed_pyspark
from support.waiting import eventually

__all__ = ["Cluster", "Image", "Pod", "build_image", "build_wheel", "cluster"]

#: The numeric user and group `spark` of Spark's images.
USER: Final = 185

#: Replaces uv. It makes the environment without a download, with links to the packages of this host, and installs only
#: stagecrew's wheel.
UV: Final = """#!{python}
import pathlib, subprocess, sys
if sys.argv[1:3] == ["venv", "--managed-python"]:
    folder = pathlib.Path(sys.argv[-1])
    subprocess.run([{base!r}, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python3*/site-packages"))
    for package in pathlib.Path({packages!r}).iterdir():
        if not package.name.startswith(("stagecrew", "pyspark", "pip")) and package.suffix != ".pth":
            (packages / package.name).symlink_to(package)
elif sys.argv[1:3] == ["pip", "install"]:
    python = sys.argv[sys.argv.index("--python") + 1]
    (wheel,) = [word for word in sys.argv if word.endswith(".whl")]
    options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
else:
    sys.exit(f"not a command that the tests replace: {{sys.argv}}")
"""


def build_wheel(folder: Path) -> Path:
    """Builds stagecrew's wheel with the jars of the checkout."""
    source = folder / "source"
    copy_checkout(source)
    jars = source / "python/stagecrew/jars"
    jars.mkdir()
    # With their new dates, the jars are newer than the sources, so the build does not compile them.
    for jar in (ROOT / "python/stagecrew/jars").glob("*.jar"):
        shutil.copyfile(jar, jars / jar.name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclasses.dataclass(frozen=True)
class Image:
    """An image: its files below `root`, its variables and its working directory."""

    root: Path
    environment: Mapping[str, str]
    working_directory: str = "/opt/spark/work-dir"  # of Spark's image

    def command(
        self,
        *options: str,
        volumes: Sequence[str] = (),
        writable: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Returns a command line that runs another command in the image.

        `options` and `volumes` are options of bubblewrap. Those of the volumes come first, because the environment of
        the tests may be below a volume, such as /tmp, and must be visible.
        """
        spark = installed_pyspark()
        words = ["bwrap", "--unshare-user", "--uid", str(USER), "--gid", str(USER)]
        words += ["--unshare-pid", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
        words += ["--bind" if writable else "--ro-bind", str(self.root / "opt"), "/opt", *volumes]
        for name in ("bin", "jars", "python"):
            words += ["--ro-bind", str(spark / name), f"/opt/spark/{name}"]
        for name in ("bin", "sbin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        for path in ("/usr", sys.base_prefix, sys.prefix):
            words += ["--ro-bind", path, path]
        for path in (Path("/etc/alternatives"), Path("/etc/ssl"), *Path("/etc").glob("java-*")):
            words += ["--ro-bind-try", str(path), str(path)]
        for name in ("passwd", "hosts", "nsswitch.conf"):
            words += ["--ro-bind", str(self.root / "etc" / name), f"/etc/{name}"]
        words.append("--clearenv")
        for name, value in {**self.environment, **(environment or {})}.items():
            words += ["--setenv", name, value]
        return [*words, *options]


def build_image(folder: Path, dockerfile: Path, context: Path) -> Image:
    """Builds an image from a Dockerfile whose base is Spark's image, and runs the RUN instructions of the Dockerfile.

    `context` is the folder from which COPY copies. A program that comes from another image is replaced by `UV`.
    """
    image = Image(folder, {"PATH": "/opt/uv:/usr/local/bin:/usr/bin:/bin", "SPARK_HOME": "/opt/spark"})
    for name in ("opt/spark/work-dir", "opt/spark/bin", "opt/spark/jars", "opt/spark/python", "opt/spark/conf"):
        (folder / name).mkdir(parents=True)
    (folder / "opt/spark/pod-template").mkdir()
    (folder / "etc").mkdir()
    (folder / "etc/passwd").write_text(f"spark:x:{USER}:{USER}::/nonexistent:/bin/sh\n")
    (folder / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (folder / "etc/nsswitch.conf").write_text("hosts: files\n")
    (folder / "opt/uv").mkdir()
    packages = str(installed_pyspark().parent)
    base = os.path.realpath(sys.executable)
    (folder / "opt/uv/uv").write_text(UV.format(python=sys.executable, base=base, packages=packages))
    (folder / "opt/uv/uv").chmod(0o755)
    environment = dict(image.environment)
    for instruction in DockerfileParser(fileobj=io.BytesIO(dockerfile.read_bytes())).structure:
        kind, value = instruction["instruction"], instruction["value"]
        if kind == "ENV":
            for name, text in re.findall(r"(\w+)=(\S+)", value):
                environment[name] = text.replace("$PATH", environment["PATH"])
            image = Image(folder, environment)
        elif kind == "COPY" and not value.startswith("--from"):
            *sources, target = value.split()
            for source in sources:
                found = list(context.glob(source))
                assert found, f"COPY {value}: {source} is not in the context"
                for path in found:
                    copy = folder / target.lstrip("/") / (path.name if target.endswith("/") else "")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
        elif kind == "RUN":
            command = [*image.command(volumes=["--tmpfs", "/tmp"], writable=True), "sh", "-c", value]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, f"RUN {value}\n{done.stdout}{done.stderr}"
    return image


@dataclasses.dataclass
class Pod:
    """A pod: its description, its address and its process."""

    spec: dict[str, Any]
    address: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return str(self.spec["metadata"]["name"])

    @property
    def role(self) -> str:
        return str(self.spec["metadata"]["labels"]["spark-role"])

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def described(self) -> dict[str, Any]:
        """The description with the status of the process, as the API server shows it."""
        code = None if self.process is None else self.process.poll()
        phase = "Pending" if self.process is None else {None: "Running", 0: "Succeeded"}.get(code, "Failed")
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        names = [one["name"] for one in self.spec["spec"]["containers"]]
        statuses = [
            {"name": name, "state": state, "ready": phase == "Running", "image": "", "imageID": "", "restartCount": 0}
            for name in names
        ]
        conditions = [{"type": "Ready", "status": str(phase == "Running")}]
        status = {"phase": phase, "podIP": self.address, "conditions": conditions, "containerStatuses": statuses}
        return {**self.spec, "status": status}


class Cluster:
    """A simulated cluster. `objects` has everything that Spark created, by kind and name, also after its deletion."""

    def __init__(self, folder: Path, image: Image) -> None:
        self.folder, self.image = folder, image
        folder.mkdir()
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, Pod] = {}
        self.requests: list[str] = []
        self._deleted: set[tuple[str, str]] = set()
        self._problem: Exception | None = None
        self._new: queue.Queue[Pod | None] = queue.Queue()
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        # Pods end together with the thread that started them.
        self._threads = [threading.Thread(target=one) for one in (self._server.serve_forever, self._start_pods)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for pod in self.pods.values():
            if pod.process is not None:
                terminate(pod.process, 1)
        self._new.put(None)
        for thread in self._threads:
            thread.join(30)

    def of_role(self, role: str) -> list[Pod]:
        return [pod for pod in self.pods.values() if pod.role == role]

    def await_end(self, pod: Pod, seconds: float) -> int:
        """Waits until the process of a pod ends. Returns its exit code."""

        def ended() -> bool:
            if self._problem is not None:
                raise self._problem
            return pod.process is not None and pod.process.poll() is not None

        eventually(ended, seconds, f"{pod.name} ends")
        assert pod.process is not None
        return int(pod.process.returncode)

    # -- The API server

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def respond(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with cluster._lock:
                    cluster.requests.append(f"{self.command} {self.path}")
                    status, response = cluster._respond(self.command, self.path, json.loads(text) if text else None)
                data = json.dumps(response).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = respond  # noqa: N815

        return Handler

    def _respond(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        url = urllib.parse.urlsplit(path)
        found = re.fullmatch(r"/apis?/(?:[a-z0-9.]+/)?v1/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?", url.path)
        if found is None:
            return 404, _status(404)
        namespace, kind, name = found.groups()
        query = dict(urllib.parse.parse_qsl(url.query))
        if method in ("POST", "PUT", "PATCH"):
            if not isinstance(body, dict) or body.get("kind") is None:  # a patch of labels: nobody reads them
                return 200, self._described(kind, name)
            return 201, self._create(namespace, kind, name or body["metadata"]["name"], body)
        if name is None:
            names = [one for of, one in self._existing() if of == kind and self._selected(kind, one, query)]
            if method == "DELETE":
                self._deleted.update((kind, one) for one in names)
            items = [self._described(kind, one) for one in names]
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
        if (kind, name) not in self._existing():
            return 404, _status(404)
        if method == "DELETE":
            self._deleted.add((kind, name))
        return 200, self._described(kind, name)

    def _create(self, namespace: str, kind: str, name: str, body: dict[str, Any]) -> dict[str, Any]:
        is_new = (kind, name) not in self.objects
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now, **body["metadata"]}
        metadata |= {"name": name, "namespace": namespace, "resourceVersion": str(len(self.requests))}
        self.objects[kind, name] = {**body, "metadata": metadata}
        if kind == "pods" and is_new:
            number = len(self.pods) + 1
            address = f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 250}.{number}"
            pod = self.pods[name] = Pod(self.objects[kind, name], address, self.folder / f"pod{number}")
            self._new.put(pod)
        return self._described(kind, name)

    def _existing(self) -> list[tuple[str, str]]:
        return [key for key in self.objects if key not in self._deleted]

    def _selected(self, kind: str, name: str, query: Mapping[str, str]) -> bool:
        labels = self.objects[kind, name]["metadata"].get("labels", {})
        wanted = re.findall(r"([^,=!]+)=([^,]+)", query.get("labelSelector", ""))
        if query.get("fieldSelector", f"metadata.name={name}") != f"metadata.name={name}":
            return False
        return all(labels.get(label) == value for label, value in wanted)

    def _described(self, kind: str, name: str) -> dict[str, Any]:
        return self.pods[name].described() if kind == "pods" else self.objects[kind, name]

    # -- The nodes

    def _start_pods(self) -> None:
        while (pod := self._new.get()) is not None:
            try:
                self._start(pod)
            except Exception as error:
                self._problem = error

    def _start(self, pod: Pod) -> None:
        spec = pod.spec["spec"]
        (container,) = spec["containers"]
        assert spec["securityContext"]["runAsUser"] == USER
        assert container["securityContext"]["readOnlyRootFilesystem"]
        pod.folder.mkdir()
        volumes = []
        for volume in spec["volumes"]:
            folder = pod.folder / volume["name"]
            folder.mkdir()
            writable = "emptyDir" in volume
            if not writable:
                # The submitter creates the pod first.
                config = ("configmaps", volume["configMap"]["name"])
                eventually(lambda config=config: config in self.objects, 30, f"{config} exists")
                data = self.objects[config].get("data", {})
                for item in volume["configMap"].get("items", [{"key": key, "path": key} for key in data]):
                    (folder / item["path"]).write_text(data[item["key"]])
            for mount in container["volumeMounts"]:
                if mount["name"] == volume["name"]:
                    volumes += ["--bind" if writable else "--ro-bind", str(folder), mount["mountPath"]]
        (pod.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in self._names(pod).items()))
        options = ["--ro-bind", str(pod.folder / "hosts"), "/etc/hosts"]
        options += ["--unshare-uts", "--hostname", pod.name, "--chdir", self.image.working_directory]
        options += ["--remount-ro", "/"]
        environment = {one["name"]: _value(one, pod) for one in container["env"]}
        settings = environment | {"JDK_JAVA_OPTIONS": PLAIN_JVM_OPTIONS}
        command = self.image.command(*options, volumes=volumes, environment=settings)
        with (pod.folder / "log").open("wb") as log:
            pod.process = subprocess.Popen(
                [*command, *_entrypoint(container["args"], environment)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _names(self, pod: Pod) -> dict[str, str]:
        """The host names that a pod can resolve: its own, and the services with the pods that they select."""
        names = {"localhost": "127.0.0.1", pod.name: pod.address}
        for kind, name in self.objects:
            if kind == "services":
                service = self.objects[kind, name]
                selector = service["spec"]["selector"].items()
                for one in self.pods.values():
                    if selector <= one.spec["metadata"]["labels"].items():
                        names[f"{name}.{service['metadata']['namespace']}.svc"] = one.address
        return names


def _status(code: int) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": "NotFound"}


def _value(variable: dict[str, Any], pod: Pod) -> str:
    if "value" in variable:
        return str(variable["value"])
    field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
    return {"status.podIP": pod.address, "metadata.name": pod.name, None: ""}[field]


def _entrypoint(arguments: list[str], environment: Mapping[str, str]) -> list[str]:
    """Returns the command that the entrypoint of Spark's image runs for these arguments."""
    kind, *rest = arguments
    if kind == "driver":
        address = environment["SPARK_DRIVER_BIND_ADDRESS"]
        conf = [f"spark.driver.bindAddress={address}", f"spark.executorEnv.SPARK_DRIVER_POD_IP={address}"]
        options = [word for one in conf for word in ("--conf", one)]
        return ["/opt/spark/bin/spark-submit", *options, "--deploy-mode", "client", *rest]
    assert kind == "executor"
    numbered = (name for name in environment if name.startswith("SPARK_JAVA_OPT_"))
    options = [environment[name] for name in sorted(numbered, key=lambda name: int(name.rsplit("_", 1)[1]))]
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    parameters = {
        "--driver-url": "SPARK_DRIVER_URL",
        "--executor-id": "SPARK_EXECUTOR_ID",
        "--cores": "SPARK_EXECUTOR_CORES",
        "--app-id": "SPARK_APPLICATION_ID",
        "--hostname": "SPARK_EXECUTOR_POD_IP",
        "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
        "--podName": "SPARK_EXECUTOR_POD_NAME",
    }
    return [
        *("java", *options, f"-Xms{memory}", f"-Xmx{memory}", "-cp"),
        f"/opt/spark/conf:{environment.get('SPARK_CLASSPATH', '')}:/opt/spark/jars/*:.",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *(word for name, variable in parameters.items() for word in (name, environment[variable])),
    ]


@contextlib.contextmanager
def cluster(folder: Path, image: Image) -> Iterator[Cluster]:
    """Runs a simulated cluster."""
    running = Cluster(folder, image)
    try:
        yield running
    finally:
        running.close()
