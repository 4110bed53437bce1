"""The helpers for tests of pages. If `checked_page` detected no problem, those tests would prove nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, Route

from support.web_pages import checked_page, table_rows, text_colour

POLICY = {"Content-Security-Policy": "script-src 'self'"}


def load(browser: Browser, body: str, script: str) -> None:
    """Loads a page whose security policy allows its script file, but no inline script."""

    def respond(route: Route) -> None:
        path = route.request.url.removeprefix("http://pages.test")
        if path == "/":
            route.fulfill(
                body=f"<html><body>{body}<script src='/s.js'></script></body></html>",
                headers=POLICY,
                content_type="text/html",
            )
        elif path == "/s.js":
            route.fulfill(body=script, content_type="text/javascript")
        else:
            route.fulfill(status=204 if path == "/favicon.ico" else 404)

    with checked_page(browser) as page:
        page.route("**/*", respond)
        page.goto("http://pages.test/")
        page.evaluate("1")  # when this returns, earlier events have been reported


def test_a_page_without_problems_passes(browser: Browser) -> None:
    """Allowed scripts and ordinary console messages do not fail the test of a page."""
    load(browser, "<p>text</p>", "document.title = 'a script of its own'; console.log('a word')")


@pytest.mark.parametrize(
    ("body", "script", "finding"),
    [
        ("<script>document.title = 'inline'</script>", "", "violation script-src"),
        ("<p onclick='alert(1)'>text</p>", "document.querySelector('p').click()", "violation script-src"),
        ("", "console.error('something failed')", "something failed"),
        ("", "console.warn('something is odd')", "something is odd"),
        ("", "throw new Error('thrown on purpose')", "thrown on purpose"),
        ("", "alert('to be seen')", "dialog to be seen"),
        ("<img src='/none.png'>", "", "404 http://pages.test/none.png"),
    ],
)
def test_every_problem_on_a_page_is_detected(browser: Browser, body: str, script: str, finding: str) -> None:
    """An inline script, a console warning, an error, a dialog and a missing file each fail the test of a page."""
    with pytest.raises(AssertionError, match=finding):
        load(browser, body, script)


def test_a_page_that_is_updated_is_read_at_one_moment(page: Page) -> None:
    """While a page replaces its table all the time, rows and colours are those of one table."""
    page.set_content("<div></div>")
    page.evaluate(
        """() => {
            const replace = shown => {
                const names = shown ? ['Id', 'Lost'] : ['Id'];
                const row = tag => `<tr>${names.map(name => `<${tag}>${name}</${tag}>`).join('')}</tr>`;
                document.querySelector('div').innerHTML =
                    `<table id="t" style="color: rgb(1, 2, 3)"><thead>${row('th')}</thead>`
                    + `<tbody>${row('td').repeat(20)}</tbody></table>`;
                setTimeout(replace, 0, !shown);
            };
            replace(true);
        }"""
    )
    for _ in range(50):
        rows = table_rows(page, "t")
        assert rows in ([{"Id": "Id"}] * 20, [{"Id": "Id", "Lost": "Lost"}] * 20)
        assert text_colour(page, "#t td") == [1, 2, 3]
