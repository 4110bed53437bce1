"""The documentation site in a real browser: no errors, readable on a phone and in both themes, usable by keyboard."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

ROOT = Path(__file__).parents[2]
PAGES = tuple(
    str(path.relative_to(ROOT / "docs").with_suffix(".html")) for path in sorted((ROOT / "docs").rglob("*.md"))
)
SHORT = ("index.html", "start/quickstart.html")
PHONE = {"width": 360, "height": 740}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True, timeout=120)
    with _served(folder) as address:
        yield address


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "path", [path if path in SHORT else pytest.param(path, marks=pytest.mark.long) for path in PAGES]
)
def test_pages_fit_a_phone_in_both_themes(site: str, page: Page, path: str, tmp_path: Path) -> None:
    """No page is wider than 360 pixels, no script fails, and the text contrasts with the background in both themes."""
    page.set_viewport_size(PHONE)
    for scheme, name in (("light", "default"), ("dark", "slate")):
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{site}/{path}")
        page.evaluate("localStorage.clear()")  # the site keeps the theme of the first visit
        page.reload()
        expect(page.locator("body")).to_have_attribute("data-md-color-scheme", name)
        expect(page.locator("h1").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        lightness = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor].map(c => "
            "c.match(/[0-9.]+/g).slice(0, 3).reduce((sum, x) => sum + Number(x), 0) / 3)"
        )
        assert abs(lightness[0] - lightness[1]) > 100, (scheme, lightness)
        page.screenshot(path=tmp_path / f"{scheme}.png")


def test_the_search_finds_pages(site: str, page: Page) -> None:
    """A search with the keyboard alone leads to a page."""
    page.goto(f"{site}/index.html")
    page.keyboard.press("/")
    page.keyboard.type("rate limit")
    expect(page.locator(".md-search-result__link").first).to_be_visible()
    expect(page.locator(".md-search-result").get_by_text("A rate limit across the cluster").first).to_be_visible()
    page.keyboard.press("Enter")
    page.wait_for_url("**/recipes/rate-limit.html**")


def test_the_theme_can_be_switched_and_is_kept(site: str, page: Page) -> None:
    """The switch changes the theme, and the next page has the same one."""
    page.emulate_media(color_scheme="light")
    page.goto(f"{site}/index.html")
    assert page.locator("body").get_attribute("data-md-color-scheme") == "default"
    page.get_by_title("Use the dark theme").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")
    page.goto(f"{site}/start/why.html")
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")


def test_a_reader_can_go_through_the_pages_by_keyboard(site: str, page: Page) -> None:
    """The first stop of the Tab key skips to the content, and the link to the next page can be followed with Enter."""
    page.goto(f"{site}/start/install.html")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Skip to content"
    page.locator("a.md-footer__link--next").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/start/quickstart.html")


@pytest.mark.long
def test_each_version_has_its_documentation(page: Page, tmp_path: Path) -> None:
    """`make docs-version` adds a version to the branch of the site. A reader can choose it, and starts at the latest."""
    clone, folder = tmp_path / "stagecrew", tmp_path / "site"
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environment |= {f"GIT_{who}_{what}": "test" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def run(*command: str) -> None:
        subprocess.run(command, cwd=clone, env=environment, check=True, timeout=120)

    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True, timeout=60)
    mike = str(Path(sys.executable).with_name("mike"))
    for version in ("0.1", "0.2"):
        run(mike, "deploy", "--update-aliases", version, "latest")
    run(mike, "set-default", "latest")
    run("git", "worktree", "add", "--quiet", str(folder), "gh-pages")
    with _served(folder) as address:
        page.goto(f"{address}/index.html")
        page.wait_for_url("**/latest/**")
        page.locator(".md-version").hover()
        page.locator(".md-version__link", has_text="0.1").click()
        page.wait_for_url("**/0.1/**")
        expect(page.locator("h1").first).to_be_visible()
