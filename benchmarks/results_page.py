"""The page of results, from the records of the measurements.

python -m benchmarks.results_page > docs/results.md
"""

import json
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import (
    data_batches,
    data_prepare,
    distillation,
    figures,
    float8_quality,
    gpu_plans,
    ledger,
    migration,
    optimizers,
    other_checkpoints,
    planner_validation,
    quality_results,
    save_stall,
    side_by_side,
    silent_bugs,
    soak,
    speedrun,
    startup,
    tokens_equal,
)
from benchmarks.common import ROOT, table
from tests import parity
from titanlike.tools.null_gpu import recipes
from titanlike.tools.sweep.results import table as sweep_table

RESULTS = ROOT / "benchmarks/results"
WIDTH = 132


def text(words: str) -> str:
    """Returns a paragraph in lines of the width of the other pages."""
    return textwrap.fill(" ".join(words.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def read(path: str) -> Any:
    """Returns what a file has, by its path from the root of the repository."""
    return json.loads((ROOT / path).read_text())


def result(name: str) -> Any:
    """Returns what a file of benchmarks/results has."""
    return read(f"benchmarks/results/{name}.json")


def link(name: str, label: str = "JSON") -> str:
    """Returns the link to a file of benchmarks/results."""
    return f"[{label}](../benchmarks/results/{name}.json)"


def source(name: str) -> str:
    """Returns the command that records a file, and the link to it."""
    return f"`{result(name)['command']}` ({link(name)})"


def parallelism() -> list[str]:
    """Layouts against one process."""
    dense = read("docs/parity.json")
    record = 'pytest -n 0 -m "every or not every" tests/distributed/test_{}.py{} --record docs/{}.json'
    commands = (
        f"`{record.format(test, options, name)}` ([JSON]({name}.json))"
        for test, options, name in (
            ("parity", "", "parity"),
            ("moe", " -k matches", "parity_moe"),
            ("encoder_decoders", "", "parity_encoder_decoders"),
        )
    )
    return [
        "## Parallelism against one process",
        text(f"""
            {parity.summary(dense)}. Initial weights and the order of tokens are bit-identical, and each layout loads the
            checkpoints of every other (`tests/distributed/test_layouts.py`). Compiled rows capture the graphs and generate
            no code. All rows use `optimizer.eps = 1e-4`: with 1e-8, Adam amplifies rounding, and weights can differ by
            1e-3. [`titanlike verify`](verify.md) makes the same comparison with your recipe.
        """),
        text(f"""
            Recorded by {', '.join(commands)}.
        """),
        parity.table(dense),
        "### Mixtures of experts",
        text("""
            `shared experts` is Qwen3-MoE with sigmoid scores, shared experts and the balancing bias; `qwen3_moe` has the
            auxiliary loss. Rows with QK-clip, and the MLA row with Muon, use Muon for attention only.
        """),
        parity.moe_table(read("docs/parity_moe.json")),
        "### Encoder-decoders",
        parity.moe_table(read("docs/parity_encoder_decoders.json")),
    ]  # fmt: skip


def speed() -> list[str]:
    """Throughput, memory and start-up, beside other programs."""
    whole, ladder = result("gpu/1b_bfloat16"), result("gpu/ladder_8b")
    others = figures.joined([result(f"gpu/1b_{name}") for name in ("eager", "flash", "unchunked")])
    rates = {row.partition(".")[2]: one["tokens_per_second"] for row, one in ladder["rows"].items()}
    gains = {row: f"{rates[row] / rates['baseline'] - 1:+.1%}" for row in ("compile", "float8")}
    names = ("1b_bfloat16", "1b_eager", "1b_flash", "1b_unchunked", "8b_float8", "ladder_8b")
    cpu = sorted(RESULTS.glob("cpu_*.json"))
    return [
        "## Speed",
        "### One GPU",
        text(f"""
            One {whole['limits']['device']} (141 GB), torch {whole['limits']['torch']}, on {whole['date']}. AdamW with
            float32 weights, sequences of 8,192 tokens, synthetic data. `plain` is a loop written by hand, compiled as a
            whole; `torchtitan_0_2` is version 0.2.2. `best` rows have the fastest options of a project. MFU is relative to
            the bfloat16 peak of 989 TFLOP/s, also in float8. "differ by" is the largest relative difference of a loss from
            `plain`: in this run titanlike started from other initial weights, so its losses are not compared. torchtitan
            0.3 was not timed on this GPU.
        """),
        text(f"""
            The files have the commands: {', '.join(link(f'gpu/{name}', f'`{name}`') for name in names)}.
        """),
        figures.table([whole]).strip(),
        "titanlike with other settings, one run each:",
        figures.table([others, result("gpu/8b_float8"), ladder]).strip(),
        text(f"""
            `compile` and `float8` add compilation ({gains['compile']}) and float8 matmuls ({gains['float8']} together) to
            `baseline`, which has selective activation checkpointing.
        """),
        "### Two CPU cores",
        text(f"""
            Each project trains in its own process, in turns of five steps, with the same initial weights, batches, AdamW
            and precision. `shipped` rows have the defaults of a project. "Of matmul rate" is relative to the machine's
            measured rate at the same shapes. Files: {', '.join(link(path.stem, f'`{path.stem}`') for path in cpu)}, printed
            by `python -m benchmarks.run --table FILE`.
        """),
        figures.table([json.loads(path.read_text()) for path in cpu]).strip(),
        "### Start-up",
        text(f"""
            Seconds from the command to the first line of output and to the first step of the debug recipe, on
            {result('startup_cpu')['cores']} CPU cores; medians. Recorded by {source('startup_cpu')}.
        """),
        startup.table(result("startup_cpu")),
    ]  # fmt: skip


def float8_and_optimizers() -> list[str]:
    """Losses in low precision, and what Muon gains."""
    on_gpu = result("gpu/tests_whole_gpu")
    title = "milliseconds of two blocks, 8192 tokens"
    compared, changes, _ = speedrun.table(result("speedrun_cpu")).split("\n\n")
    return [
        "## Float8 and optimizers",
        text("""
            Final validation loss of the recipes in `train_configs/study` with the debug model in bfloat16, and differences
            from it: 500 steps of 2,048 tokens, two processes on a CPU, emulated float8 in every linear layer but the head.
            Recorded by `python -m benchmarks.float8_quality --folder docs/float8` and, with the higher learning rate,
            `--folder docs/float8/high_lr --lr 1.5e-3` ([metrics](float8/baseline.jsonl)).
        """),
        float8_quality.table_of({"6e-4": ROOT / "docs/float8", "1.5e-3": ROOT / "docs/float8/high_lr"}),
        text(f"""
            Forward and backward pass of two blocks of Llama 3 8B with 8,192 tokens on one {on_gpu['gpu']}, torch
            {on_gpu['torch']}. All-gathers in float8 gain nothing on one GPU ({link('gpu/tests_whole_gpu')}).
        """),
        table(("Scaling", "Milliseconds"), ((name, f"{value:.1f}") for name, value in on_gpu[title].items())),
        "### Low-precision optimizer state",
        text("""
            Validation loss after 200 steps of AdamW with the debug model on a CPU, one run each: differences below 0.02 may
            be chance. Bytes exclude gradients. Recorded by `python -m benchmarks.optimizers --out docs/optimizers.json`
            ([JSON](optimizers.json)).
        """),
        optimizers.table(read("docs/optimizers.json")),
        "### Time to a loss",
        text(f"""
            A model of 1.7 million parameters on two CPU cores, until it reaches the final loss of 400 steps of AdamW with
            the same seed. Medians over the seeds. Rows of other projects have their optimizers, learning rates and
            schedules, not their code. Recorded by `python -m benchmarks.speedrun --runs 5 --out FILE`
            ({link('speedrun_cpu')}).
        """),
        compared,
        text("""
            The debug recipe with one change, one run with seed 0. Variants of Muon that did not help are in [the
            log](../benchmarks/LOG.md#polar-express-and-normuon).
        """),
        changes,
        text(f"""
            What `titanlike init` writes for a CPU, beside AdamW, with seed 0, by {source('speedrun_init_cpu')}:
        """),
        speedrun.table(result("speedrun_init_cpu")).partition("\n\n")[0],
    ]  # fmt: skip


def plans() -> list[str]:
    """What `titanlike plan` predicts, beside measurements."""
    found = result("planner_validation")
    order = found["order"]
    errors, classes, sources = planner_validation.markdown(found).split("\n\n")
    return [
        "## Accuracy of plans",
        text(f"""
            Published runs of other programs, predicted with the recipe that computes the same. "All sources fitted" are the
            shipped hardware files: one efficiency per GPU and precision and three constants are fitted to the rows. "Source
            not fitted" leaves out all rows of the source: expect this error for your cluster. Of {order['pairs']} pairs of
            runs in one published table that differ by more than 5%, the planner orders {order['right']} correctly. Recorded
            by {source('planner_validation')}, which has each run.
        """),
        errors,
        "A plan prints the range of its class:",
        classes,
        text("""
            Errors by source, with the source not fitted: lowest to highest. A positive error is a plan that is too fast, or
            has too much memory. Runs that are not fitted have effects that no plan models, or came later. [The
            log](../benchmarks/LOG.md#accuracy-of-plans) has the reasons of large errors.
        """),
        sources,
        "### Plans of one H200",
        text("""
            The runs [above](#one-gpu) beside their plans, by `python -m benchmarks.gpu_plans`. No planned speed is fitted
            to the rows of titanlike. `ledger` is the error of `titanlike profile --without-gpu`, whose two constants are
            fitted to these rows. The measured rows of titanlike for the 1B model include a buffer of 1 GiB that it no
            longer allocates.
        """),
        gpu_plans.table(gpu_plans.compared(sorted(gpu_plans.FOLDER.glob("*.json")))),
    ]  # fmt: skip


def bytes_of(row: dict[str, Any]) -> str:
    """Returns the peak of allocated memory of a row."""
    return f"{row['peak_memory_gib'] * 2**30:,.0f}"


def null_gpu() -> list[str]:
    """Memory and launches without a GPU."""
    peaks = []
    for name, model in (("1b_bfloat16", "Llama 3.2 1B, bfloat16"), ("8b_float8", "Llama 3 8B with 8 blocks, float8")):
        measured, counted = result(f"gpu/{name}")["rows"], result(f"null_gpu_{name}")["rows"]
        peaks += [
            (f"{model}, {row.removesuffix('.best')}", *(bytes_of(rows[row]) for rows in (measured, counted)))
            for row in measured
        ]
    rows = result("null_gpu_recipes")["rows"]
    beside = side_by_side.table({"cases": {"1b": result("null_gpu_side_by_side")["cases"]["1b"]}})
    return [
        "## Null GPU",
        text(f"""
            A null GPU is a stand-in for the CUDA driver that runs no kernels ([how to use it](performance.md)). Peak of
            allocated memory in bytes, with torch 2.11 ({link('null_gpu_1b_bfloat16', '1B')},
            {link('null_gpu_8b_float8', '8B')}).
        """),
        table(("Program", "One H200", "Null H100"), peaks),
        "### Shipped recipes",
        text(f"""
            A step of rank 0 on null H100s, with at most two micro-batches (with pipeline parallelism, two per pipeline
            rank). "Difference" is the error of the plan. Recorded by `python -m titanlike.tools.null_gpu.recipes --record
            benchmarks/results/null_gpu_recipes.json` ({link('null_gpu_recipes')}).
        """),
        recipes.table(rows),
        "### The kernels of a step",
        text(f"""
            GB that the kernels read and write on an H200, and predicted milliseconds. `torchtitan` is version 0.3.0,
            `torchtitan_0_2` 0.2.2. Recorded by {source('ledger')}.
        """),
        ledger.table(result("ledger")).strip(),
        "### Host overhead",
        text(f"""
            Launches for an H100, and the CPU time of the host in the fastest of ten steps, which varies by some tens of
            percent between runs. Recorded by `python -m benchmarks.side_by_side` ({link('null_gpu_side_by_side')}); [the
            log](../benchmarks/LOG.md#a-step-on-the-null-gpu-side-by-side) has the other models.
        """),
        beside.strip(),
    ]  # fmt: skip


PLANS = {
    "Llama": ("equal", "equal"), "Qwen3": ("equal", "**wrong** gradients of the query and key norms"),
    "Mixtral": ("equal", "equal"), "gpt-oss": ("equal", "equal"),
}  # fmt: skip
"""What `titanlike verify` says of the plans of transformers: for one batch, and for two micro-batches. A test runs them."""


def bugs() -> list[str]:
    """Published bugs that `titanlike verify` finds."""
    measured = result("silent_bugs_cpu")
    return [
        "## Silent bugs",
        text(f"""
            {len(silent_bugs.BUGS)} published cases of training that runs, prints a plausible loss, and is wrong. Each is
            reconstructed in a tiny module of `benchmarks/silent_bugs.py`; [`titanlike verify`](verify.md) finds it with the
            layout in the table, and accepts the module without the bug. The cases say nothing about the present state of
            the projects. Recorded by {source('silent_bugs_cpu')}.
        """),
        silent_bugs.table(measured),
        "### Tensor-parallel plans of transformers",
        text("""
            Tiny configurations of transformers 5.24 under their own tensor-parallel plans on two ranks (`titanlike verify
            tests/interop/tp_plans.py:qwen3 --layout tensor=2`; with micro-batches,
            `tests/interop/tp_plans_accumulated.py`):
        """),
        table(("Model", "One batch", "Two micro-batches"), ((name, *found) for name, found in PLANS.items())),
        text("""
            In Qwen3, a hook of the plan (`replicated_with_grad_allreduce`) sums the accumulated gradients of these norms
            after each backward pass, so the first micro-batch is summed over the ranks again with the second.
        """),
    ]  # fmt: skip


def imports() -> list[str]:
    """Jobs of other programs."""
    checkpoints, configs = result("other_checkpoints"), result("migration_configs")
    logits = {name: f"{found['largest_difference']:.1e}" for name, found in checkpoints["megatron"].items()}
    passed = sum(row.get("check") == "passes" for row in configs)
    number = sum(not row["file"].endswith(".config_registry") for row in configs)  # which is a module as a whole
    return [
        "## Imported jobs",
        text(f"""
            Losses of runs that continue from step 10 of the other program ([how to import a job](coming_from.md)). Both
            programs read the same batches in float32 on the CPU. Recorded by `python -m benchmarks.other_checkpoints
            --torchtitan PYTHON --torchtitan-0-2 PYTHON --megatron PYTHON` ({link('other_checkpoints')}).
        """),
        other_checkpoints.markdown(checkpoints),
        text(f"""
            The logits of a small model that Megatron-Core 0.16.1 saved differ by at most {logits['llama']} (Llama) and
            {logits['gpt']} (GPT) after the import. The import of Megatron-LM's optimizer state is not tested, because
            Megatron-LM writes it only on a GPU.
        """),
        "### Public files",
        text(f"""
            `titanlike import` on public configs and scripts, and `--check` on the number of GPUs of the job. Keys that are
            neither mapped nor listed have no effect here. Recorded by `python -m benchmarks.migration FOLDER --out
            benchmarks/results/migration.json` ({link('migration')}).
        """),
        migration.table(result("migration")),
        "### Configs of torchtitan 0.3.0",
        text(f"""
            The {number} configs of torchtitan 0.3.0 and two modules that do not import, as jobs of 64 GPUs. {passed} are
            imported, and their recipes pass `--check`. Recorded by `python -m benchmarks.migration --torchtitan PYTHON
            --out benchmarks/results/migration_configs.json` ({link('migration_configs')}).
        """),
        migration.table_of_models(configs),
    ]  # fmt: skip


def data() -> list[str]:
    """Tokenization, batches and filters."""
    planted, times, peers, good = quality_results.table(result("data_quality")).split("\n\n")
    prepare, memory = data_prepare.table(result("data_prepare_cpu")).split("\n\n")
    return [
        "## Data",
        text(f"""
            Throughput of `titanlike data prepare` on two CPU cores, relative to a loop over the tokenizers library, to
            nanochat's way and to datatrove. For DeepSeek-V3 and Gemma 3, `prepare` uses the library and starts later.
            Recorded by {source('data_prepare_cpu')}.
        """),
        prepare,
        memory,
        text(f"""
            Batches of token shards, built on one core from files in the page cache, by `python -m benchmarks.data_batches
            --out benchmarks/results/data_batches_cpu.json` ({link('data_batches_cpu')}):
        """),
        data_batches.table(result("data_batches_cpu")),
        text(f"""
            Documents whose tokens differ between tiktoken (the first three) and the tokenizers library, by
            {source('tokens_equal')}:
        """),
        tokens_equal.table(result("tokens_equal")),
        "### Data quality",
        text(f"""
            What all stages remove of a generated corpus of 10 GB with planted copies, low-quality text and boilerplate.
            `fresh` and `related` documents should stay. Recorded by {source('data_quality')}; [the
            log](../benchmarks/LOG.md#data-quality) has the method.
        """),
        planted,
        times,
        "datatrove and titanlike on the first 500 MB, with the same settings:",
        peers,
        "Good text that the default filters remove:",
        good,
    ]  # fmt: skip


def sweeps_and_recovery() -> list[str]:
    """A sweep, kills at random times, and the cost of a save."""
    sweep = sweep_table(result("sweep_cpu")["results"]).split("\n\n")[::2]  # without the reasons of pruned trials
    kills = sum(len(run["kills"]) for run in result("soak_cpu")["runs"])
    return [
        "## Sweeps and recovery",
        text(f"""
            A sweep of the debug recipe with pruning ([how to sweep](experiments.md)), as it is printed
            ({link('sweep_cpu')}):
        """),
        "```\n" + "\n\n".join(sweep) + "\n```",
        "### Kills at random times",
        text(f"""
            A small model trains on four processes: on the local disk, on an emulated S3, and with another layout at each
            start. After each of {kills} kills, all checkpoints are verified and all steps are compared with an undisturbed
            run. Recorded by {source('soak_cpu')}.
        """),
        soak.table(result("soak_cpu")),
        "### Cost of a save",
        text(f"""
            Beside `torch.distributed.checkpoint` (DCP), with the same tensors in the same processes, on two CPU cores. Both
            fsync all files; titanlike also hashes them and commits atomically. Recorded by {source('save_stall_cpu')}.
        """),
        save_stall.table(result("save_stall_cpu")),
    ]  # fmt: skip


def post_training() -> list[str]:
    """Distillation, preferences and a published model, beside other libraries."""
    taught, preferences = result("distillation_cpu"), result("dpo_trl_cpu")
    ratios = ", ".join(f"{seed['time_ratio']:.2f}" for seed in taught["seeds"])
    reached = ", ".join(str(seed["reached_at_step"]) for seed in taught["seeds"])
    differences = {
        loss: max(value for key, value in preferences[loss]["largest_difference"].items() if key == "loss")
        for loss in ("dpo", "ipo")
    }
    return [
        "## Post-training",
        text(f"""
            A student of 0.36 million parameters on {taught['bytes']['student'] / 1000:.0f} kB of Python code, alone and
            with a teacher of five times its size that has seen more text: lowest validation cross-entropy, and median over
            the seeds. With the teacher, the student reaches the loss of {distillation.STEPS} steps alone at steps
            {reached}; all {distillation.STEPS // 2} steps take {ratios} of the time, without the teacher's own training.
            Recorded by {source('distillation_cpu')}.
        """),
        distillation.table(taught),
        text(f"""
            In five steps from equal weights and pairs, losses of DPO differ from TRL {preferences['versions']['trl']}'s by
            at most {differences['dpo']:.0e}, and of IPO by {differences['ipo']:.0e}. Recorded by {source('dpo_trl_cpu')}.
        """),
        text("""
            Gemma 3 270M from its published packages to an exported adapter, beside transformers and PEFT, is in [the
            log](../benchmarks/LOG.md#a-published-model-gemma-3-270m).
        """),
    ]  # fmt: skip


SECTIONS: Sequence[Callable[[], list[str]]] = (
    parallelism, speed, float8_and_optimizers, plans, null_gpu, bugs, imports, data, sweeps_and_recovery, post_training,
)  # fmt: skip


def page(sections: Sequence[Callable[[], list[str]]] = SECTIONS) -> str:
    """Returns the page."""
    head = (
        "<!-- Printed by `python -m benchmarks.results_page > docs/results.md`; edit benchmarks/results_page.py. -->",
        "# Results",
        text("""
            What was measured, each table from a JSON file that the command beside it records. [Status](index.md#status)
            lists which parts have run on which hardware. [The log](../benchmarks/LOG.md) has methods, experiments and
            negative results. Figures from two CPU cores compare programs; they do not predict the speed of GPUs.
        """),
    )  # fmt: skip
    return "\n\n".join([*head, *(block for section in sections for block in section())]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
