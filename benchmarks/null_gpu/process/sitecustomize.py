"""Runs in each Python process on a null device, at its start: records what the process does."""

import os

if "NULL_GPU_FOLDER" in os.environ:
    from benchmarks.null_gpu import recorder

    recorder.start()
    if "NULL_GPU_RANKS" in os.environ:
        from benchmarks.null_gpu import one_rank

        one_rank.start()
