"""Spark on Kubernetes with the files of conf/kubernetes and the command lines of docs/deploy/kubernetes.md.

No test uses a Kubernetes cluster: `support.kubernetes` simulates one.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

import stagecrew
from support.checkout import ROOT
from support.kubernetes import Cluster, Image, build_image, build_wheel, cluster
from support.sessions import PLAIN_JVM_OPTIONS
from support.spark_home import spark_home

pytestmark = pytest.mark.timeout(600)

PAGE = ROOT / "docs/deploy/kubernetes.md"
JAR = "/opt/stagecrew/stagecrew.jar"  # as on the page

APPLICATION = """
import json, os
import stagecrew
from pyspark.sql import SparkSession

builder = SparkSession.builder
if os.environ.get("TEST_CONFIGURE"):
    builder = stagecrew.configure(builder)
spark = builder.getOrCreate()

@stagecrew.resource
def pool(context):
    yield context.executor

@stagecrew.resource(scope=stagecrew.Scope.EXECUTOR)
def server(context):
    yield os.getpid()

pool, server = pool(), server()

def found(rows):
    import sys
    yield {"executor": pool.get(), "agent": server.get(), "folder": os.getcwd(), "user": os.getuid(),
           "python": sys.executable, "package": stagecrew.__file__}

with stagecrew.crew(spark).topology("t", listeners=[pool, server]) as topology:
    workers = spark.sparkContext.parallelize(range(4), 4).mapPartitions(found).collect()
    keys = spark.range(100).selectExpr("id % 7 as key").groupBy("key").count().count()
report = topology.report
print("FOUND", json.dumps({"workers": workers, "keys": keys, "failures": report.failures, "released": report.released,
                           "opens": report.opens,
                           "closes": report.closes}), flush=True)
spark.stop()
"""


def command_lines(section: str) -> list[str]:
    """Returns the words of the command line in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return shlex.split(block.replace("\\\n", " ").replace("$(stagecrew jar)", stagecrew.jar_path()))


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Image:
    """The image of conf/kubernetes/Dockerfile, with stagecrew's wheel and an application."""
    folder = tmp_path_factory.mktemp("image")
    context = folder / "context"
    (context / "dist").mkdir(parents=True)
    build_wheel(context / "dist")
    (context / "app.py").write_text(APPLICATION)
    return build_image(folder / "image", ROOT / "conf/kubernetes/Dockerfile", context)


def run(
    image: Image, command: list[str], *options: str, volumes: Sequence[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the image, whose root file system is read-only."""
    return subprocess.run(
        [*image.command(*options, "--remount-ro", "/", volumes=volumes, environment=variables), *command],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def result(log: str) -> dict[str, Any]:
    """Returns the result in the output of the application."""
    (line,) = (line for line in log.splitlines() if line.startswith("FOUND "))
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


def check_result(log: str, executors: set[str]) -> list[dict[str, Any]]:
    """Checks the output of the application: listeners of both scopes opened and closed on the executors."""
    found = result(log)
    assert {one["executor"] for one in found["workers"]} == executors
    assert found["keys"] == 7
    assert found["failures"] == 0
    assert found["opens"] == found["closes"] >= 2 * len(executors)
    assert found["released"] > 0
    assert {one["user"] for one in found["workers"]} == {185}
    return found["workers"]


def submit(running: Cluster, section: str, folder: Path, **conf: str) -> str:
    """Runs the command line of a section of the page on the simulated cluster. Returns the log of the driver."""
    program, *words = command_lines(section)
    assert program == "spark-submit"
    words = [f"k8s://{running.url}" if word.startswith("k8s://") else word for word in words]
    settings = {
        # The simulated API server has no watches, and pods cannot resolve its name in a cluster.
        "spark.kubernetes.executor.enableApiWatcher": "false",
        "spark.kubernetes.executor.apiPollingInterval": "1s",
        "spark.kubernetes.submission.waitAppCompletion": "false",
        "spark.kubernetes.driver.master": running.url,
        "spark.ui.enabled": "false",
        **{key.replace("__", "."): value for key, value in conf.items()},
    }
    is_client = words[words.index("--deploy-mode") + 1] == "client"
    if is_client:
        words[words.index("spark.driver.host=driver.example.com")] = "spark.driver.host=127.0.0.1"
        words[words.index("app.py")] = str(folder / "app.py")
        (folder / "app.py").write_text(APPLICATION)
    *words, application = words
    words += [word for key, value in settings.items() for word in ("--conf", f"{key}={value}")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SPARK_", "PYSPARK_"))}
    environment |= {
        "SPARK_HOME": spark_home(),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "KUBECONFIG": os.devnull,
        "JDK_JAVA_OPTIONS": PLAIN_JVM_OPTIONS,
        "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(stagecrew.__file__).parents[1]),
    }
    done = subprocess.run(
        [os.path.join(spark_home(), "bin", program), *words, application],
        cwd=ROOT,  # the paths of the pod template are relative
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:] + "".join(pod.log[-3000:] for pod in running.of_role("executor"))
    if is_client:
        return done.stdout + done.stderr
    (driver,) = running.of_role("driver")
    running.await_end(driver, 300)
    return driver.log


def check_pods(running: Cluster, roles: dict[str, int], *, work_dir: bool = True) -> None:
    """Checks that all pods ended by themselves without an error, and left nothing of stagecrew."""
    assert {role: len(running.of_role(role)) for role in roles} == roles
    for pod in running.pods.values():
        assert running.await_end(pod, 30) == 0, pod.log[-6000:]
        assert "Failed to add" not in pod.log
        left = {
            path.relative_to(pod.folder) for path in pod.folder.rglob("*stagecrew*") if path.parent.name != "work-dir"
        }
        # A checkout in /tmp is visible in the volume /tmp, so its folder is there as a mount point.
        assert left <= {path.relative_to("/") for path in Path(sys.prefix).parents}
        assert not list(pod.folder.rglob("channel*"))
        assert any(path.name.startswith("stagecrew") for path in pod.folder.glob("work-dir/*")) == work_dir


def test_the_link_of_the_image_is_the_jar_of_the_installed_wheel(image):
    """In the image, the fixed path on the page is a link to the jar that `stagecrew jar` prints."""
    done = run(image, ["sh", "-c", f"stagecrew jar; readlink -f {JAR}; which stagecrew; echo $PYSPARK_PYTHON"])
    printed, link, program, python = done.stdout.splitlines()
    assert printed == link
    assert re.fullmatch(r"/opt/venv/lib/python3\.\d+/site-packages/stagecrew/jars/stagecrew-spark-.*\.jar", printed)
    assert program == "/opt/venv/bin/stagecrew"
    assert python == "/opt/venv/bin/python"


@pytest.mark.long
def test_a_local_master_runs_on_a_read_only_file_system(image):
    """With a local master, only /tmp and the local directory must be writable. The working directory need not be."""
    volumes = ["--tmpfs", "/tmp", "--tmpfs", "/var/data"]
    done = run(
        image,
        [
            *("/opt/spark/bin/spark-submit", "--master", "local[2]", "--jars", f"local://{JAR}"),
            *("--conf", "spark.plugins=stagecrew.StagecrewPlugin", "--conf", "spark.ui.enabled=false"),
            "/opt/app/app.py",
        ],
        *("--chdir", image.working_directory),
        volumes=volumes,
        SPARK_LOCAL_DIRS="/var/data",
        SPARK_LOCAL_IP="127.0.0.1",
        JDK_JAVA_OPTIONS=PLAIN_JVM_OPTIONS,
        TEST_CONFIGURE="1",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    workers = check_result(done.stdout, {"driver"})
    assert {one["folder"] for one in workers} == {image.working_directory}
    assert "Failed to add" not in done.stderr
    for folder in (image.working_directory, "/opt", "/"):
        assert run(image, ["touch", f"{folder}/file"], volumes=volumes).returncode != 0, folder


@pytest.mark.long
def test_cluster_mode(image, tmp_path):
    """The command line on the page runs a driver and two executors, and Spark's objects match Kubernetes's schema.

    The application calls `configure`, which does not add the jar a second time.
    """
    with cluster(tmp_path / "cluster", image) as running:
        log = submit(running, "Cluster mode", tmp_path, **{"spark.kubernetes.driverEnv.TEST_CONFIGURE": "1"})
        workers = check_result(log, {"1", "2"})
        check_pods(running, {"driver": 1, "executor": 2})
    assert {one["python"] for one in workers} == {"/opt/venv/bin/python"}
    # Depending on the version of Spark, the copy has the name of the link or of the file.
    (package,) = {one["package"] for one in workers}
    assert re.fullmatch(rf"{image.working_directory}/stagecrew[^/]*\.jar/stagecrew/__init__\.py", package)
    for pod in running.pods.values():
        (container,) = pod.spec["spec"]["containers"]
        assert container["image"] == "registry.example.com/stagecrew:4.1.2"
        mounts = {one["mountPath"] for one in container["volumeMounts"]}
        assert {"/tmp", image.working_directory} < mounts
        variables = {one["name"]: one.get("value") for one in container["env"]}
        assert variables["SPARK_LOCAL_DIRS"] in mounts
    (driver,) = running.of_role("driver")
    assert driver.spec["spec"]["serviceAccountName"] == "spark"
    kinds = {kind for kind, _ in running.objects}
    assert {"pods", "services", "configmaps"} <= kinds
    for created in running.objects.values():
        kubernetes_validate.validate(created, "1.34", strict=True)


@pytest.mark.long
def test_client_mode(image, tmp_path):
    """The command line on the page runs two executors in pods for a driver on this host."""
    with cluster(tmp_path / "cluster", image) as running:
        log = submit(running, "Client mode", tmp_path)
        workers = check_result(log, {"1", "2"})
        check_pods(running, {"driver": 0, "executor": 2})
    assert {one["python"] for one in workers} == {"/opt/venv/bin/python"}


@pytest.fixture
def without_work_dir(tmp_path) -> dict[str, str]:
    """Settings that replace the pod template with one that has no volume for the working directory."""
    template = tmp_path / "template.yaml"
    text = (ROOT / "conf/kubernetes/pod-template.yaml").read_text(encoding="utf-8")
    shorter = re.sub(r"( +)- name: work-dir\n(\1  [^\n]*\n)+", "", text)
    assert shorter.count("- name:") == text.count("- name:") - 2
    template.write_text(shorter)
    return {f"spark.kubernetes.{role}.podTemplateFile": str(template) for role in ("driver", "executor")}


@pytest.mark.long
def test_a_read_only_working_directory(image, without_work_dir, tmp_path):
    """With the jar on the class path, no pod writes into its working directory."""
    with cluster(tmp_path / "cluster", image) as running:
        log = submit(running, "A read-only working directory", tmp_path, **without_work_dir)
        workers = check_result(log, {"1", "2"})
        check_pods(running, {"driver": 1, "executor": 2}, work_dir=False)
    (package,) = {one["package"] for one in workers}
    assert package.startswith("/opt/venv/"), "the jar in the image, not a copy"
    assert f"{Path(stagecrew.jar_path()).name}/stagecrew/" in package
    for pod in running.pods.values():
        mounts = {one["mountPath"] for one in pod.spec["spec"]["containers"][0]["volumeMounts"]}
        assert image.working_directory not in mounts


@pytest.mark.long
def test_spark_cannot_copy_jars_into_a_read_only_working_directory(image, without_work_dir, tmp_path):
    """With `--jars`, the driver does not start without the volume: Spark itself copies the jar."""
    with cluster(tmp_path / "cluster", image) as running:
        log = submit(running, "Cluster mode", tmp_path, **without_work_dir)
        (driver,) = running.of_role("driver")
        assert running.await_end(driver, 1) != 0
    assert re.search(rf"{image.working_directory}/\S*stagecrew\S*\.jar: Read-only file system", log), log[-3000:]
