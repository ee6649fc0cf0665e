"""Loading of recipes: precedence, model sizes, overrides and error messages."""

import json
import os
import time
from pathlib import Path

import pytest

from titanlike.config import UserError, section
from titanlike.config.base import divisors
from titanlike.models.gpt.config import GPTConfig
from titanlike.models.llama.config import LlamaConfig
from titanlike.recipe import PretrainRecipe, load, to_toml


def write(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_message(folder: Path, text: str, **overrides: str) -> str:
    path = write(folder, text)
    with pytest.raises(UserError) as caught:
        load(PretrainRecipe, path, overrides)
    return str(caught.value).replace(str(folder), "DIR")


def test_an_empty_recipe_has_the_defaults(tmp_path: Path) -> None:
    assert load(PretrainRecipe, write(tmp_path, "")) == PretrainRecipe()


def test_precedence_is_defaults_then_extends_then_file_then_command_line(tmp_path: Path) -> None:
    write(tmp_path, "[training]\nsteps = 1\nseq_len = 2\nglobal_batch_size = 3\n", "grandparent.toml")
    write(tmp_path, 'extends = "grandparent.toml"\n[training]\nseq_len = 20\nglobal_batch_size = 30\n', "parent.toml")
    path = write(tmp_path, 'extends = "parent.toml"\n[training]\nglobal_batch_size = 300\nlocal_batch_size = 400\n')
    defaults = {"training": {"global_batch_size": 7, "max_norm": 0.5}}
    training = load(PretrainRecipe, path, {"training.local_batch_size": "5"}, defaults).training
    assert (training.steps, training.seq_len, training.global_batch_size) == (1, 20, 300)
    assert training.local_batch_size == 5
    assert (training.max_norm, training.z_loss) == (0.5, PretrainRecipe().training.z_loss)
    path = write(tmp_path, 'extends = "parent.toml"\n[training]\nseq_len = 0\n')
    with pytest.raises(UserError, match=r"^\S+/recipe\.toml: training\.seq_len = 0"):  # not the file that it extends
        load(PretrainRecipe, path)


def test_a_model_size_sets_the_fields_that_the_recipe_does_not_set(tmp_path: Path) -> None:
    model = load(PretrainRecipe, write(tmp_path, '[model]\nsize = "3-8B"\nnum_layers = 2\n')).model
    assert isinstance(model, LlamaConfig)
    assert (model.dim, model.num_layers, model.num_kv_heads) == (4096, 2, 8)
    assert isinstance(load(PretrainRecipe, write(tmp_path, '[model]\nname = "gpt"\n')).model, GPTConfig)


def test_overrides_are_parsed_by_the_type_of_the_key(tmp_path: Path) -> None:
    overrides = {
        "run.name": "007", "optimizer.lr": "1", "run.deterministic": "true", "checkpoint.enabled": "False",
        "sample.prompt": "True", "data.mixture": '["a#b",\n "c, d",  # e\n]', "data.weights": " [1, 2.5] ",
    }  # fmt: skip
    recipe = load(PretrainRecipe, write(tmp_path, ""), overrides)
    assert (recipe.run.name, recipe.optimizer.lr, recipe.run.deterministic) == ("007", 1.0, True)
    assert not recipe.checkpoint.enabled and recipe.sample.prompt == "True"  # a string is not parsed
    assert (recipe.data.mixture, recipe.data.weights) == (("a#b", "c, d"), (1.0, 2.5))
    assert "training.steps = true must be an integer" in error_message(tmp_path, "", **{"training.steps": "True"})


def test_a_resolved_recipe_loads_as_an_equal_recipe(tmp_path: Path) -> None:
    text = '[model]\nname = "gpt"\nsize = "124M"\n[sample]\nprompt = "\\"quoted\\" \\\\ \\n\\u007f é"\n[optimizer]\nlr = 1e-05\n'
    recipe = load(PretrainRecipe, write(tmp_path, text))
    again = load(PretrainRecipe, write(tmp_path, to_toml(recipe, "a comment\nof two lines"), "again.toml"))
    assert again == recipe


def test_an_extends_that_is_circular_through_links_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to("link.toml")
    assert 'extends = "link.toml": file DIR/link.toml not found' in error_message(tmp_path, 'extends = "link.toml"')
    (tmp_path / "same.toml").symlink_to("recipe.toml")
    assert 'extends = "same.toml" is circular' in error_message(tmp_path, 'extends = "same.toml"')


def test_a_recipe_that_is_no_file_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")  # reading it would wait for a writer
    for path in (tmp_path / "pipe.toml", tmp_path, Path("/dev/zero")):
        with pytest.raises(UserError, match="is not a file; give the file of a recipe"):
            load(PretrainRecipe, path)
    with pytest.raises(UserError, match=r"xxx\.\.\.: cannot be read as a recipe: File name too long"):
        load(PretrainRecipe, tmp_path / ("x" * 300))


@pytest.mark.parametrize("text", ["1e-5\ndim = 3", "1e-5 # comment", "1e-5\n[x]", "1e-5,", "1e-5, 2"])
def test_nothing_after_a_value_on_the_command_line_is_dropped(tmp_path: Path, text: str) -> None:
    assert f"model.norm_eps = {json.dumps(text)} must be a number > 0" in error_message(
        tmp_path, "", **{"model.norm_eps": text}
    )


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    start = time.process_time()
    assert divisors(999_999_937) == [1, 999_999_937]
    assert time.process_time() - start < 2.0  # CPU seconds: not one attempt for each smaller number


def test_a_custom_program_adds_sections(tmp_path: Path) -> None:
    @section
    class Ema:
        decay: float = 0.9
        steps: tuple[int, ...] = ()
        cap: int | None = None

    @section
    class MyRecipe(PretrainRecipe):
        ema: Ema = Ema()

    recipe = load(MyRecipe, write(tmp_path, "[ema]\ndecay = 0.5\nsteps = [1, 2]\n"))
    assert recipe.ema == Ema(decay=0.5, steps=(1, 2))
    assert load(MyRecipe, write(tmp_path, to_toml(recipe))) == recipe
    for text, message in (
        ("decai = 0.5", r"ema\.decai = 0\.5: unknown key; did you mean ema\.decay\?"),
        ('steps = [1, "x"]', r"ema\.steps = \"x\""),
    ):
        with pytest.raises(UserError, match=message):
            load(MyRecipe, write(tmp_path, f"[ema]\n{text}\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[training]\nstepz = 3", "DIR/recipe.toml: training.stepz = 3: unknown key; did you mean training.steps?"),
        ('recipe = "dpo"', 'recipe = "dpo": unknown key; the program has the key `program` now; write program = "dpo"'),
        ("[training]\nlr = 3.0", "training.lr = 3.0: unknown key; did you mean optimizer.lr?"),
        ("[optimizer]\nname = 'adam'", 'optimizer.name = "adam": unknown key; the keys of [optimizer] are lr, beta1,'),
        ("[lora]\nrank = 8", 'lora: unknown key; recipes/finetune.py has it; set program = "finetune"'),
        ('[data]\nsource = "chat"', 'data.source = "chat" is for the program finetune; set program = "finetune"'),
        ("[trainin]\nsteps = 3", "trainin: unknown key; did you mean [training]?"),
        ("[metrics]\nmachine_interval = 5.0", "metrics.machine_interval = 5.0: unknown key; remove it; exporters measure GPUs"),
        ("[training]\nfoo = 3", "training.foo = 3: unknown key; the keys of [training] are steps, seq_len,"),
        ("zzz = 3", "zzz = 3: unknown key; choose from activation_checkpoint, checkpoint, compile,"),
        ('[training]\nsteps = "3"', 'training.steps = "3" must be an integer >= 1'),
        ("[training]\nsteps = 0", "training.steps = 0 must be an integer >= 1"),
        ("[run]\ndeterministic = 1", "run.deterministic = 1 must be true or false"),
        ("[run]\nname = 7", "run.name = 7 must be a name of letters, digits and . _ + = @ -"),
        ('[run]\nname = "a/b"', 'run.name = "a/b" must be a name of letters, digits and . _ + = @ -'),
        ("[float8]\nlayers = 3", 'float8.layers = 3 must be a list of strings, such as ["a", "b"]'),
        (
            "[parallelism]\npipeline_split = [1, 0]",
            "parallelism.pipeline_split = 0 must be a list of integers >= 1, such as [1, 2]",
        ),
        ("[run]\ndir = 7", "run.dir = 7 must be a string"),
        ("[run]\ndir = 2024-01-01", "2024-01-01 is a date or time, and no key has that type; write it as a string, in quotes"),
        ("model = 3", "model = 3 is not a table; write [model] and its keys below it"),
        ("[optimizer]\nbeta2 = 1.0", "optimizer.beta2 = 1.0 must be a number >= 0 and < 1"),
        ("[optimizer]\nlr = nan", "optimizer.lr = nan is not finite; it must be a number > 0"),
        ('[compile]\nmode = "blocks"', 'compile.mode = "blocks" is not valid; did you mean "block"? choose from block, none'),
        (
            '[model]\nname = "lama"',
            'model.name = "lama" is not valid; did you mean "llama"? choose from llama, smollm3, olmo2, qwen2, qwen3, '
            "qwen3_moe, mistral, phi3, mixtral, deepseek_v2, deepseek_v3, gpt_oss, gemma2, gemma3, gpt",
        ),
        ('[model]\nname = "gpt"\nsize = "9B"', 'model.size = "9B" is not valid; choose from debug, 124M,'),
        ('[model]\nname = "gpt"\nnum_kv_heads = 2', "model.num_kv_heads = 2: unknown key; did you mean model.num_heads?"),
        ("a = = 3", "DIR/recipe.toml: invalid TOML"),
        ('extends = "none.toml"', 'extends = "none.toml": file DIR/none.toml not found'),
        ('extends = "recipe.toml"', 'extends = "recipe.toml" is circular; remove it from one of the files'),
        ("extends = 3", "extends = 3 must be a string, the path of one recipe"),
        ('extends = "a\\u0000b"', 'extends = "a\\u0000b" contains the character NUL; remove it'),
        ('[run]\ndir = "a\\u0000b"', 'run.dir = "a\\u0000b" contains the character NUL; remove it'),
        (f'[run]\ndir = "{"x" * 300}"', "is too long for a path; use at most 1024 bytes, and 255 between slashes"),
        (f"[training]\nsteps = {'9' * 5000}", "invalid TOML: an integer has too many digits"),
        (f"[training]\nsteps = 0x{'f' * 5000}", "training.steps: an integer has too many digits"),
        (f"[training]\nsteps = {'[' * 400}{']' * 400}", "training.steps: tables or lists are nested more than 8 deep"),
        (f"x = {'[' * 100_000}", "invalid TOML: tables or lists are nested more than 8 deep"),
        (f"{'a.' * 1000}b = 3", "tables or lists are nested more than 8 deep"),
        (f"[run]\nseed = {2**64}", "run.seed = 18446744073709551616 must be an integer >= 0 and <= 4294967295"),
        (f"[model]\nvocab_size = {10**12}", "model.vocab_size = 1000000000000 must be at most 1000000000"),
        ("[optimizer]\nlr = 1e308", "optimizer.lr = 1e+308 must be at most 1000000000"),
        ('["a\\nb"]\nx = 1', "a\\nb: unknown key; choose from"),
        ('[[optimizer.groups]]\npatern = "x"', 'groups.patern = "x": unknown key; did you mean optimizer.groups.pattern?'),
        ('[[optimizer.groups]]\noptimizer = "mun"', 'optimizer.groups.optimizer = "mun" is not valid; did you mean "muon"?'),
        ("[optimizer]\ngroups = [3]", "optimizer.groups = 3 is not a table; write [[optimizer.groups]] and its keys"),
    ],
)  # fmt: skip
def test_an_error_has_the_file_the_key_the_value_and_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    error = error_message(tmp_path, text)
    assert message in error
    assert error.startswith("DIR/recipe.toml: ")


def test_an_error_names_the_file_that_sets_the_key(tmp_path: Path) -> None:
    write(tmp_path, "[training]\nsteps = 0\n", "base.toml")
    error = error_message(tmp_path, 'extends = "base.toml"\n[run]\nsteps = 3\n', **{"optimizer.lr": "-1"})
    assert [line.split(": ")[0] for line in error.splitlines()] == ["DIR/recipe.toml", "DIR/base.toml", "command line"]


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xef\xbb\xbf[training]\nsteps = 7\n")
    assert load(PretrainRecipe, path).training.steps == 7


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as a recipe"):
        load(PretrainRecipe, path)


def test_a_recipe_of_another_program_is_referred_to_the_page_with_its_keys(tmp_path: Path) -> None:
    other = '[job]\n[lr_scheduler]\n[quantize]\n[training]\ndataset = "c4"\n'
    assert "docs/coming_from.md has the keys of torchtitan" in error_message(tmp_path, other)
    # A recipe with one such key is a recipe with a mistake.
    message = error_message(tmp_path, "[checkpoint]\nenable = true\n")
    assert "did you mean checkpoint.enabled?" in message and "coming_from" not in message
