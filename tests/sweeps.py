"""A sweep of small runs."""

from benchmarks.sweep import RECIPE

RUN = {
    "extends": str(RECIPE),
    "model": {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 96},
    "data": {"source": "synthetic"},
    "training": {"steps": 6, "seq_len": 32, "global_batch_size": 4, "local_batch_size": 2},
    "schedule": {"warmup_steps": 2},
    "validation": {"interval": 2},
    "checkpoint": {"interval": 2},
    "sample": {"tokens": 0},
    "metrics": {"interval": 1, "trackers": []},
}


SWEEP = {
    "name": "killed",
    "recipe": "recipe.toml",
    "trials": 12,
    "startup_trials": 4,
    "pruning": {"startup_trials": 2},
    "search": {
        "optimizer.lr": {"low": 1e-3, "high": 1e-1, "log": True},
        "schedule.warmup_steps": {"low": 1, "high": 5},
    },
}
