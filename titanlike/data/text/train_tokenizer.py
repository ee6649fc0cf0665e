"""Byte-pair tokenizers, trained on text: as `tokenizer.json`, or as a rank file, which is faster to encode with. No torch."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.prepare.work_units import write_whole, writing
from titanlike.data.text.documents import BadRecord, Fields, read_pieces
from titanlike.data.text.files import File, list_files, needed
from titanlike.data.text.tokenizer import WORDS, build_tokenizer

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")
FEWEST = 256 + len(SPECIAL)  # a token for each byte, and the special ones
LIMIT = 256 * 2**20  # bytes of text
SAMPLE = 4 * 2**20  # bytes of text that are encoded at the end, to tell how well it does


@dataclass(frozen=True)
class Trained:
    """What training has come to."""

    vocab_size: int
    text_bytes: int  # read
    bytes_per_token: float  # of some of the text
    skipped: int  # bad records


def train(
    inputs: Sequence[str | File],
    out: Path,
    vocab_size: int,
    *,
    fields: Fields | None = None,
    limit_bytes: int = LIMIT,
    skip: bool = False,
) -> Trained:
    """Train a byte-level BPE on the text of files, and write it: as `tokenizer.json` if the name ends in .json, else as a rank
    file. Of more text than the limit, each file gives a share from its beginning."""
    if vocab_size < FEWEST:
        raise UserError(
            f"--vocab-size = {vocab_size}: give at least {FEWEST}, one for each byte and {len(SPECIAL)} special ones"
        )
    if out.exists():
        raise UserError(f"{out} is there already; remove it, or give another --out")
    files = [file for place in inputs for file in ([place] if isinstance(place, File) else list_files(place, "INPUT"))]
    text = _Text(files, fields or Fields(), limit_bytes, skip)
    trained = _train(text, vocab_size, str(out))
    if not text.size:
        raise UserError(
            f"{files[0].name}: there is no text to train on in {'it' if len(files) == 1 else 'these files'}"
        )
    with writing(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".json":
            begin, end = SPECIAL
            about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
            write_whole(out.with_name("tokenizer_config.json"), json.dumps(about, indent=1) + "\n")
            write_whole(out, trained.to_str(pretty=True))
        else:
            write_whole(out, _ranks(trained))
    built = build_tokenizer(Section(encoding=str(out)))
    tokens = sum(len(built.encode(piece)) for piece in text.sample)
    size = sum(len(piece.encode()) for piece in text.sample)
    return Trained(built.vocab_size, text.size, size / tokens, text.skipped)


class _Text:
    """Pieces of text up to a limit, evenly from all files; some of them are kept."""

    def __init__(self, files: Sequence[File], fields: Fields, limit: int, skip: bool) -> None:
        self.files, self.fields, self.skip = files, fields, skip
        self.share = min(1.0, limit / max(sum(file.size for file in files), 1))
        self.limit = limit
        self.size = self.skipped = self._kept = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            left = file.size * self.share if file.size else self.limit
            for piece in read_pieces(file, self.fields, bad=self._bad if self.skip else None):
                if self.size >= self.limit:
                    return
                size = len(piece.text.encode())
                self.size += size
                if self._kept < SAMPLE and piece.text:
                    self._kept += size
                    self.sample.append(piece.text)
                yield piece.text
                left -= piece.size
                if left <= 0:
                    break

    def _bad(self, problem: BadRecord) -> None:
        self.skipped += 1


def _train(text: _Text, vocab_size: int, out: str) -> Any:
    """A tokenizer of the library. Its special tokens come last, as in a rank file, so that both number alike."""
    tokenizers = needed("tokenizers", out)
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trained = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(iter(text), trainer)
    trained.add_special_tokens(list(SPECIAL))
    return trained


def _ranks(trained: Any) -> str:
    """The lines of a rank file: the order of the merges is that of the numbers."""
    values = _byte_of_sign()
    tokens = sorted(trained.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    spelt = [(bytes(values[sign] for sign in token), number) for token, number in tokens]
    return "".join(f"{base64.b64encode(token).decode()} {number}\n" for token, number in spelt)


def _byte_of_sign() -> dict[str, int]:
    """What the signs stand for that byte-level tokenizers spell bytes with: those that can be seen for themselves, the others
    for what comes from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [value for value in range(256) if value not in seen]
    return {chr(value): value for value in seen} | {chr(256 + place): value for place, value in enumerate(others)}
