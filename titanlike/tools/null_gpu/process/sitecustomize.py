"""Runs in each Python process on a null device, at its start: records what the process does."""

import os
import sys
from pathlib import Path

if "NULL_GPU_FOLDER" in os.environ:
    # Last, and for these imports only: the process may be another environment's, which must not find the packages of this one.
    root = str(Path(__file__).parents[4])
    sys.path.append(root)
    from titanlike.tools.null_gpu import one_rank, recorder

    sys.path.remove(root)
    recorder.start()
    if "NULL_GPU_RANKS" in os.environ:
        one_rank.start()
