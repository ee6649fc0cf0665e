"""Random job configs of torchtitan and command lines of Megatron-LM: each becomes a recipe that loads, or is refused."""

import functools
import json
import random
import time
from pathlib import Path
from typing import Any

import titanlike.optim.schedule  # noqa: F401  imports torch, before time is measured
from tests.fuzz import harness
from tests.fuzz.command_line import CPU_LIMIT, assert_sentences
from tests.launching import nested
from tests.torchtitan_configs import config
from titanlike.config import UserError
from titanlike.recipe import PretrainRecipe, load
from titanlike.tools.migration import megatron, torchtitan
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.migration.formats import convert
from titanlike.tools.migration.megatron_options import KEYS as OPTIONS
from titanlike.tools.migration.torchtitan_keys import KEYS

VALUES: list[Any] = [
    *(0, 1, 2, 3, 8, -1, -5, 10**6, 10**12, 10**20, 0.5, 1e-9, 1e300, True, False, "", "x", "layers.1", "op", "2", "1", "full"),
    *("none", "c4", "\n[run]\nseed = 5", "é\u2028", [], ["x\n"], ["float8"], ["output"], [["layers.0"], ["layers.1"]], [1]),
]  # fmt: skip
WORDS = (
    *("0", "1", "2", "3", "8", "-1", "100000000000", "1e-9", "0.5", "$X", "x", "", "rope", "RMSNorm", "WSD", "cosine", "full"),
    *("'a b'", "1 1 1", "4 4 100", "0:4 20480:8", "$(x)", "${Y:-3}", "'"),
)  # fmt: skip
SHELL = "\"'${}()|&;#\\\n`<>[] "
BASE = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --swiglu --normalization RMSNorm --bf16 "
    "--lr 1e-3 --disable-bias-linear --position-embedding-type rope --seq-length 512 --vocab-size 1000 --micro-batch-size 1 "
    "--train-iters 100 --global-batch-size 16"
)


def job_config(rng: random.Random) -> dict[str, Any]:
    """Returns the tables of a job config, most of whose values have the right type."""
    given: dict[str, Any] = {
        "model.flavor": rng.choice(["8B", "debugmodel"]),
        "training.global_batch_size": rng.choice([8, -1]),
        "training.steps": rng.choice([10, 1000]),
    }
    for key in rng.sample(sorted(KEYS), rng.randint(0, 12)):
        same = [value for value in VALUES if type(value) is type(KEYS[key].default)]
        given[key] = rng.choice(same if same and rng.random() < 0.7 else VALUES)
    return nested(given)


def python_config(rng: random.Random) -> dict[str, Any]:
    """Returns a config of 0.3, in which some values are others, or missing."""
    values = config(rng.choice(["llama3", "qwen3"]), 2)
    for _ in range(rng.randint(0, 3)):
        node: Any = values
        while isinstance(
            inner := node[key := rng.choice([*node] if isinstance(node, dict) else range(len(node)))], dict | list
        ):
            if not inner or rng.random() < 0.1:
                break
            node = inner
        if rng.random() < 0.2:
            del node[key]
        else:
            node[key] = rng.choice(VALUES)
        values["training"] = values.get("training") or {"steps": 10}
    return values


def command_line(rng: random.Random) -> str:
    """Returns a command line with random options, and characters of the shell at random places."""
    text = BASE + "".join(f" {key} {rng.choice(WORDS)}" for key in rng.sample(sorted(OPTIONS), rng.randint(0, 8)))
    for _ in range(rng.randint(0, 2)):
        position = rng.randrange(len(text))
        text = text[:position] + rng.choice(SHELL) + text[position:]
    return text


def foreign_job(rng: random.Random, folder: Path) -> str:
    """Converts a file, and returns what became of it."""
    gpus, start = rng.choice([None, 8, 7]), time.process_time()
    job: Conversion | None
    try:
        kind = rng.randrange(3)
        if kind == 0:
            job = torchtitan.convert("job.toml", job_config(rng), gpus)
        elif kind == 1:
            (folder / "job.json").write_text(json.dumps(python_config(rng)))
            job = convert(folder / "job.json", gpus)
        else:
            job = megatron.convert("job.sh", command_line(rng), gpus, trust=True)
        if job is None:
            return "no job"
        assert job.mapped.keys() | job.not_mapped.keys() == job.given.keys()
        path = folder / "recipe.toml"
        path.write_text(job.text())
        load(PretrainRecipe, path)
    except UserError as error:
        assert_sentences("\n".join(f"error: {line}" for line in str(error).split("\n")))
        return "refused"
    finally:
        assert time.process_time() - start < CPU_LIMIT, "the conversion took too long"
    return job.program


@harness.tiers
def test_jobs_become_recipes_or_are_refused(further: bool) -> None:
    found = harness.run_cases(foreign_job, 50, further)
    assert {"refused", "Megatron-LM", "torchtitan 0.2", "torchtitan 0.3"} <= found.keys()


main = functools.partial(harness.main, {foreign_job: 1})

if __name__ == "__main__":
    main()
