"""The documentation builds strictly and offline, is complete, and agrees with the code."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import stagecrew
from stagecrew.conf import KEYS, table
from support.docs_blocks import blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder with the built pages."""
    folder = tmp_path_factory.mktemp("site")
    # No process listens at this proxy, so a build that uses the network fails.
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr, result.stderr
    return folder


def read(site: Path, page: str) -> str:
    return html.unescape((site / page).read_text(encoding="utf-8"))


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    """No built page loads a script, style, font or picture from another host."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//[^\s\">]+", text)
        loaded += [
            link for link in re.findall(r"<link[^>]+href=\"?https?://[^>]+", text) if "rel=canonical" not in link
        ]
        assert not loaded, f"{page.name}: {loaded}"


def test_the_site_links_to_the_repository_if_its_address_is_set(monkeypatch):
    """The address comes from the one setting in pyproject.toml. Without it, the site has no link."""
    hooks = runpy.run_path(str(DOCS / "hooks.py"))
    config = SimpleNamespace(repo_url=None, repo_name=None)
    assert hooks["on_config"](config).repo_url is None
    address = "https://example.org/stagecrew"
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace('repository = ""', f'repository = "{address}"')
    monkeypatch.setattr(Path, "read_text", lambda path, **_: text)
    assert hooks["on_config"](config).repo_url == address


@pytest.mark.slow
def test_the_configuration_page_lists_every_key(site):
    """The built configuration page contains the name and the description of each key."""
    text = re.sub(r"<[^>]+>", "", read(site, "reference/configuration.html"))
    for key in KEYS:
        assert key.name in text
        assert key.doc.replace("`", "") in text
    assert len(table().splitlines()) == len(KEYS) + 2
    assert "spark.plugins                    stagecrew.StagecrewPlugin" in text


@pytest.mark.slow
def test_every_public_name_is_documented(site):
    """Every name in `stagecrew.__all__` is on the API page or the errors page and has a docstring."""
    api, errors = read(site, "reference/api.html"), read(site, "reference/errors.html")
    for name in stagecrew.__all__:
        documented = getattr(stagecrew, name)
        if name == "__version__":
            continue
        page = errors if documented.__module__ == "stagecrew.errors" else api
        assert f'id="stagecrew.{name}"' in page or f'id="stagecrew.errors.{name}"' in page, f"{name} is not documented"
        assert (documented.__doc__ or "").strip(), f"{name} has no docstring"


def test_messages_in_the_troubleshooting_table_are_in_the_code():
    """Each message that the troubleshooting tables explain exists in the code."""
    folders = (ROOT / "python/stagecrew", ROOT / "jvm-shim/src/main")
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".scala", ".java")]
    # In the code, messages are split over several lines and contain placeholders for values.
    code = re.sub(r"[\"']\s*\+?\s*[sf]?[\"']", "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    code = re.sub(r"\s+", " ", code)
    page = (DOCS / "operate" / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in re.split(r"\s*…\s*|4\.0 to 4\.3", message):
            words = part.strip(" :,;()'?")
            assert words in code, f"{message!r}: {words!r} is not in the code"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_found_and_parse(page):
    """The block runner finds every Python block of a page, and each block parses."""
    text = page.read_text(encoding="utf-8")
    page_blocks = blocks(text)
    assert len(page_blocks) == len(re.findall(r"^\s*```\s*\{?\.?py", text, re.MULTILINE))
    marked = [*page_blocks, *blocks(text, "sh", "shell", "console")]
    assert len([one for one in marked if one.raises or one.norun or one.test or one.output]) == len(
        re.findall(r"^<!-- (?:raises|norun|test|output): ", text, re.MULTILINE)
    )
    for block in page_blocks:
        ast.parse(block.code, str(page))


def test_blocks_that_another_test_runs_name_a_test_that_exists():
    """`<!-- test: PATH::NAME -->` names the file and the function of a test."""
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "python", "sh", "shell", "console"):
            if block.test is not None:
                path, name = block.test.split("::")
                assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{page}:{block.line}"


def test_claims_of_speed_link_to_their_figures():
    """A paragraph, or a line of a list or a table, that says how fast something is links to the page with the figures."""
    claim = re.compile(r"milliseconds?\b|microseconds?\b|\d (?:ms|us)\b|\bMB/s|\bfaster\b|\bslower\b", re.IGNORECASE)
    # Units of values, a speculative attempt of Spark, the speed of the user's own code, and figures beside their chart.
    exceptions = {"events.md": "Times are milliseconds", "commits.md": "a speculative attempt was faster"}
    beside = {"rate-limit.md", "partitions.md", "coordinators.md", "configuration.md", "metrics.md", "api.md"}
    for page in [ROOT / "README.md", *(DOCS.rglob("*.md"))]:
        if page.name in beside or page.name in ("performance.md", "changelog.md"):
            continue
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for part in re.split(r"\n\n|\n(?=- |\| )", text):
            if claim.search(part) and exceptions.get(page.name, "\0") not in part:
                assert "performance.md#" in part, f"{page.name}: {part}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_relative_links_in_project_files_exist(page):
    """The relative links and pictures of the README, and of the other Markdown files in its folder, exist."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_no_machine_paths():
    """No page, sample or example contains a path of the machine on which it was written."""
    for path in [
        *PAGES,
        *(ROOT / "python/stagecrew/examples").iterdir(),
        *(ROOT / "conf").rglob("*"),
        ROOT / "mkdocs.yml",
    ]:
        if path.is_file():
            assert not re.search(r"/(?:home|root|work|tmp|Users)/", path.read_text(encoding="utf-8")), path


def test_the_block_runner_fails_if_a_marked_block_does_not_raise(tmp_path):
    """The block runner fails if a block does not raise the error that its comment names, or raises another one."""
    from support.docs_blocks import run_page

    page = tmp_path / "page.md"
    page.write_text("<!-- raises: ValueError or KeyError -->\n```python\n{}['x']\n```\n")
    run_page(page, {})
    page.write_text("<!-- raises: ValueError -->\n```python\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="did not raise ValueError"):
        run_page(page, {})
    page.write_text("<!-- raises: ValueError -->\n```python\n{}['x']\n```\n")
    with pytest.raises(KeyError):
        run_page(page, {})
    page.write_text("<!-- raises: LookupError -->\n```python\n{}['x']\n```\n\n```python\ny = given + 1\n```\n")
    run_page(page, {"given": 1})


#: Prints the marks of each test, except unit tests. The marks of its parameters are taken together.
_COLLECT = """
import json, pytest

class Marks:
    def pytest_collection_finish(self, session):
        found = {}
        for item in session.items:
            found.setdefault(item.nodeid.partition("[")[0], set()).update(mark.name for mark in item.iter_markers())
        self.text = json.dumps({test: sorted(names) for test, names in found.items()})

marks = Marks()
pytest.main(["--collect-only", "-qq", "tests", "--ignore=tests/unit"], plugins=[marks])
print()
print(marks.text)
"""


@pytest.mark.slow
def test_each_line_of_the_table_of_versions_names_a_test_that_runs_with_each_version():
    """The tests exist, and `make test-matrix` runs them. The columns are the versions that the Makefile names."""
    page = (DOCS / "reference" / "versions.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    newest, others = (re.search(rf"^{name} := (.+)$", makefile, re.MULTILINE)[1] for name in ("SPARK", "OTHER_SPARKS"))
    header, _, *rows = [
        line.strip("| ").split(" | ") for line in page.split("\n\n## ")[0].splitlines() if line[:1] == "|"
    ]
    assert header[2:] == sorted([newest, *others.split()])
    assert "tests/packaging -m wheel" in makefile
    assert "--no-loadscope-reorder -m matrix\n" in makefile

    found = subprocess.run(
        [sys.executable, "-c", _COLLECT], cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    marks = json.loads(found.stdout.splitlines()[-1])
    matrix = {test for test, names in marks.items() if {"matrix", "wheel"} & set(names)}
    left_out = {test for test, names in marks.items() if "contract" in names} - matrix
    assert {test.partition("::")[0] for test in left_out} == {"tests/cluster/test_yarn.py"}, "FULL=1 runs these"
    names = {test.partition("::")[2] for test in matrix}
    for _, test, *cells in rows:
        assert test.strip("`") in names
        assert cells == ["yes"] * len(header[2:])


@pytest.mark.parametrize("page", sorted((DOCS / "guide").glob("*.md")), ids=lambda page: page.name)
def test_a_guide_ends_with_a_table_of_failures(page):
    """Except for the page about tests: readers look there for what happens if something fails."""
    *_, last = re.split("^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert page.stem == "testing" or re.match(r"Failures\n[^#]*^\| ---", last, re.MULTILINE)


def test_the_first_command_installs_the_wheel_of_this_version():
    """README, site and install page begin with the command that installs the wheel."""
    wheel = f'pip install "dist/stagecrew-{stagecrew.__version__}-py3-none-any.whl[spark]"'
    for page in (ROOT / "README.md", DOCS / "index.md", DOCS / "start" / "install.md"):
        first = re.search(r"^```sh\n(.*?)\n", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert first is not None
        assert first[1] == wheel, page
