"""Trains byte-pair tokenizers. They are written as `tokenizer.json`, or as a rank file. No torch."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.sections import Tokenizer as Section
from titanlike.data.documents.data_files import File, convert_write_errors, import_optional
from titanlike.data.documents.readers import BadRecord, Fields, read_chunks
from titanlike.data.tokens.byte_pairs import byte_letters
from titanlike.data.tokens.tokenizer import SPLIT_PATTERN, build_tokenizer
from titanlike.tools.data.prepare import list_inputs
from titanlike.utils.atomic_write import atomic_write_text

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
MIN_VOCAB_SIZE = 256 + 2  # a token for each byte, and the special tokens
MAX_TEXT = 256 * 2**20  # bytes
SAMPLE = 4 * 2**20  # bytes of text that measure the compression


@dataclass(frozen=True)
class TrainingResult:
    """Statistics of a trained tokenizer."""

    vocab_size: int
    text_bytes: int  # read
    bytes_per_token: float  # measured on a sample
    skipped: int  # bad records


def train(
    inputs: Sequence[str | File],
    out: Path,
    vocab_size: int,
    *,
    fields: Fields | None = None,
    limit_bytes: int = MAX_TEXT,
    skip: bool = False,
) -> TrainingResult:
    """Trains a byte-level BPE tokenizer and writes it to `out`: a `tokenizer.json` if the name ends in .json, else a rank file.

    Of inputs larger than `limit_bytes`, the start of each file is read, in proportion to its size.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"--vocab-size = {vocab_size}: give at least {MIN_VOCAB_SIZE}, for 256 bytes and 2 special tokens"
        )
    if out.exists():
        raise UserError(f"{out} exists; remove it, or give another --out")
    config = (
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}, indent=1) + "\n"
    )
    beside = out.with_name("tokenizer_config.json")
    if out.suffix == ".json" and beside.exists() and beside.read_bytes() != config.encode():
        raise UserError(f"{beside} exists, with the settings of another tokenizer; give another --out")
    files = list_inputs(inputs)
    sampler = _TextSampler(files, fields or Fields(), limit_bytes, skip)
    trained = _train(sampler, vocab_size, str(out))
    if not sampler.size:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise UserError(f"{files[0].name}{more}: no text to train on")
    with convert_write_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix == ".json":
            atomic_write_text(beside, config)
            atomic_write_text(out, trained.to_str(pretty=True))
        else:
            atomic_write_text(out, _rank_file(trained))
    built = build_tokenizer(Section(encoding=str(out)))
    tokens = sum(len(built.encode(text)) for text in sampler.sample)
    size = sum(len(text.encode()) for text in sampler.sample)
    return TrainingResult(built.vocab_size, sampler.size, size / tokens, sampler.skipped)


class _TextSampler:
    """Iterates over text up to `limit` bytes, from all files in proportion to their sizes. Keeps a sample."""

    def __init__(self, files: Sequence[File], fields: Fields, limit: int, skip: bool) -> None:
        self._files, self._fields, self._limit, self._skip = files, fields, limit, skip
        self.size = self.skipped = self._sample_size = 0
        self.sample: list[str] = []

    def __iter__(self) -> Iterator[str]:
        unread = sum(file.size for file in self._files)
        for file in self._files:
            # A share of what is left of the limit, so that the next files get what a shorter text does not use. The size of a
            # compressed file is not the size of its text, and a web server may not tell it.
            end = self.size + int((self._limit - self.size) * (file.size / unread if file.size else 1))
            unread -= file.size
            for chunk in read_chunks(file, self._fields, bad=self._count_bad_record if self._skip else None):
                if self.size >= end:
                    break
                content = chunk.text.encode()[: end - self.size]
                text = content.decode(errors="ignore")  # without a part of a character at the end
                self.size += len(content)
                if self._sample_size < SAMPLE and text:
                    self._sample_size += len(content)
                    self.sample.append(text)
                yield text

    def _count_bad_record(self, problem: BadRecord) -> None:
        self.skipped += 1


def _train(text: _TextSampler, vocab_size: int, out: str) -> Any:
    tokenizers = import_optional("tokenizers", out)
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(iter(text), trainer)
    tokenizer.add_special_tokens([BOS, EOS])  # last, as in a rank file: both formats number the tokens alike
    return tokenizer


def _rank_file(tokenizer: Any) -> str:
    """Returns the lines of a rank file. The rank of a token is its number."""
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokens = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    encoded = [(base64.b64encode(bytes(byte_of[character] for character in token)), rank) for token, rank in tokens]
    return "".join(f"{token.decode()} {rank}\n" for token, rank in encoded)
