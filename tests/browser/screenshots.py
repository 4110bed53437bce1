"""Makes the pictures of the tab for the documentation anew: `.venv/bin/python tests/browser/screenshots.py [FOLDER]`.

They show an event log that is written for it, in a real History Server and a real browser, in both themes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from playwright.sync_api import sync_playwright  # noqa: E402

import stagecrew  # noqa: E402
from crewtools import eventually, history_server  # noqa: E402
from eventlogs import example, written  # noqa: E402
from webpages import THEMES, dark, fetched, launched, watched  # noqa: E402

PAGES = {
    "overview": "",
    "topology": "topology/?id=enrich-2b8c41d09e63",
    "processes": "processes/",
    "job": "jobs/",
}

#: Spark's own buttons for long pages float over what they stand on.
WITHOUT_FLOATING = """() => document.querySelectorAll('body *').forEach(e => {
  if (getComputedStyle(e).position === 'fixed' && e.tagName !== 'FOOTER') e.style.display = 'none' })"""


def shoot(folder: Path) -> None:
    """Each page in each theme, as `tab-PAGE-THEME.png`."""
    os.environ.setdefault("TZ", "UTC")
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary) / "logs"
        logs.mkdir()
        app = written(logs, "app-20260101070000-0001", example(), name="nightly")
        with history_server(Path(temporary), logs, stagecrew.jar_path()) as base, sync_playwright() as playwright:
            eventually(lambda: fetched(f"{base}/api/v1/applications"), 60, "the log is listed")
            browser = launched(playwright)
            for name, path in PAGES.items():
                for theme in THEMES:
                    with watched(browser) as page:
                        page.set_viewport_size({"width": 1500, "height": 400})
                        page.goto(f"{base}/history/{app}/stagecrew/{path}")
                        dark(page, theme)
                        page.evaluate(WITHOUT_FLOATING)
                        page.screenshot(path=folder / f"tab-{name}-{theme}.png", full_page=True)
            browser.close()


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS.parent / "docs" / "assets"
    target.mkdir(parents=True, exist_ok=True)
    shoot(target)
