"""The documentation: it builds strictly and without the network, says everything, and is made from the code."""

from __future__ import annotations

import ast
import html
import os
import re
import subprocess
import sys
from pathlib import Path

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
    # A proxy that nobody listens at: a build that asks the network for anything fails.
    environment = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def read(site: Path, page: str) -> str:
    return html.unescape((site / page).read_text(encoding="utf-8"))


def test_pages_fetch_nothing_from_elsewhere(site):
    """No built page loads a script, a style, a font or a picture from another host."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(?:https?:)?//[^\s\">]+", text)
        loaded += [
            link for link in re.findall(r"<link[^>]+href=\"?https?://[^>]+", text) if "rel=canonical" not in link
        ]
        assert not loaded, f"{page.name}: {loaded}"


def test_configuration_table_is_that_of_the_code(site):
    """The built page of the configuration has every key, with its default and what it does."""
    text = re.sub(r"<[^>]+>", "", read(site, "reference/configuration.html"))
    for key in KEYS:
        assert key.name in text
        assert key.doc.replace("`", "") in text
    assert len(table().splitlines()) == len(KEYS) + 2
    assert "spark.plugins                    stagecrew.StagecrewPlugin" in text


def test_every_public_name_is_documented(site):
    """Every name of `stagecrew.__all__` stands on the page of the API or of the errors, with a docstring."""
    api, errors = read(site, "reference/api.html"), read(site, "reference/errors.html")
    for name in stagecrew.__all__:
        thing = getattr(stagecrew, name)
        if name == "__version__":
            continue
        page = errors if thing.__module__ == "stagecrew.errors" else api
        assert f'id="stagecrew.{name}"' in page or f'id="stagecrew.errors.{name}"' in page, f"{name} is not documented"
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"


def test_messages_in_the_troubleshooting_table_are_in_the_code():
    """Each message that the operations page explains is one that the code can say."""
    sources = [*(ROOT / "python/stagecrew").rglob("*.py"), *(ROOT / "jvm-shim/src/main").rglob("*.scala")]
    # Messages are written over several lines, with values in them.
    code = re.sub(r"[\"']\s*\+?\s*[sf]?[\"']", "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    code = re.sub(r"\s+", " ", code)
    page = (DOCS / "operations.md").read_text(encoding="utf-8").split("## Troubleshooting by message")[1]
    page += (DOCS / "recovery.md").read_text(encoding="utf-8").split("## What each message means")[1]
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 10
    for message in messages:
        for part in re.split(r"\s*…\s*|4\.3", message):
            words = part.strip(" :,;()'?")
            assert words in code, f"{message!r}: nothing says {words!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_are_found_and_parse(page):
    """Every Python block of a page is seen by the runner of blocks, and is Python."""
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    assert len(found) == len(re.findall(r"^\s*```\s*\{?\.?py", text, re.MULTILINE))
    assert len([block for block in found if block.raises or block.norun]) == len(
        re.findall(r"^<!-- (?:raises|norun): ", text, re.MULTILINE)
    )
    for block in found:
        ast.parse(block.code, str(page))


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_of_project_files_lead_somewhere(page):
    """Every relative link and picture of README and its kin exists."""
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_no_machine_paths():
    """No page, sample or example names a place of the machine on which it was written."""
    for path in [*PAGES, *(DOCS / "examples").iterdir(), *(ROOT / "conf").iterdir(), ROOT / "mkdocs.yml"]:
        if path.is_file():
            assert not re.search(r"/(?:home|root|work|tmp|Users)/", path.read_text(encoding="utf-8")), path


def test_a_block_that_should_raise_and_does_not_is_noticed(tmp_path):
    """The runner of blocks fails a page whose marked block raises nothing, or another error."""
    from support.docs_blocks import run_page

    page = tmp_path / "page.md"
    page.write_text("<!-- raises: ValueError -->\n```python\nx = 1\n```\n")
    with pytest.raises(AssertionError, match="did not raise ValueError"):
        run_page(page, {})
    page.write_text("<!-- raises: ValueError -->\n```python\n{}['x']\n```\n")
    with pytest.raises(KeyError):
        run_page(page, {})
    page.write_text("<!-- raises: LookupError -->\n```python\n{}['x']\n```\n\n```python\ny = given + 1\n```\n")
    run_page(page, {"given": 1})
