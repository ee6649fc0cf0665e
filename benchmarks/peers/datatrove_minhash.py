"""Near-duplicate removal by datatrove, for `benchmarks/data_quality.py`.

Runs in an environment with datatrove, orjson, xxhash, regex and tokenizers, without titanlike. datatrove splits English into words
with spaCy. Here it splits at white space, which is faster and, for the words of the corpus, the same.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


class Whitespace:
    """Splits at white space."""

    def word_tokenize(self, text: str) -> list[str]:
        """Returns the words."""
        return text.split()


def deduplicate(corpus: Path, folder: Path, workers: int) -> dict[str, float]:
    """Removes near duplicates in datatrove's four passes, with the settings of FineWeb. Returns the seconds of each."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup import minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers.jsonl import JsonlWriter

    minhash.load_word_tokenizer = lambda language: Whitespace()
    config = minhash.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    tasks = len(list(corpus.glob("*.jsonl")))

    def reader() -> Any:
        return JsonlReader(str(corpus), glob_pattern="*.jsonl")

    names = {name: str(folder / name) for name in ("signatures", "buckets", "remove", "kept")}
    passes = {
        "signatures": ([reader(), minhash.MinhashDedupSignature(names["signatures"], config)], tasks),
        "buckets": ([minhash.MinhashDedupBuckets(names["signatures"], names["buckets"], config=config)], 14),
        "clusters": ([minhash.MinhashDedupCluster(names["buckets"], names["remove"], config=config)], 1),
        "filter": (
            [reader(), minhash.MinhashDedupFilter(names["remove"]), JsonlWriter(names["kept"], compression=None)],
            tasks,
        ),
    }
    seconds = {}
    for name, (pipeline, count) in passes.items():
        start = time.perf_counter()
        # Forked workers have the tokenizer above.
        LocalPipelineExecutor(
            pipeline,
            tasks=count,
            workers=min(workers, count),
            logging_dir=str(folder / f"logs-{name}"),
            start_method="fork",
        ).run()
        seconds[name] = time.perf_counter() - start
    return seconds


if __name__ == "__main__":
    print(json.dumps(deduplicate(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
