"""User errors: each is reported in one line, within a second, and creates no files."""

import socket
import venv
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, run
from titanlike.config import UserError
from titanlike.config.sections import Run
from titanlike.distributed.environment import RankInfo
from titanlike.run.start import Arguments, program_of, select_run_dir
from titanlike.tools.data.train_tokenizer import train as train_tokenizer

# Of the command line and the launch. tests/config has those of recipes and layouts, tests/start of variables.
MISTAKES = [
    (("--steps=5",), {}, "--steps: unknown option; did you mean --training.steps?"),
    (("--epochs=5",), {}, "--epochs: unknown option; keys are written --section.key=value (--help), and docs/coming_from.md"),
    (("--training=5",), {}, "--training is a table; name one of its keys, as in --training.steps=..."),
    (("--run.name", "--training.steps=5"), {}, "--run.name needs a value"),
    (("--run.name=\udcff",), {}, "--run.name=\\udcff is not text in this terminal's encoding"),
    (("--check", "0"), {}, "--check 0: give a number of processes"),
    (
        (), {"NPROC": "1", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "x" * 64},
        "cannot be resolved from this machine; give the host name or the IP address of node 0",
    ),
    (
        (), {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x" * 64, "MASTER_PORT": "29500"},
        "cannot be resolved from this machine",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "variables", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_user_error_is_reported_in_one_line_and_creates_no_files(
    tmp_path: Path, words: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = run(tmp_path, *words, variables=variables)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_reported_with_the_install_command(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = run(tmp_path, real=True, variables={"PATH": f"{tmp_path / 'bare' / 'bin'}:/usr/bin:/bin"})
    assert done.returncode == 2
    assert "bare/bin/python lacks torch, pydantic, tiktoken, tomli; run: pip install -e " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        port = str(server.getsockname()[1])
        nodes = {"NPROC": "1", "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        launched = run(tmp_path, variables=nodes)
        rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        by_hand = run(tmp_path, variables=rank)
    for done in (launched, by_hand):
        assert done.returncode == 2
        assert "MASTER_PORT" in done.stderr
        assert "is in use on this machine" in done.stderr
        assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_cpu_offload_without_a_gpu_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, **SMALL | {"parallelism.cpu_offload": "true"})
    assert done.returncode == 2
    assert done.stderr.startswith("error: parallelism.cpu_offload = true moves weights from a GPU")
    assert not list(tmp_path.iterdir())


def test_a_missing_gpu_is_reported(tmp_path: Path) -> None:
    done = run(tmp_path, **SMALL | {"run.device": "cuda"})
    assert done.returncode == 2
    assert "run.device = 'cuda', but torch finds no GPU; set run.device = 'cpu'" in done.stderr
    # The machine has GPUs that torch cannot use: training on the CPU without a message would waste them.
    done = run(tmp_path, variables={"CUDA_VISIBLE_DEVICES": "0"}, **SMALL)
    assert done.returncode == 2
    assert "this machine has 1 GPU(s) that the installed torch" in done.stderr


MASTER = "--training.master_dtype=bfloat16"
ROUNDED = "warning: training.master_dtype = 'bfloat16' without optimizer.stochastic_rounding: steps of optimizer.lr = "
SETTING = "are near 1); set {}training.master_dtype = 'float32'\n"
STOCHASTIC = "optimizer.stochastic_rounding = true, or "


@pytest.mark.parametrize(
    ("recipe", "options", "lr", "remedy"),
    [
        ("finetune_debug", (MASTER, "--optimizer.lr=3e-4"), "0.0003 do not move weights above 0.077", STOCHASTIC),
        ("debug", (MASTER, "--optimizer.lr=3e-4"), "0.0003", ""),  # it has Muon, which rounds to nearest
        ("finetune_debug", (MASTER, "--optimizer.stochastic_rounding=true"), "", ""),
        ("finetune_debug", (MASTER, "--lora.rank=8"), "", ""),  # the frozen weights have no updates
    ],
    ids=str,
)
def test_weights_in_bfloat16_without_stochastic_rounding_are_warned_of(
    tmp_path: Path, recipe: str, options: tuple[str, ...], lr: str, remedy: str
) -> None:
    done = run(tmp_path, str(ROOT / f"train_configs/{recipe}.toml"), *options, "--check=1")
    assert done.returncode == 0, done.stderr
    if lr:
        assert done.stderr.startswith(ROUNDED + lr)
        assert done.stderr.endswith(SETTING.format(remedy)) and done.stderr.count("\n") == 1
    else:
        assert not done.stderr


def test_a_tokenizer_that_is_not_that_of_the_initial_weights_is_warned_of(tmp_path: Path) -> None:
    text, hf = tmp_path / "text.txt", tmp_path / "hf"
    text.write_text("the cat and the dog and the end of the day\n" * 20)
    hf.mkdir()
    train_tokenizer([str(text)], hf / "tokenizer.json", vocab_size=270)
    options = [str(ROOT / "train_configs/finetune_debug.toml"), "--check=1", f"--checkpoint.initial={hf}"]
    done = run(tmp_path, *options)
    assert done.returncode == 0 and done.stderr.startswith(
        f"warning: tokenizer.encoding = 'bytes' is not the tokenizer in checkpoint.initial = '{hf}': 'Ā' has the id 0, and 188 "
    )
    assert done.stderr.endswith(f"there; its weights know other tokens; set tokenizer.encoding = '{hf}'\n")
    assert not run(tmp_path, *options, f"--tokenizer.encoding={hf / 'tokenizer.json'}").stderr


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("debug (1).toml", "debug__1_-"),
        (f"{'ü' * 120}.toml", f"{'ü' * 100}-"),
        ("a\tb.toml", None),
    ],
)
def test_the_name_of_a_run_is_derived_from_any_file_name(tmp_path: Path, file: str, name: str | None) -> None:
    (tmp_path / file).write_text("")
    if name is None:
        with pytest.raises(UserError, match="is not the name of a recipe"):
            Arguments([str(tmp_path / file)])
        return
    run_section = select_run_dir(Run(), Arguments([str(tmp_path / file)]), RankInfo())
    assert run_section.name.startswith(name)
    assert len(run_section.name.encode()) <= 255


def test_the_default_program_is_the_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "pretrain.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "silent.toml").write_text("")
    assert program_of(tmp_path / "silent.toml") == ROOT / "recipes" / "pretrain.py"
    (tmp_path / "naming.toml").write_text('program = "pretrain"')
    assert program_of(tmp_path / "naming.toml") == tmp_path / "pretrain.py"


def test_a_path_of_a_program_on_the_command_line_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("custom/train.py", "recipes/custom/train.py", "recipes/beside.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    recipe = tmp_path / "recipes/recipe.toml"
    recipe.write_text('program = "custom/train"')
    monkeypatch.chdir(tmp_path)
    assert program_of(recipe) == tmp_path / "recipes/custom/train.py"
    for path in ("custom/train.py", "custom/train", "./custom/train.py", f"{tmp_path}/custom/train.py"):
        assert program_of(recipe, path).resolve() == tmp_path / "custom/train.py"
    assert program_of(recipe, "beside") == tmp_path / "recipes/beside.py"
    with pytest.raises(
        UserError, match=r"program = 'custom/none': there is no program 'none\.py' in custom, and the shipped"
    ):
        program_of(recipe, "custom/none")
