"""Hugging Face transformers: LlamaForCausalLM or GPT2LMHeadModel, trained with transformers.Trainer (tried: 5.23).

    row "shipped"   the Trainer's defaults: not compiled, scaled_dot_product_attention, fused AdamW
    row "best"      `torch_compile`, and scaled_dot_product_attention without the mask that transformers builds in compiled code

Neither row logs, saves or checks for a non-finite loss (`logging_nan_inf_filter`), which would synchronize the host in each step.
`options` are TrainingArguments, and `attn_implementation`:
`--option hf.best:use_liger_kernel=true`, `--option hf.best:attn_implementation=flash_attention_2`.
"""

import sys
import tempfile
from typing import Any

import accelerate  # noqa: F401  which the Trainer requires: without it, the row counts as not installed
import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.protocol import Clock, Task
from benchmarks.subjects.nanogpt import gpt2_weights, load, renamed

# titanlike's names of Llama weights -> names in transformers.
NAMES = {
    r"^tok_embeddings": "model.embed_tokens",
    r"^norm": "model.norm",
    r"^output": "lm_head",
    r"^layers": "model.layers",
    r"attention_norm": "input_layernorm",
    r"ffn_norm": "post_attention_layernorm",
    r"attention\.w([qkvo])": r"self_attn.\1_proj",
    r"feed_forward\.w1": "mlp.gate_proj",
    r"feed_forward\.w2": "mlp.down_proj",
    r"feed_forward\.w3": "mlp.up_proj",
}


def llama(task_config: dict[str, Any], **options: Any) -> transformers.PreTrainedModel:
    """Builds the task's Llama."""
    rope = {"rope_type": "default", "rope_theta": task_config["rope_theta"]}
    if task_config["rope_scaling"] != 1.0:
        rope |= {"rope_type": "llama3", "factor": task_config["rope_scaling"], "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": task_config["rope_original_seq_len"]}
    config = transformers.LlamaConfig(
        vocab_size=task_config["vocab_size"], hidden_size=task_config["dim"], intermediate_size=task_config["ffn_dim"],
        num_hidden_layers=task_config["num_layers"], num_attention_heads=task_config["num_heads"],
        num_key_value_heads=task_config["num_kv_heads"], max_position_embeddings=task_config["max_seq_len"],
        rms_norm_eps=task_config["norm_eps"], tie_word_embeddings=task_config["tied_head"], rope_parameters=rope, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(task_config: dict[str, Any], **options: Any) -> transformers.PreTrainedModel:
    """Builds the task's GPT-2, without dropout."""
    config = transformers.GPT2Config(
        vocab_size=task_config["vocab_size"], n_embd=task_config["dim"], n_layer=task_config["num_layers"],
        n_head=task_config["num_heads"], n_positions=task_config["max_seq_len"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def transformers_weights(task: Task) -> dict[str, Tensor]:
    """Returns the task's initial weights by the names and in the layout of transformers."""
    if task.model["name"] == "llama":
        return {renamed(name, NAMES): value for name, value in task.weights.items()}
    # GPT-2's projections are (inputs, outputs) in transformers.
    projections = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = gpt2_weights(task.weights)
    return {name: value.t() if name.endswith(projections) else value for name, value in weights.items()}


class Sequences(torch.utils.data.Dataset):
    """The task's sequences in step order."""

    def __init__(self, task: Task) -> None:
        batches = np.load(task.batches_file, mmap_mode="r")
        self.steps = len(batches)
        self.sequences = batches.reshape(-1, task.seq_len + 1)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sequence = torch.from_numpy(self.sequences[index].astype(np.int64))
        # `labels` requests the loss. Without `shift_labels` transformers would shift them and drop the last token.
        return {"input_ids": sequence[:-1], "labels": sequence[1:], "shift_labels": sequence[1:]}


class LossTrainer(transformers.Trainer):
    """A Trainer that accumulates the loss of each step on the device."""

    step_loss = 0.0

    def training_step(self, *arguments: Any, **named: Any) -> Tensor:
        """Returns the micro-batch's share of the step's mean loss."""
        share = super().training_step(*arguments, **named)
        self.step_loss = self.step_loss + share
        return share


class AfterStep(transformers.TrainerCallback):
    """Calls the clock after each optimizer step."""

    def __init__(self, trainer: LossTrainer, clock: Clock) -> None:
        self.trainer, self.clock = trainer, clock

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        """Called after the update, the schedule and zero_grad."""
        self.clock.step(self.trainer.step_loss)
        self.trainer.step_loss = 0.0


def main() -> None:
    """Trains the task's model."""
    task = Task.read()
    if task.precision == "float8":
        print("TrainingArguments have no float8 option", file=sys.stderr)
        sys.exit(2)
    best = task.row == "best"
    clock = Clock(task, ("transformers", "accelerate"))
    # An attention without a registered mask function gets no mask, and then uses is_causal.
    transformers.AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    data = Sequences(task)
    options = dict(task.options)
    attention = options.pop("attn_implementation", "sdpa_without_mask" if best else "sdpa")
    with torch.device(task.device):
        model = (llama if task.model["name"] == "llama" else gpt2)(task.model, attn_implementation=attention)
    load(model, transformers_weights(task))
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "output_dir": folder, "use_cpu": task.device == "cpu", "seed": task.seed, "max_steps": data.steps,
            "per_device_train_batch_size": task.micro_batch_size, "gradient_accumulation_steps": task.num_microbatches,
            "train_sampling_strategy": "sequential", "remove_unused_columns": False,
            "learning_rate": task.lr, "lr_scheduler_type": "constant", "weight_decay": task.weight_decay,
            "adam_beta1": task.beta1, "adam_beta2": task.beta2, "adam_epsilon": task.eps, "max_grad_norm": task.max_norm,
            "bf16": task.precision == "bfloat16", "torch_compile": best,
            "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "logging_nan_inf_filter": False,
        }  # fmt: skip
        if task.precision == "float32":
            keys["tf32"] = False  # `torch_compile` enables it by default
        argv = [f"--{key}={value}" for key, value in (keys | options).items()]
        (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_args_into_dataclasses(argv)
        trainer = LossTrainer(model=model, args=arguments, train_dataset=data)
        trainer.add_callback(AfterStep(trainer, clock))
        trainer.train()


if __name__ == "__main__":
    main()
