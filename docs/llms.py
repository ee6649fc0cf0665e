"""The file llms.txt of the site: its pages with a sentence about each, for language models.

python -m docs.llms
"""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def pages() -> list[Path]:
    """Returns the pages in the order of the table of contents."""
    toctree = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    names = [name for block in toctree for name in block.splitlines() if name and not name.startswith(":")]
    return [(DOCS / f"{name}.md").resolve() for name in names]


def entry(page: Path) -> str:
    """Returns the link to the source of a page, with its title and its first sentence."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).strip()
    title, _, rest = text.partition("\n\n")
    rest = re.sub(r"^```.*?^```$", "", rest, flags=re.DOTALL | re.MULTILINE)
    paragraphs = [part.strip() for part in rest.split("\n\n")]
    first = next(part for part in paragraphs if part and not part.startswith(("#", "|", "!", "<", "- ")))
    words = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first).split())
    sentence = re.split(r"(?<=[.:!?]) (?=[A-Z`])", words)[0].rstrip(":")
    path = page.relative_to(DOCS.parent)
    return f"- [{title.strip().removeprefix('# ')}](_sources/{path}.txt): {sentence}"


def text() -> str:
    """Returns the file."""
    summary = entry(DOCS / "index.md").partition("): ")[2]
    return "\n".join(["# titanlike", "", f"> {summary}", "", "## Documentation", "", *map(entry, pages())]) + "\n"


if __name__ == "__main__":
    print(text(), end="")
