"""Models of Hugging Face as recipes. `formats.py` calls it for `titanlike import` and `titanlike plan`."""

from pathlib import Path

from titanlike.interop.hf_folder import fields_of, read_config
from titanlike.models.common.config import TransformerConfig
from titanlike.models.families import all_configs
from titanlike.tools.migration.conversion import Conversion

MAX_SEQ_LEN = 2048


def convert(path: Path) -> Conversion:
    """Returns the recipe of a `config.json`, with default training. Raises `UserError` if this toolkit does not have the model."""
    job = _model_of(str(path), read_config(path, all_configs()))
    job.is_job = False
    job.differ(
        "training is not in the file: batch, sequence length, precision and layout are this toolkit's defaults; give yours, "
        "such as --training.seq_len=8192 --training.global_batch_size=512"
    )
    return job


def finetune(folder: Path) -> Conversion:
    """Returns a recipe that starts from the weights of a folder."""
    from titanlike.interop.weights import open_weights  # imports torch

    weights = open_weights(folder)
    config, source = weights.config, str(folder.absolute())
    job = _model_of(source, config)
    program = "seq2seq" if config.is_encoder_decoder else "finetune" if config.causal else "mlm"
    job.tables["program"] = program
    job.set("tokenizer.encoding", source)
    job.set("tokenizer.special", weights.tokenizer.special)
    if program == "finetune":
        kinds = 'conversations or instructions; "text" or "shards" for continued pre-training'
        job.set("data.source", "chat", comment=kinds)
    else:
        job.set("data.source", "text")
    job.set("data.path", "", comment="name your data here: the recipe does not run without it")
    if program == "seq2seq":
        job.set("data.prompt_field", "source")
        job.set("data.text_field", "target")
    job.set("optimizer.lr", 1e-5, comment="of all weights; LoRA (lora.rank) usually has ten times as much")
    job.set("schedule.warmup_steps", 50, comment="the optimizer state is new")
    job.set("schedule.decay", "cosine")
    job.set("schedule.min_ratio", 0.1)
    job.set("checkpoint.initial", source)
    job.differ(f"{config.label()}, {config.num_parameters():,} parameters; set [data] and the rest of [training]")
    return job


def _model_of(source: str, config: TransformerConfig) -> Conversion:
    job = Conversion("Hugging Face", source, {}, {})
    for name, value in fields_of(config).items():
        job.set(f"model.{name}", value)
    job.set("training.seq_len", min(MAX_SEQ_LEN, config.max_seq_len))
    return job
