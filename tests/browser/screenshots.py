"""Makes the pictures of the tab for the documentation anew: `.venv/bin/python tests/browser/screenshots.py [FOLDER]`.

They show a real run: the stored job of nightly.py on two executors, whose first run was killed; in a real browser, in both themes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from playwright.sync_api import sync_playwright  # noqa: E402

from haprocesses import QUICK, campaign, until  # noqa: E402
from stagecrew.recovery.jobs.spec import JobSpec  # noqa: E402
from webpages import THEMES, dark, fetched, launched, watched  # noqa: E402

PAGES = {"overview": "", "topology": "topology/?id={enrich}", "processes": "processes/", "job": "jobs/"}
CONF = QUICK | {
    "spark.master": "local-cluster[2,2,1024]",
    "spark.ui.enabled": "true",
    "spark.ui.port": "0",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "16",
    "spark.stagecrew.processes.interval": "1s",
}

#: Spark's own buttons for long pages float over what they stand on.
WITHOUT_FLOATING = """() => document.querySelectorAll('body *').forEach(e => {
  if (getComputedStyle(e).position === 'fixed' && e.tagName !== 'FOOTER') e.style.display = 'none' })"""


def shoot(folder: Path) -> None:
    """Each page in each theme, as `tab-PAGE-THEME.png`."""
    os.environ.setdefault("TZ", "UTC")
    with (
        tempfile.TemporaryDirectory() as temporary,
        campaign(f"sqlite://{temporary}/jobs.db", Path(temporary)) as drivers,
    ):
        out = Path(temporary) / "out"
        drivers.start()
        drivers.leader()
        module = Path(__file__).with_name("nightly.py")
        drivers.submit(JobSpec.of_function("nightly:run", {"folder": str(out)}, CONF, [module], 10), "nightly")
        until((out / "loaded-1").exists, "the first step is done")
        os.kill(drivers.process("nightly"), signal.SIGKILL)
        (out / "go-2").touch()
        until((out / "ui").exists, "the job makes its report", 300)
        base = f"http://127.0.0.1:{urlsplit((out / 'ui').read_text()).port}/stagecrew"

        def at_work() -> str | None:
            found = {one["name"]: one for one in fetched(f"{base}/json/")["topologies"]}
            busy = [one for one in found["report"]["operators"] if one["live"] == 3] if "checks" in found else []
            return found["enrich"]["id"] if busy else None

        enrich = until(at_work, "the report's last tasks run")
        with sync_playwright() as playwright:
            browser = launched(playwright)
            for name, path in PAGES.items():
                for theme in THEMES:
                    with watched(browser) as page:
                        page.set_viewport_size({"width": 1500, "height": 400})
                        page.goto(f"{base}/{path.format(enrich=enrich)}")
                        dark(page, theme)
                        page.evaluate(WITHOUT_FLOATING)
                        page.screenshot(path=folder / f"tab-{name}-{theme}.png", full_page=True)
            browser.close()
        (out / "go-end").touch()
        print("routes:", drivers.result("nightly").value())


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TESTS.parent / "docs" / "assets"
    target.mkdir(parents=True, exist_ok=True)
    shoot(target)
