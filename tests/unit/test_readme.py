"""The README has no broken link on a package index, and addresses come from one setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from support.build_scripts import load_build_script

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
REPOSITORY = "https://example.org/stagecrew"
readme = load_build_script("readme")


def targets(text: str) -> Iterator[str]:
    """Yields the target of each link and picture of a page."""
    for token in MarkdownIt().parse(text):
        for part in token.children or ():
            target = part.attrs.get("href") or part.attrs.get("src")
            if target is not None:
                yield str(target)


def test_the_readme_has_links_to_files_of_the_repository() -> None:
    """Otherwise the other tests would check nothing."""
    assert "docs/index.md" in set(targets(README))
    assert "docs/assets/lifecycle.svg" in set(targets(README))


def test_without_an_address_the_readme_has_no_relative_link_or_picture() -> None:
    """Their texts remain."""
    published = readme.published(README, "")
    assert [target for target in targets(published) if not target.startswith("https://")] == []
    assert "Contributing: CONTRIBUTING.md." in published
    assert "![" not in published
    assert readme.urls("") == {}


def test_with_an_address_each_link_leads_to_a_file_of_the_repository() -> None:
    """Pictures use the address of the raw file."""
    found = set(targets(readme.published(README, REPOSITORY)))
    assert {f"{REPOSITORY}/blob/main/docs/index.md", f"{REPOSITORY}/raw/main/docs/assets/lifecycle.svg"} <= found
    assert all(target.startswith("https://") for target in found)
    root = Path(__file__).parents[2]
    paths = [
        re.sub(r"(blob|raw)/main/", "", url.removeprefix(f"{REPOSITORY}/")) for url in readme.urls(REPOSITORY).values()
    ]
    assert all((root / path).exists() for path in paths if path != REPOSITORY)


@pytest.mark.parametrize(
    "text", ["```python\nfound[key](argument)\n```", "see [Flink](https://flink.apache.org/)", "f(x) [1]"]
)
def test_code_and_complete_addresses_stay_unchanged(text: str) -> None:
    """Only links to files are changed."""
    assert readme.published(text, REPOSITORY) == text
    assert readme.published(text, "") == text
