"""The pages about cluster managers agree with the files in conf/kubernetes, with each other and with Kubernetes."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from stagecrew.conf import PLUGIN
from stagecrew.spark_version import SPARK_LINES, line_of

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs/deploy").glob("*.md") if page.name != "enabling.md")
PAGE = ROOT / "docs/deploy/kubernetes.md"
TEMPLATE = ROOT / "conf/kubernetes/pod-template.yaml"
DOCKERFILE = ROOT / "conf/kubernetes/Dockerfile"
#: The oldest and the newest Kubernetes with which the template is checked.
KUBERNETES = ("1.30", "1.37")


def submits(page: Path) -> list[dict[str, Any]]:
    """Returns the spark-submit command lines of a page: their options, `--conf` as a dict, and the application."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        words = shlex.split(re.sub(r"^\w+=\S+ ", "", block.replace("\\\n", " ")))
        program, *words, application = words
        assert program == "spark-submit"
        pairs = list(zip(words[::2], words[1::2], strict=True))
        assert all(name.startswith("--") for name, _ in pairs)
        conf = [value.split("=", 1) for name, value in pairs if name == "--conf"]
        assert len({key for key, _ in conf}) == len(conf), "a property is set twice"
        options = {name: value for name, value in pairs if name != "--conf"}
        found.append({"options": options, "conf": dict(conf), "application": application})
    return found


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile, and their values."""
    parser = DockerfileParser(fileobj=io.BytesIO(DOCKERFILE.read_bytes()))
    return [(one["instruction"], one["value"]) for one in parser.structure if one["instruction"] != "COMMENT"]


@pytest.fixture(scope="module")
def template() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    return loaded


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_pod_template_matches_the_schema_of_kubernetes(template: dict[str, Any], version: str) -> None:
    """The schema accepts the template, and rejects a misspelled field."""
    kubernetes_validate.validate(template, version, strict=True)
    template["spec"]["containers"][0]["volumeMount"] = []
    try:
        with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
            kubernetes_validate.validate(template, version, strict=True)
    finally:
        del template["spec"]["containers"][0]["volumeMount"]


def test_each_volume_is_mounted(template: dict[str, Any]) -> None:
    """The template mounts each of its volumes, at the working directory of Spark's images and at /tmp."""
    (container,) = template["spec"]["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert mounts == {"work-dir": "/opt/spark/work-dir", "tmp": "/tmp"}
    assert {one["name"] for one in template["spec"]["volumes"]} == set(mounts)
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_the_dockerfile_has_the_paths_of_the_command_lines(template: dict[str, Any]) -> None:
    """The jar, the application and the interpreter in the command lines exist in the image, outside of the volumes."""
    text = "\n".join(f"{kind} {value}" for kind, value in instructions())
    lines = submits(PAGE)
    assert len(lines) == 3
    jar = re.search(r'ln -s "\$\(stagecrew jar\)" (\S+)', text)[1]
    copied = [value.split()[-1] for kind, value in instructions() if kind == "COPY"]
    python = re.search(r"PYSPARK_PYTHON=(\S+)", text)[1]
    hidden = [one["mountPath"] for one in template["spec"]["containers"][0]["volumeMounts"]]
    for path in (jar, python, *copied):
        assert not path.startswith(tuple(hidden)), path
    for line in lines:
        used = [line["options"].get("--jars"), line["application"], *line["conf"].values()]
        for path in filter(None, used):
            if path.startswith(("local:///opt/stagecrew/", "/opt/stagecrew/")):
                assert path.removeprefix("local://") == jar
            elif path.startswith("local://"):
                assert path.removeprefix("local://") in copied
            elif path.startswith("/opt/"):
                assert path == python
            elif path.startswith("conf/"):
                assert ROOT / path == TEMPLATE
    venv = str(Path(python).parent.parent)
    assert f"RUN uv venv --managed-python --python 3.12 {venv}\n" in f"{text}\n"
    assert f"PATH={venv}/bin:$PATH" in text


def test_the_page_and_the_dockerfile_name_the_same_image() -> None:
    """The tag of the image is the version of Spark in it, and stagecrew supports this version."""
    built = re.search(r"docker build .* -t (\S+)", DOCKERFILE.read_text(encoding="utf-8"))[1]
    version = re.search(r"SPARK_VERSION=(\S+)", dict(instructions())["ARG"])[1]
    assert line_of(version) in SPARK_LINES
    assert built.endswith(f":{version}")
    assert {line["conf"]["spark.kubernetes.container.image"] for line in submits(PAGE)} == {built}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_line_enables_the_plugin(page: Path) -> None:
    """Each spark-submit sets `spark.plugins`, and puts the jar on the class path of the driver and of executors.

    `job.py` calls `configure`, which does both.
    """
    for line in submits(page):
        conf = line["conf"]
        if line["application"] == "job.py":
            continue
        assert conf["spark.plugins"] == PLUGIN
        assert "--jars" in line["options"] or {"spark.driver.extraClassPath", "spark.executor.extraClassPath"} < set(
            conf
        )


def test_pages_that_were_not_tried_say_so() -> None:
    """The pages for Kubernetes and managed platforms begin with a warning that nothing was run there."""
    for name in ("kubernetes", "managed-platforms"):
        heading, _, rest = (ROOT / f"docs/deploy/{name}.md").read_text(encoding="utf-8").split("\n", 2)
        assert heading.startswith("# ")
        assert rest.startswith('!!! warning "Not run')
