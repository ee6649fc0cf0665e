"""Random configs of every family, exported: transformers computes the same, and the folder is read back as the same config. And
changes of RoPE in a `config.json`: the folder is refused, or transformers computes the same."""

import ctypes
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from tests.interop.models import CONFIGS, ENCODERS, LLAMA, T5, export_model, model_of
from tests.interop.reference import class_of, difference
from titanlike.config import UserError
from titanlike.interop.hf_folder import config_problems, read_config
from titanlike.interop.hf_folder import fields_of as recipe_fields
from titanlike.interop.weights import load_weights, open_weights
from titanlike.models.common.config import TransformerConfig
from titanlike.models.deepseek.config import DeepseekV3Config
from titanlike.models.families import FAMILIES, all_configs, config_class
from titanlike.models.gemma.config import Gemma2Config, Gemma3Config
from titanlike.models.modernbert.config import ModernBertConfig
from titanlike.models.moe.config import MixtralConfig
from titanlike.models.registry import build_model

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers are not ours

VALUES: dict[str, tuple[Any, ...]] = {
    "dim": (16, 24, 32, 48, 64), "num_layers": (1, 2, 3, 4, 5), "num_heads": (1, 2, 3, 4, 8), "num_kv_heads": (1, 2, 4, 8),
    "ffn_dim": (16, 24), "vocab_size": (300, 301, 320), "max_seq_len": (16, 48, 64), "head_dim": (2, 4, 8, 10, 16),
    "norm_eps": (1e-5, 1e-6, 1e-3), "tied_head": (True, False), "dropout": (0.0, 0.1), "num_token_types": (1, 2, 3),
    "rope_theta": (2.0, 100.0, 1e4, 123.5), "rope_local_theta": (100.0, 1e4), "rope_scaling": (1.0, 2.0, 8.0, 32.5),
    "rope_original_seq_len": (8, 16, 32, 4096), "rope_mscale": (1.0, 0.707, 2.0),
    "query_scalar": (1.0, 8.0, 7.5, 64.0), "logit_soft_cap": (0.0, 4.0), "attention_soft_cap": (0.0, 5.0),
    "sliding_window": (0, 1, 2, 4, 8, 48, 100), "sliding_window_pattern": (0, 1, 2, 3, 5, 9),
    "global_attention_every": (1, 2, 3, 4, 9), "no_rope_every": (0, 1, 2, 3, 9),
    "num_experts": (2, 3, 4, 6, 8), "experts_per_token": (1, 2, 3, 4), "balance_loss": (0.0, 0.1),
    "num_shared_experts": (0, 1, 2, 2),
    "router_score": ("softmax", "sigmoid"), "normalize_router": (True, False), "router_scale": (1.0, 2.5),
    "balance_bias_rate": (0.0, 0.001), "num_dense_layers": (0, 1, 2), "dense_ffn_dim": (16, 40), "q_lora_rank": (0, 8),
    "kv_lora_rank": (8, 12), "qk_nope_head_dim": (4, 5, 8), "qk_rope_head_dim": (2, 4, 8), "v_head_dim": (3, 4, 8),
    "num_expert_groups": (1, 2, 3, 4, 8), "groups_per_token": (1, 2, 3, 4), "num_mtp_layers": (0, 0, 2), "mtp_loss_weight": (0.3,),
    "num_encoder_layers": (1, 2, 3), "relative_attention_num_buckets": (4, 8, 12, 32),
    "relative_attention_max_distance": (3, 5, 20, 128), "decoder_start_token": (0, 1, 5),
}  # fmt: skip
# Of training, which no config.json has.
TRAINING = {"size", "dropout", "balance_loss", "balance_bias_rate", "mtp_loss_weight"}


def random_config(name: str, rng: random.Random) -> Any:
    """Returns a valid config whose fields without effect, which a config.json does not have, have their defaults."""
    kind: Any = config_class(name)
    defaults = kind()
    for _ in range(1000):
        fields = {
            f.name: rng.choice(VALUES[f.name]) for f in dataclasses.fields(kind) if f.name not in ("name", "size")
        }
        unused = {"rope_original_seq_len", "rope_mscale"} if fields.get("rope_scaling") == 1.0 else set()
        unused |= {"global_attention_every"} if fields.get("sliding_window") == 0 else set()
        if name == "qwen3_moe":  # the options of which transformers has no equivalent
            unused |= {"num_shared_experts", "router_score", "router_scale", "balance_bias_rate"}
        config = kind(**fields | {key: getattr(defaults, key) for key in unused & fields.keys()})
        if not config.problems():
            return config
    raise AssertionError(f"no valid config of {name}")


def fields_of(config: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(config).items() if key not in TRAINING}


def assert_computed(model: nn.Module, folder: Path, config: TransformerConfig) -> None:
    """Asserts that transformers computes the same logits. It reads no blocks of multi-token prediction."""
    reference = class_of(config).from_pretrained(folder, attn_implementation="eager").eval()
    assert difference(model.eval(), reference, config) < 1e-4, config


@pytest.mark.parametrize("numbers", [range(4), pytest.param(range(4, 12), marks=pytest.mark.slow)], ids=["4", "8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_random_configs_are_read_back_and_computed_by_transformers(name: str, numbers: range, tmp_path: Path) -> None:
    exported = 0
    for number in numbers:
        config = random_config(name, random.Random(f"{name} {number}"))
        model, folder = model_of(config, seed=number), tmp_path / str(number)
        try:
            export_model(model, config, folder)
        except UserError as error:
            assert "it cannot be exported, only " in str(error)
            continue
        exported += 1
        assert fields_of(open_weights(folder).config) == fields_of(config)
        assert_computed(model, folder, config)
    assert exported


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Gemma2Config, dict(sliding_window_pattern=1)),
        (Gemma3Config, dict(sliding_window_pattern=1)),
        (ModernBertConfig, dict(num_layers=1)),
        (ModernBertConfig, dict(global_attention_every=1)),
    ],
)
def test_a_window_that_no_block_has_is_refused(kind: Any, fields: dict[str, Any]) -> None:
    config = kind(**fields)
    [problem] = config.problems()
    assert problem.startswith(f"model.sliding_window = {config.sliding_window} has no effect")
    assert problem.endswith("; set model.sliding_window = 0")
    config = kind(**fields | {"sliding_window": 0})
    assert not config.problems()
    found = kind.from_hugging_face(config.to_hugging_face())
    assert (found.sliding_window, found.num_local()) == (0, 0)


def test_groups_of_one_expert_have_no_score() -> None:
    for per_token in (2, 8):  # all groups are no limit, but transformers scores them too
        config = DeepseekV3Config(num_expert_groups=8, groups_per_token=per_token)
        [problem] = config.problems()
        assert problem.startswith("model.num_expert_groups = 8 are groups of 1 expert") and "use 4 or fewer" in problem


# Keys that transformers' configs have, and that no logit depends on, or on others in their place. Those of a family are
# besides those of all.
OF_ALL = {
    *("_name_or_path", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "initializer_range", "model_type"),
    *("is_encoder_decoder", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict"),
    *("transformers_version", "use_cache"),
}  # fmt: skip
OF_QWEN = {"max_window_layers", "sliding_window"}
OF_GEMMA = {"hidden_act", "sliding_window_pattern"}
OF_EXPERTS = {"output_router_logits", "router_aux_loss_coef"}
OF_DEEPSEEK = {*OF_EXPERTS, "head_dim", "pretraining_tp", "qk_head_dim"}
WITHOUT_EFFECT = {
    "llama": {"pretraining_tp"}, "mistral": set(), "phi3": {"original_max_position_embeddings"},
    "smollm3": {"no_rope_layer_interval", *OF_QWEN}, "olmo2": set(), "qwen2": OF_QWEN, "qwen3": OF_QWEN, "gemma2": OF_GEMMA,
    "gemma3": {*OF_GEMMA, "_sliding_window_pattern"}, "mixtral": OF_EXPERTS, "gpt_oss": OF_EXPERTS,
    "qwen3_moe": {*OF_EXPERTS, "intermediate_size", "num_local_experts"}, "deepseek_v2": OF_DEEPSEEK,
    "deepseek_v3": {*OF_DEEPSEEK, "num_nextn_predict_layers"},
    "gpt": {
        *("attn_pdrop", "embd_pdrop", "n_ctx", "reorder_and_upcast_attn", "resid_pdrop", "summary_activation"),
        *("summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    },
    "bert": {"attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"},
    "modernbert": {
        *("classifier_dropout", "classifier_pooling", "cls_token_id", "deterministic_flash_attn", "global_attn_every_n_layers"),
        *("initializer_cutoff_factor", "sep_token_id", "sparse_pred_ignore_index", "sparse_prediction"),
    },
    "t5": {
        *("classifier_dropout", "dense_act_fn", "dropout_rate", "initializer_factor", "is_decoder", "is_gated_act"),
        "tie_word_embeddings",
    },
}  # fmt: skip


def changed(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return 2 * value + 1
        case str() | None:
            return "another" if value else 1
    return value


def test_each_key_of_a_config_is_read_or_refused_or_has_no_effect(tmp_path: Path) -> None:
    """A value that a family does not support is not ignored. The keys are those of transformers."""

    def read(values: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            return read_config(tmp_path, all_configs())
        except UserError:
            return None

    ignored: dict[str, set[str]] = {}
    for config in (*CONFIGS.values(), *ENCODERS.values(), T5):
        expected = read(config.to_hugging_face())
        values = AutoConfig.from_pretrained(tmp_path).to_dict() | config.to_hugging_face()
        others = {key: changed(value) for key, value in values.items()}
        found = {
            key for key, other in others.items() if other != values[key] and read(values | {key: other}) == expected
        }
        ignored[config.name] = found & ignored.get(config.name, found)
    assert not {name: left for name, keys in ignored.items() if (left := keys - OF_ALL - WITHOUT_EFFECT[name])}


def test_exported_configs_have_these_keys() -> None:
    """Also those for which transformers has the same default. After an intended change, the file is what this test finds."""
    found = {name: config.to_hugging_face() for name, config in (CONFIGS | ENCODERS | {"T5": T5}).items()}
    assert json.loads((Path(__file__).parent / "exported_configs.json").read_text()) == found


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
MSCALE = {**YARN, "mscale": 0.5, "mscale_all_dim": 0.5}
ROPE_CASES: list[tuple[str, dict[str, Any], str]] = [
    # Besides rope_parameters, in which the exported folders have their own theta and scaling. "": accepted.
    ("grouped-query", {"rope_scaling": LLAMA3}, ""),
    ("Llama 3.1", {"rope_scaling": LLAMA3 | {"factor": 4.0}}, ""),
    ("Llama 3.1", {"rope_scaling": {"rope_type": "default"}}, ""),
    ("DeepSeek-V3", {"rope_scaling": MSCALE}, ""),
    ("Moonlight", {"rope_scaling": MSCALE | {"attention_factor": 1.0}}, ""),
    ("GPT-OSS", {"rope_scaling": YARN | {"truncate": False}}, ""),
    ("Gemma 3", {"rope_scaling": {"factor": 2.0}}, ""),
    ("Llama 3.1", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "the RoPE type 'linear' is not supported"),
    ("Phi-3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8}}, "the RoPE type 'longrope' is not supported; only"),
    ("Phi-4", {"partial_rotary_factor": 0.75}, "partial_rotary_factor = 0.75 is not supported; only 1.0 is"),
    ("ModernBERT", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "the RoPE type 'linear' is not supported"),
    # What scales cosines and sines.
    ("DeepSeek-V3", {"rope_scaling": MSCALE | {"attention_factor": 1.3}}, "attention_factor = 1.3 is not supported; only 1.0 is"),
    ("DeepSeek-V2", {"rope_scaling": MSCALE | {"mscale": 1.0}}, "mscale = 1.0 is not supported; only 0.5 is"),
    ("DeepSeek-V2", {"rope_scaling": YARN | {"mscale_all_dim": 0.5}}, "has no 'mscale'"),
    ("GPT-OSS", {"rope_scaling": YARN | {"truncate": False, "attention_factor": 1.0}}, "attention_factor = 1.0 is not supported"),
    # Two thetas, of which transformers reads one.
    ("Llama 3.1", {"rope_theta": 1e4}, "rope_theta = 500000.0, but transformers reads rope_theta = 10000.0"),
    ("grouped-query", {"rope_scaling": LLAMA3, "rope_theta": "absent"}, "500000.0, but transformers reads rope_theta = 10000.0"),
    # Without any.
    ("theta", {"rope_parameters": "absent", "rope_theta": "absent"}, ""),
    ("GPT-OSS", {"rope_parameters": "absent", "rope_scaling": "absent"}, ""),
    ("Gemma 3", {"rope_parameters": "absent", "rope_theta": "absent"}, ""),
    ("ModernBERT", {"rope_parameters": "absent", "global_rope_theta": "absent"}, ""),
    # Keys besides them.
    ("grouped-query", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; only 1.0 is"),
    ("Qwen3", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("DeepSeek-V3", {"original_max_position_embeddings": 32}, "original_max_position_embeddings = 32 is not supported; only 200"),
    ("Qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention = .* is not supported; only None is"),
    ("Gemma 3", {"rope_parameters": {}}, "rope_parameters = {} is not supported; only one for each type of blocks is"),
    # What transformers has without the key.
    ("Gemma 2", {"final_logit_softcapping": "absent"}, ""),
    ("Gemma 2", {"attn_logit_softcapping": "absent"}, ""),
    ("DeepSeek-V2", {"topk_method": "absent"}, "topk_method = 'greedy' is not supported; only 'group_limited_greedy' is"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), ROPE_CASES)
def test_rope_is_that_of_transformers(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = (CONFIGS | ENCODERS)[name]
    folder = export_model(model_of(config), config, tmp_path / "hf")
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))
    if message:
        with pytest.raises(UserError, match=message):
            open_weights(folder)
    else:
        weights = open_weights(folder)
        model = build_model(weights.config)
        load_weights(model, weights)
        assert_computed(model, folder, weights.config)


def test_a_run_continues_from_its_own_export() -> None:
    for config in (ModernBertConfig(num_layers=1, sliding_window=0), MixtralConfig(rope_theta=1e4), DeepseekV3Config()):
        found: Any = type(config).from_hugging_face(json.loads(json.dumps(config.to_hugging_face())))
        assert not config_problems("hf", found, config)


def in_float32(values: Any) -> Any:
    """Returns a `config.json` in which every number with a fraction is the double that equals it in float32."""
    if isinstance(values, dict):
        return {key: in_float32(value) for key, value in values.items()}
    return ctypes.c_float(values).value if isinstance(values, float) else values


def test_numbers_that_were_in_float32_are_those_of_the_published_configs() -> None:
    """GGUF files hold numbers in float32, which transformers writes to a `config.json` with all digits."""
    changed = 0
    for kind in all_configs():
        for size, fields in kind.sizes.items() if kind.hf_architecture else ():
            config: Any = kind(size=size, **fields)
            values = config.to_hugging_face()
            found: Any = kind.from_hugging_face(in_float32(values))
            changed += in_float32(values) != values
            assert (found.name, found.size if fields else size) == (kind.name, size)
            assert not config_problems("hf", found, config) and not config_problems("hf", config, found)
            assert not fields or recipe_fields(found) == recipe_fields(kind.from_hugging_face(values))
    assert changed > 40
    twice = {"rope_theta": 12345.6, "rope_parameters": {"rope_type": "default", "rope_theta": in_float32(12345.6)}}
    found = LLAMA.from_hugging_face(LLAMA.to_hugging_face() | twice)
    assert not config_problems("hf", found, dataclasses.replace(LLAMA, rope_theta=12345.6))
    values = in_float32(Gemma3Config(num_layers=6).to_hugging_face())
    assert values["rms_norm_eps"] == 9.999999974752427e-07
    with pytest.raises(ValueError, match=r"rms_norm_eps = 1.0001e-06 is not supported; only 1e-06 is"):
        Gemma3Config.from_hugging_face(values | {"rms_norm_eps": 1.0001e-6})
