"""MkDocs hooks: insert generated tables and repository files into pages, so that pages cannot differ from them."""

import sys
from pathlib import Path

from stagecrew.conf import table

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))

from measurements import Figure

LANGUAGES = {
    ".py": "python",
    ".conf": "properties",
    ".properties": "properties",
    ".service": "ini",
    ".yaml": "yaml",
    "Dockerfile": "dockerfile",
}


def on_page_markdown(markdown, page, config, files):
    """Replaces comments in a page: `<!-- configuration-table -->` with the table of keys, `<!-- file: PATH -->` with that
    file, and `<!-- bench: FIGURE -->` with a table and a chart of this figure."""
    lines = []
    for line in markdown.split("\n"):
        if line == "<!-- configuration-table -->":
            lines.append(table())
        elif line.startswith("<!-- bench: "):
            name = line.removeprefix("<!-- bench: ").removesuffix(" -->")
            figure = Figure.read(ROOT / "docs" / "assets" / "bench" / f"{name}.json")
            lines += [figure.markdown(), "", f"![The rounds of {name}](../assets/bench/{name}.svg)"]
        elif line.startswith("<!-- file: "):
            path = ROOT / line.removeprefix("<!-- file: ").removesuffix(" -->")
            lines += [
                f'```{LANGUAGES[path.suffix or path.name]} title="{path.relative_to(ROOT)}"',
                path.read_text(encoding="utf-8").rstrip(),
                "```",
            ]
        else:
            lines.append(line)
    return "\n".join(lines)
