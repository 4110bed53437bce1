"""MkDocs hooks: insert generated tables and repository files into pages, so that pages cannot differ from them."""

from pathlib import Path

from stagecrew.conf import table

ROOT = Path(__file__).parent.parent
LANGUAGES = {".py": "python", ".conf": "properties", ".properties": "properties", ".service": "ini"}


def on_page_markdown(markdown, page, config, files):
    """Replaces `<!-- configuration-table -->` with the table of keys, and `<!-- file: PATH -->` with that file."""
    lines = []
    for line in markdown.split("\n"):
        if line == "<!-- configuration-table -->":
            lines.append(table())
        elif line.startswith("<!-- file: "):
            path = ROOT / line.removeprefix("<!-- file: ").removesuffix(" -->")
            lines += [
                f'```{LANGUAGES[path.suffix]} title="{path.relative_to(ROOT)}"',
                path.read_text(encoding="utf-8").rstrip(),
                "```",
            ]
        else:
            lines.append(line)
    return "\n".join(lines)
