"""The model of a Hugging Face `config.json`, with default training, as a recipe to plan. `formats.py` calls it."""

from pathlib import Path

from titanlike.interop.hf_folder import fields_of, read_config
from titanlike.models.families import all_configs
from titanlike.tools.migration.conversion import Conversion

DEFAULT_SEQ_LEN = 2048


def convert(path: Path) -> Conversion:
    """Returns the recipe of a model. Raises `UserError` if this toolkit does not have it."""
    config = read_config(path, all_configs())
    job = Conversion("Hugging Face", str(path), {}, {}, is_job=False)
    for name, value in fields_of(config).items():
        job.set(f"model.{name}", value)
    job.set("training.seq_len", min(DEFAULT_SEQ_LEN, config.max_seq_len))
    job.differ(
        "training is not in the file: batch, sequence length, precision and layout are this toolkit's defaults; give yours, "
        "such as "
        "--training.seq_len=8192 --training.global_batch_size=512"
    )
    return job
