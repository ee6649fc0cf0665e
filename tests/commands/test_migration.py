"""Job configs of torchtitan, command lines of Megatron-LM and configs of Hugging Face as recipes.

Expected values of the other programs were computed with torchtitan 0.2.2 and with Megatron-LM's main branch of August 2026.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from tests.interop.models import PUBLISHED
from tests.launching import Cli, nested
from titanlike.config import UserError
from titanlike.config.optimizer import Schedule
from titanlike.models.llama.config import LlamaConfig
from titanlike.models.llama.model import Llama
from titanlike.optim.optimizer import build_optimizer
from titanlike.optim.schedule import learning_rate
from titanlike.recipe import PretrainRecipe, load
from titanlike.recipe.load import read
from titanlike.run.checks import check_recipe
from titanlike.tools.migration import megatron, script, torchtitan
from titanlike.tools.migration.conversion import Conversion
from titanlike.tools.migration.formats import convert
from titanlike.tools.migration.megatron_schedule import MegatronSchedule
from titanlike.tools.migration.script import landlock_version, run_script
from titanlike.tools.migration.torchtitan import torchtitan_learning_rate
from titanlike.tools.migration.torchtitan_keys import KEYS

JOB = """
[job]
dump_folder = "out"
description = "a job"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "assets"
[training]
local_batch_size = 2
seq_len = 4096
steps = 100
dataset = "c4"
"""
LLAMA = """
TP=2
MODEL=(--num-layers 4 --hidden-size 256 --num-attention-heads 8 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --seq-length 512 --untie-embeddings-and-output-weights)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${MODEL[@]} --tensor-model-parallel-size $TP --vocab-size 1100 \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok --micro-batch-size 1 --global-batch-size 16 --train-iters 100 \\
    --lr 1e-3 --bf16 --use-distributed-optimizer --sequence-parallel --data-path a --hidden-dropout 0 --attention-dropout 0"""


def recipe_of(job: Conversion, folder: Path) -> PretrainRecipe:
    path = folder / "converted.toml"
    path.write_text(job.text())
    return load(PretrainRecipe, path)


def titan(folder: Path, text: str = "", *, gpus: int | None = 8, base: str = JOB) -> tuple[Conversion, PretrainRecipe]:
    """Converts a job config, of which `text` has further lines in its last table, or tables."""
    path = folder / "job.toml"
    path.write_text(base + text)
    job = convert(path, gpus)
    assert job is not None
    return job, recipe_of(job, folder)


def mega(folder: Path, *options: str, gpus: int | None = None, base: str = LLAMA) -> tuple[Conversion, PretrainRecipe]:
    job = megatron.convert("job.sh", f"{base} {' '.join(options)}\n", gpus)
    assert job is not None
    return job, recipe_of(job, folder)


# torchtitan


def test_every_key_of_torchtitan_is_in_the_recipe_or_named() -> None:
    given: dict[str, Any] = {key: known.default for key, known in KEYS.items() if known.default is not None}
    given |= {"model.flavor": "8B", "training.dataset": "c4"}
    job = torchtitan.convert("job.toml", nested(given), 8)
    assert set(job.mapped) | set(job.not_mapped) == set(given) and not set(job.mapped) & set(job.not_mapped)
    assert all(f"#   {key} = " in job.text() for key in job.not_mapped)
    # At its default, no key has an effect that is lost, but that every second block is recomputed.
    assert {one.key for one in job.not_mapped.values() if one.changes} == {"activation_checkpoint.selective_ac_option"}


@pytest.mark.parametrize(
    ("name", "flavor", "num_parameters"),
    [
        ("llama3", "debugmodel", 6_163_712), ("llama3", "8B", 8_030_261_248),
        ("llama3", "8B_flex", 8_030_261_248), ("llama3", "70B", 70_553_706_496), ("llama3", "405B", 405_853_388_800),
        ("qwen3", "debugmodel", 31_987_968), ("qwen3", "0.6B", 596_049_920), ("qwen3", "1.7B", 1_720_574_976),
        ("qwen3", "4B", 4_022_468_096), ("qwen3", "8B", 8_190_735_360), ("qwen3", "14B", 14_768_307_200),
        ("qwen3", "32B", 32_762_123_264), ("qwen3", "debugmodel_moe", 315_758_848),
        ("qwen3", "30B-A3B", 30_532_122_624), ("qwen3", "235B-A22B", 235_093_634_560),
    ],
)  # fmt: skip
def test_flavors_have_the_parameters_of_torchtitans_models(
    tmp_path: Path, name: str, flavor: str, num_parameters: int
) -> None:
    base = JOB.replace('"llama3"', f'"{name}"').replace('"8B"', f'"{flavor}"')
    assert titan(tmp_path, base=base)[1].model.num_parameters() == num_parameters


@pytest.mark.parametrize(
    ("steps", "section", "expected"),
    [
        (10, Schedule(2, "linear", 0.8, 0.0), [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (10, Schedule(2, "cosine", 0.5, 0.1), [0.5, *[1.0] * 5, 0.9140576475, 0.6890576475, 0.4109423525, 0.1859423525]),
        (8, Schedule(3, "sqrt", 0.0, 0.1), [1 / 3, 2 / 3, 1.0, 1.0, 0.5975077641, 0.4307900212, 0.3028629977, 0.1950155281]),
        (5, Schedule(5, "none", 0.0, 0.0), [0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)  # fmt: skip
def test_torchtitans_learning_rate(steps: int, section: Schedule, expected: list[float]) -> None:
    found = [torchtitan_learning_rate(step, steps, section) for step in range(1, steps + 1)]
    assert found == pytest.approx(expected)


def test_the_difference_of_the_schedules_is_stated(tmp_path: Path) -> None:
    job, recipe = titan(tmp_path, "[lr_scheduler]\nwarmup_steps = 20\nmin_lr_factor = 0.1\ndecay_ratio = 0.4\n")
    assert recipe.schedule == Schedule(20, "linear", 0.4, 0.1)
    ours = [learning_rate(step, 100, 1.0, recipe.schedule) for step in range(1, 101)]
    theirs = [torchtitan_learning_rate(step, 100, recipe.schedule) for step in range(1, 101)]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) == pytest.approx(0.9 / 40)
    assert ours[:60] == theirs[:60]
    assert any("the largest difference is 2.25% of the peak" in text for text in job.differences)
    # Without a decay there is none. The warmup is limited to the run, as there.
    job, recipe = titan(tmp_path, "[lr_scheduler]\nwarmup_steps = 200\n")
    assert recipe.schedule.warmup_steps == 100 and recipe.schedule.decay == "none"
    assert not any(text.startswith("learning rate") for text in job.differences)


def test_norms_have_weight_decay_as_in_torchtitan(tmp_path: Path) -> None:
    _, recipe = titan(tmp_path, "[optimizer]\nweight_decay = 0.3\n")
    model = Llama(LlamaConfig(dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, vocab_size=64))
    optimizer = build_optimizer(model, recipe.optimizer)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decays[id(p)] for p in model.parameters()} == {0.3}
    assert titan(tmp_path, "[optimizer]\nweight_decay = 0.0\n")[1].optimizer.groups == ()


def test_the_batch_of_torchtitan_grows_with_the_gpus(tmp_path: Path) -> None:
    tensor = "[parallelism]\ntensor_parallel_degree = 4\n"
    for gpus, batch in ((8, 16), (64, 128)):
        job, recipe = titan(tmp_path, gpus=gpus)
        assert recipe.training.global_batch_size == batch and job.batch_grows
    assert titan(tmp_path, tensor, gpus=64)[1].training.global_batch_size == 32
    assert titan(tmp_path, "global_batch_size = 96\n", gpus=None)[1].training.global_batch_size == 96
    with pytest.raises(UserError, match="give the number of GPUs of the job, such as --gpus 8"):
        titan(tmp_path, gpus=None)
    with pytest.raises(UserError, match="needs a multiple of 4 GPUs, not 6"):
        titan(tmp_path, tensor, gpus=6)
    # A layout in the file is enough.
    text = "[parallelism]\ndata_parallel_shard_degree = 8\n"
    assert titan(tmp_path, text, gpus=None)[1].training.global_batch_size == 16


def test_a_pipeline_of_torchtitan(tmp_path: Path) -> None:
    text = '[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = "{}"\n'
    _, recipe = titan(tmp_path, text.format("1F1B"), gpus=8)
    assert recipe.parallelism.pipeline_split == (8, 9, 8, 7) and recipe.training.local_batch_size == 1
    _, recipe = titan(tmp_path, text.format("interleaved1F1B"), gpus=8)
    assert recipe.parallelism.pipeline_split == (4, 5, 4, 4, 4, 4, 4, 3)
    with pytest.raises(UserError, match="'LoopedBFS' is not supported; use one of 1F1B"):
        titan(tmp_path, text.format("LoopedBFS"))


def test_float8_of_torchtitan(tmp_path: Path) -> None:
    base = JOB.replace('flavor = "8B"', 'flavor = "8B"\nconverters = ["{}"]')
    table = "[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
    table += "filter_fqns = ['output', 'attention.wk', 'router.gate']\n"
    job, recipe = titan(tmp_path, table, base=base.format("quantize.linear.float8"))
    found = recipe.float8
    assert (found.scaling, found.all_gather, found.head) == ("tensorwise", True, False)
    assert found.layers == ("*",) and found.skip == ("attention.wk",) and "router.gate" in job.comments["float8.skip"]
    job, recipe = titan(tmp_path, table)
    assert recipe.float8.scaling == "none" and len([key for key in job.not_mapped if "float8" in key]) == 2
    mx = base.format("quantize.linear.mx") + "[quantize.linear.mx]\nfilter_fqns = ['output']\n"
    assert titan(tmp_path, base=mx)[1].float8.scaling == "mxfp8"


def test_validation_and_activation_checkpointing_of_torchtitan(tmp_path: Path) -> None:
    text = "[validation]\nenable = true\nfreq = 20\nsteps = 4\nlocal_batch_size = 8\nseq_len = 2048\n"
    job, recipe = titan(tmp_path, text + '[activation_checkpoint]\nselective_ac_option = "op"\n')
    assert (recipe.validation.interval, recipe.validation.batches) == (20, 16)  # 4 x 8 x 8 sequences in batches of 16
    assert recipe.data.validation_path.endswith("c4-validation.*.json.gz")
    assert {one.key for one in job.not_mapped.values() if one.changes} == {"validation.seq_len"}
    _, recipe = titan(tmp_path, '[activation_checkpoint]\nselective_ac_option = "1"\n')
    assert recipe.activation_checkpoint.mode == "full"


# Megatron-LM


def test_a_llama_of_megatron(tmp_path: Path) -> None:
    job, recipe = mega(tmp_path)
    assert set(job.mapped) | set(job.not_mapped) == set(job.given) and len(job.given) == 23 and job.num_gpus == 8
    model = recipe.model
    assert isinstance(model, LlamaConfig)
    # 4 x 256 x 2/3; 128 x 2 divides it.
    assert model.ffn_dim == 640 and model.vocab_size == 1280 and not model.tied_head
    assert (model.num_kv_heads, model.rope_theta, model.norm_eps) == (8, 10000.0, 1e-5)
    assert (recipe.optimizer.beta2, recipe.optimizer.weight_decay, recipe.run.seed) == (0.999, 0.01, 1234)
    assert (recipe.schedule.decay, recipe.schedule.min_ratio, recipe.schedule.warmup_steps) == ("linear", 0.0, 0)
    assert recipe.parallelism.reshard_after_forward == "never" and recipe.parallelism.shard == -1
    assert not recipe.checkpoint.enabled and recipe.training.compute_dtype == "bfloat16"
    check_recipe(recipe, 8)
    assert job.plan_changes == {"overlaps": False, "async_tensor_share": 0.0}


def test_models_of_megatron(tmp_path: Path) -> None:
    assert mega(tmp_path, "--qk-layernorm")[1].model.name == "qwen3"
    assert mega(tmp_path, "--add-qkv-bias")[1].model.name == "qwen2"
    experts = "--num-experts 8 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    _, recipe = mega(tmp_path, experts)
    assert recipe.model.name == "mixtral" and recipe.model.num_experts == 8
    # One loss of all four blocks, whose loads sum to two, has the weight of four losses whose loads sum to one.
    assert asdict(cast(Any, recipe.model))["balance_loss"] == pytest.approx(0.01 * 4 / 2)
    gpt = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 1 "
    )
    gpt += (
        "--global-batch-size 8 --train-samples 800 --lr 1e-3 --use-distributed-optimizer --vocab-file v --merge-file m"
    )
    _, recipe = mega(tmp_path, base=gpt)
    assert recipe.model.name == "gpt" and recipe.model.vocab_size == 50304 and recipe.model.dropout == 0.1
    assert recipe.training.steps == 100 and recipe.training.compute_dtype == "float32"
    for option, message in (
        ("--position-embedding-type rope", "GELU, LayerNorm, RoPE: no model of this toolkit has these parts"),
        ("--ffn-hidden-size 100", "--ffn-hidden-size = 100, but gpt of this toolkit has 256"),
        ("--lr x", "--lr = 'x' is not a number"),
    ):
        with pytest.raises(UserError, match=message):
            mega(tmp_path, option, base=gpt)


def test_megatrons_learning_rate() -> None:
    schedule = MegatronSchedule(3, 15, "cosine", 0.1)
    expected = {1: 0.0, 2: 1 / 3, 4: 1.0, 5: 0.9846666218, 8: 0.775, 10: 0.55, 15: 0.1153333782, 16: 0.1, 20: 0.1}
    assert {step: schedule.rate(step) for step in expected} == pytest.approx(expected)


def test_batch_ramps_of_megatron(tmp_path: Path) -> None:
    _, recipe = mega(tmp_path, "--rampup-batch-size 4 4 120", "--train-iters 1000")
    # 4, 8 and 12 sequences for 40 samples each, then 16.
    assert recipe.training.batch_ramp == ((10, 4), (5, 8), (4, 12)) and recipe.training.global_batch_size == 16
    _, recipe = mega(tmp_path, '--step-batch-size-schedule "0:4 20480:8 61440:16"')
    assert recipe.training.batch_ramp == ((10, 4), (10, 8))  # sequences of 512 tokens


def test_variables_of_a_script(tmp_path: Path) -> None:
    message = r"--tensor-model-parallel-size = '' is not an integer; the script does not set TP: give --env NAME=VALUE"
    with pytest.raises(UserError, match=message):
        mega(tmp_path, base=LLAMA.replace("TP=2", ""))
    job, _ = mega(tmp_path, "--unheard-of 3", "--seq-lenght 5")
    assert job.not_mapped["--unheard-of"].reason == "unknown to Megatron-LM"
    assert job.not_mapped["--seq-lenght"].reason.endswith("did you mean --seq-length?")
    script = f'if [ -n "$KEY" ]; then EXTRA="--wandb-project $KEY"; fi\n{LLAMA} ${{EXTRA:-}} $1'
    job, _ = mega(tmp_path, base=script)
    assert "--wandb-project" not in job.given
    assert "the script reads variables that are not set as empty: KEY, 1; --env NAME=VALUE sets one" in job.differences
    named = megatron.convert("job.sh", script, 8, env={"KEY": "mine"})
    assert named is not None and named.tables["metrics"]["project"] == "mine"
    with pytest.raises(UserError, match=r"no start of Megatron-LM in it .*: unexpected end of file; exit"):
        mega(tmp_path, base="if true; then " + LLAMA)


SCRIPT = r"""
#!/bin/bash
set -e
export PATH=%(programs)s:$PATH
cd /no/such/folder && mkdir -p /no/such/logs
[ -f helper.sh ] || exit 3
source helper.sh
never() { torchrun pretrain_gpt.py --num-layers 1 --never called by anything at all; }
case $HELP in me) ARGS=(--a "two words");; *) ARGS=();; esac
for i in 1 2; do ARGS+=(--layer$i $((i * 2))); done
false && ARGS+=(--no) || ARGS+=(--yes)
cat > list << EOF
--b $HELP
EOF
srun --ntasks 2 bash -c "/opt/conda/bin/torchrun pretrain_gpt.py $(cat list)" > log 2>&1
echo secret > %(outside)s || true
/bin/sh -c 'echo secret > %(outside)s' || true
exec $CONDA/bin/python -u /workspace/pretrain_gpt.py "${ARGS[@]}" --x "${NNODES}" > log 2>&1
"""


def test_a_script_is_run_by_bash_which_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    (tmp_path / "job").mkdir()
    (tmp_path / "job/helper.sh").write_text("HELP=me\n")
    (tmp_path / "torchrun").write_text("#!/bin/sh\necho started > log\nexit 1\n")
    (tmp_path / "torchrun").chmod(0o755)
    text = SCRIPT % {"outside": outside, "programs": tmp_path}
    found = run_script("job.sh", text, tmp_path / "job", {}, trust=not landlock_version())
    expected = [
        *["python", "-u", "pretrain_gpt.py", "--a"],
        "two words",
        *["--layer1", "2", "--layer2", "4", "--yes", "--x"],
        "",
    ]
    assert expected in found.commands
    assert ["torchrun", "pretrain_gpt.py", "--b", "me"] in found.commands and len(found.commands) == 3
    assert set(found.unset) == {"NNODES"} and found.problem.endswith("exit status 0")
    assert sorted(file.name for file in (tmp_path / "job").iterdir()) == ["helper.sh"]
    assert not landlock_version() or not outside.exists()
    monkeypatch.setattr(script, "MAX_SECONDS", 1)
    assert run_script("job.sh", "while :; do sleep 9; done", None, {}, trust=True).problem == "not done after 1 s"
    monkeypatch.setattr(script, "landlock_version", lambda: 0)
    with pytest.raises(UserError, match="this kernel cannot confine it: read it, then give --trust"):
        run_script("job.sh", "true", None, {}, trust=False)


# What is common


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "DeepSeek-V3", "GPT-OSS 20B"])  # bfloat16, float8, 4 bits
def test_published_configs_are_planned(cli: Cli, tmp_path: Path, name: str) -> None:
    """Of models in any format: a plan reads no weights."""
    (tmp_path / "some.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    options = ("--training.global_batch_size=1024", "--activation_checkpoint.mode=full")
    code = int(name == "DeepSeek-V3")  # does not fit without expert parallelism
    values = json.loads(cli("plan", tmp_path / "some.json", "--gpus=1024", "--json", *options, code=code).out)
    assert values["model"].endswith(f" {PUBLISHED[name]['size']}")
    assert values["num_parameters"] == PUBLISHED[name]["parameters"]


def test_the_import_command(cli: Cli, tmp_path: Path) -> None:
    job, recipe = tmp_path / "job.toml", tmp_path / "recipe.toml"
    job.write_text(JOB + "stepz = 1\n")
    output = cli("import", job, recipe, "--gpus", 64).out
    assert "torchtitan 0.2: 8 keys mapped, 1 not mapped and of effect, 1 without effect" in output
    assert "not mapped: training.stepz = 1: unknown to torchtitan 0.2; did you mean training.steps?" in output
    check_recipe(load(PretrainRecipe, recipe), 64)
    assert f"{recipe} exists; choose another name" in cli("import", job, recipe, "--gpus", 64, code=2).err
    job.write_text("[training]\nsteps = 3\n")
    message = "is no file that can be imported: give a job config of torchtitan"
    assert message in cli("import", job, tmp_path / "other.toml", code=2).err


def test_plans_of_files_of_other_programs(cli: Cli, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)

    def speed(*arguments: object) -> tuple[float, str]:
        captured = cli("plan", job, "--gpus=8", "--json", *arguments)
        return float(json.loads(captured.out)["tokens_per_second_per_gpu"]), captured.err

    theirs, text = speed()
    assert "planned as a run of torchtitan; --program titanlike plans this toolkit's run of it" in text
    here, text = speed("--program=titanlike")
    assert theirs < here and "planned as a run of titanlike\n" in text
    assert speed("--training.seq_len=2048")[0] != theirs  # an override
    assert theirs != speed("--program=torchtitan")[0]  # what the job has otherwise: its loss is not compiled
    assert "the batch is for 8 GPUs; --scaling weak" in cli("plan", job, "--gpus=8,16", "--json").err


def test_the_recipe_reader_answers_files_of_other_programs(tmp_path: Path) -> None:
    for name, text, kind in (
        ("job.toml", JOB, "a job config of torchtitan: `titanlike import"),
        ("short.toml", '[model]\nflavor = "8B"\n', "a job config of torchtitan: `titanlike import"),
        ("job.sh", LLAMA, "a script of Megatron-LM: `titanlike import"),
        ("config.json", '{"vocab_size": 3}', "no recipe, but a model's config: `titanlike plan"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UserError) as error:
            read(path)
        assert str(error.value).startswith(f"{path} is {kind}") and "\n" not in str(error.value)
    own = tmp_path / "own.toml"  # a program may have a section [job] of its own
    own.write_text('program = "own"\n[job]\nname = "mine"\n')
    assert read(own)[0]["job"] == {"name": "mine"}
