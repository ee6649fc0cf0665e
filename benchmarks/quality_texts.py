"""What the filters of `titanlike data prepare --quality default` remove of good text that is on most development machines."""

import glob
import html
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

from titanlike.tools.data.quality.filters import Thresholds, judge, judge_words
from titanlike.tools.data.quality.hashing import words_of

STDLIB = sysconfig.get_path("stdlib")
# Names of the texts, and patterns of their files. Files that this machine lacks are left out.
TEXTS = {
    "Python source of the standard library": [f"{STDLIB}/*.py", f"{STDLIB}/*/*.py"],
    "Markdown of Node packages": ["/usr/lib/node_modules/**/*.md", "/usr/local/lib/node_modules/**/*.md"],
    "licenses": ["/usr/share/common-licenses/*"],
    "copyright files of Debian packages": ["/usr/share/doc/*/copyright"],
    "Perl's documentation": ["/usr/share/perl/**/*.pod"],
    "Rust's books in English": [
        "~/.rustup/toolchains/*/share/doc/rust/html/{book,nomicon,reference,edition-guide}/*.html"
    ],
    "Rust by Example in Chinese, Japanese, Korean, Spanish, Russian": [
        "~/.rustup/toolchains/*/share/doc/rust/html/rust-by-example/{zh,ja,ko,es,ru}/**/*.html"
    ],
    "Vim's tutor in 30 languages": ["/usr/share/vim/vim*/tutor/tutor.*utf-8"],
    "GnuPG's help in 25 languages": ["/usr/share/gnupg/help.*.txt"],
    "samples of charset_normalizer in 12 languages": [
        "/usr/lib/google-cloud-sdk/platform/gsutil/third_party/charset_normalizer/data/*.txt"
    ],
}
MIN_CHARACTERS = 300  # shorter files are stubs


def expand(pattern: str) -> list[str]:
    """Returns the files that match a pattern with `~`, `**` and one list in braces."""
    before, brace, rest = str(Path(pattern).expanduser()).partition("{")
    names, _, after = rest.partition("}")
    patterns = [f"{before}{name}{after}" for name in names.split(",")] if brace else [before]
    return [file for each in patterns for file in sorted(glob.glob(each, recursive=True))]


def text_of(file: str) -> str:
    """Returns the text of a file; of HTML, that of its main part."""
    text = Path(file).read_text(errors="strict")
    if file.endswith(".html"):
        found = re.search(r"<main>(.*?)</main>", text, re.DOTALL)
        text = html.unescape(
            re.sub(r"<[^>]+>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", found[1] if found else ""))
        )
    return text


def measure() -> dict[str, Any]:
    """Returns how many texts of each kind the filters remove, why, and which."""
    limits = Thresholds()
    found = {}
    for name, patterns in TEXTS.items():
        reasons, examples, seen = Counter[str](), [], set[str]()
        for file in [file for pattern in patterns for file in expand(pattern)]:
            try:
                text = text_of(file)
            except (OSError, UnicodeDecodeError):
                continue
            if len(text) < MIN_CHARACTERS or text in seen:
                continue
            seen.add(text)
            content = text.encode()
            verdict = judge(text, content, limits) or next(iter(judge_words(words_of([content]), limits)))
            if verdict:
                reasons[verdict.reason] += 1
                examples.append([file, verdict.detail])
        if seen:
            found[name] = {
                "texts": len(seen), "removed": sum(reasons.values()), "reasons": dict(reasons), "examples": examples[:10]
            }  # fmt: skip
    return found
