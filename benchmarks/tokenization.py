"""Ways to tokenize JSONL files into a file of tokens, which `benchmarks.data_prepare` compares. Each runs in a new process:

    python benchmarks/tokenization.py {library,nanochat,datatrove} FOLDER OUT TOKENIZER.JSON WORKERS

`library` is a loop over `encode_batch_fast` of the tokenizers library, with a thread for each worker. `nanochat` encodes as its
data loader does, with `encode_ordinary_batch` of tiktoken, here with the encoding that titanlike reads first. `datatrove` is its
`DocumentTokenizer`, with a process for each file.
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any


def batches(folder: Path, size: int) -> Iterator[list[str]]:
    """Yields the texts of all files."""
    for file in sorted(folder.glob("*.jsonl")):
        with file.open() as lines:
            while batch := [json.loads(line)["text"] for line in islice(lines, size)]:
                yield batch


def library(folder: Path, out: Path, tokenizer: Path, workers: int) -> None:
    """Encodes batches of 512 texts."""
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    import numpy as np
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.encode_special_tokens = True
    with (out / "tokens").open("wb") as stream:
        for batch in batches(folder, 512):
            for encoding in encoder.encode_batch_fast(batch, add_special_tokens=False):
                np.array([*encoding.ids, 0], np.uint32).tofile(stream)


def nanochat(folder: Path, out: Path, tokenizer: Path, workers: int) -> None:
    """Encodes batches of 128 texts."""
    import numpy as np

    from titanlike.config.sections import Tokenizer
    from titanlike.data.tokens.tokenizer import build_tokenizer

    codec: Any = build_tokenizer(Tokenizer(encoding=str(tokenizer))).codec
    with (out / "tokens").open("wb") as stream:
        for batch in batches(folder, 128):
            for ids in codec._tiktoken.encoding.encode_ordinary_batch(batch, num_threads=workers):
                ids.insert(0, 0)
                np.array(ids, np.uint32).tofile(stream)


def datatrove(folder: Path, out: Path, tokenizer: Path, workers: int) -> None:
    """Runs a pipeline with as many tasks as there are files."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(folder), glob_pattern="*.jsonl"),
        DocumentTokenizer(str(out), tokenizer_name_or_path=str(tokenizer), shuffle_documents=False),
    ]
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=str(out / "log")).run()


if __name__ == "__main__":
    way, *paths, number = sys.argv[1:]
    sys.path[0] = str(Path(__file__).parents[1])
    {"library": library, "nanochat": nanochat, "datatrove": datatrove}[way](*map(Path, paths), int(number))
