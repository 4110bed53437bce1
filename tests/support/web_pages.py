"""For the tests of web pages: a browser that records errors, tables as a user sees them, and themes."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, Playwright

from support.requirements import bootstrap
from support.spark_versions import HAS_DARK_THEME

__all__ = ["THEMES", "checked_page", "fetch_json", "launch_browser", "set_theme", "table_rows", "text_colour"]

#: The themes of Spark's pages.
THEMES = ("light", "dark") if HAS_DARK_THEME else ("light",)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def launch_browser(playwright: Playwright) -> Browser:
    """Starts the installed Chromium."""
    return playwright.chromium.launch(executable_path=bootstrap.chromium(), args=ARGUMENTS)


@contextlib.contextmanager
def checked_page(browser: Browser) -> Iterator[Page]:
    """Opens a page. At the end, asserts that no error, dialog or violation of the content security policy occurred."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"dialog {dialog.message}"), dialog.dismiss()))
    # The browser aborts requests that are in progress when it leaves a page.
    page.on(
        "requestfailed",
        lambda request: wrong.append(f"failed {request.url}") if request.failure != "net::ERR_ABORTED" else None,
    )
    page.on(
        "response",
        lambda response: wrong.append(f"{response.status} {response.url}") if response.status >= 400 else None,
    )
    page.expose_function("stagecrewViolation", lambda text: wrong.append(f"violation {text}"))
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', e => "
        "window.stagecrewViolation(e.violatedDirective + ' ' + e.blockedURI))"
    )
    yield page
    context.close()
    assert wrong == [], wrong  # pytest does not rewrite assertions of this module


def set_theme(page: Page, theme: str = "dark") -> None:
    """Switches to one of Spark's themes, as Spark's own button does."""
    page.evaluate("theme => document.documentElement.setAttribute('data-bs-theme', theme)", theme)


def table_rows(page: Page, table: str) -> list[dict[str, str]]:
    """Returns the cells of each row by column header, as a user sees them, at one moment of a page that is updated."""
    names, rows = page.evaluate(
        """table => {
            const texts = (parent, selector) => [...parent.querySelectorAll(selector)].map(e => e.innerText);
            const rows = [...document.querySelectorAll(`#${table} tbody tr`)];
            return [texts(document, `#${table} thead th`), rows.map(row => texts(row, 'td'))];
        }""",
        table,
    )
    # The header of the sorted column ends with an arrow.
    names = [name.strip(" \u25be\u25b4\u00a0\n") for name in names]
    return [dict(zip(names, map(str.strip, row), strict=True)) for row in rows]


def text_colour(page: Page, selector: str, paint: str = "color") -> list[int]:
    """Returns red, green and blue, 0 to 255, of the first such element. `paint` is "fill" for the text of a picture."""
    return page.evaluate(
        """([selector, paint]) => getComputedStyle(document.querySelector(selector))[paint]
            .match(/[0-9]+/g).slice(0, 3).map(Number)""",
        [selector, paint],
    )


def fetch_json(url: str) -> Any:
    """Returns the JSON at this URL."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return json.load(response)
