"""What `watched` notices: without that, the tests of pages show nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Route

from support.web_pages import checked_page

POLICY = {"Content-Security-Policy": "script-src 'self'"}


def loaded(browser: Browser, body: str, script: str) -> None:
    """Loads a page whose policy allows its own script and no inline one."""

    def answer(route: Route) -> None:
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
        page.route("**/*", answer)
        page.goto("http://pages.test/")
        page.evaluate("1")  # what happened before it is known then


def test_a_page_on_which_nothing_goes_wrong_passes(browser: Browser) -> None:
    """What is allowed and quiet is no finding."""
    loaded(browser, "<p>text</p>", "document.title = 'a script of its own'; console.log('a word')")


@pytest.mark.parametrize(
    ("body", "script", "what"),
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
def test_whatever_goes_wrong_on_a_page_is_noticed(browser: Browser, body: str, script: str, what: str) -> None:
    """An inline script, a message of the console, an error, a dialog, something that is missing: each fails the test."""
    with pytest.raises(AssertionError, match=what):
        loaded(browser, body, script)
