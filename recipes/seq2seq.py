"""Trains an encoder-decoder on corrupted spans of text, or on pairs of texts. The whole program, from top to bottom.

    ./run_train.sh train_configs/seq2seq_debug.toml --seq2seq.noise_density=0.3

To change it, copy it: add a section of your own to the recipe and a line that uses it to the loop (docs/extending.md).
"""

import sys
from pathlib import Path

if (clone := Path(__file__).resolve().parents[1]).joinpath("titanlike").is_dir():
    sys.path.insert(0, str(clone))  # for `python recipes/seq2seq.py` where titanlike is not installed

from titanlike.recipe.seq2seq import Seq2SeqRecipe
from titanlike.run.start import start

if __name__ == "__main__":
    recipe = start(Seq2SeqRecipe)  # before torch is imported: a wrong recipe is refused within a second

import torch

from titanlike.data.batches import openers
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim import build_optimizer, gradient_norms, learning_rate, set_learning_rate
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run.loop import forward_backward, num_labels, sum_over_data, validate
from titanlike.run.run import Run


def main(recipe: Seq2SeqRecipe) -> None:
    """Trains as the recipe says, from the run's latest checkpoint if there is one."""
    training, parallelism, seed = recipe.training, recipe.parallelism, recipe.run.seed
    with Run(recipe) as run:  # process group, lock, watchdog, signals, metrics, checkpoints
        mesh = build_mesh(run.device.type, **parallelism.dimensions(), expert=parallelism.expert)

        # Data: text to tokens to batches, which depend on the seed and the step, not on the layout. So do the corrupted spans.
        tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size, recipe.checkpoint.initial)
        data = build_dataloaders(
            recipe.data, training, tokenizer, seed=seed, validate=recipe.validation.interval > 0,
            dropout=recipe.model.dropout > 0, vocab_size=recipe.model.vocab_size,
            device=run.device, open_sources=openers.of(recipe), **mesh.data_shard(training.seq_len),
        )  # fmt: skip
        run.on_validation(validate, data.validation, mesh)
        run.find_checkpoint(data, tokenizer, mesh)  # or refuses a recipe that would not continue its run

        # The model: built on the meta device, sharded and given its loss, then allocated and initialized.
        with torch.device("meta"):
            model = build_model(recipe.model)
        model = parallelize(
            model, mesh, split=parallelism.split(recipe.model), training=training, parallelism=parallelism,
            float8=recipe.float8, activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
        )  # fmt: skip
        initialize(model, run.device, seed, offload=parallelism.cpu_offload)
        optimizer = build_optimizer(model, recipe.optimizer, seed)
        run.restore(model, optimizer, data.training)  # a checkpoint, or the weights that the recipe names

        for step, microbatches in run.steps():  # to the last, or until all ranks agree to stop
            lr = learning_rate(step, training.steps, recipe.optimizer.lr, recipe.schedule)
            set_learning_rate(optimizer, lr)
            num_tokens = sum_over_data(num_labels(microbatches), mesh)
            loss = forward_backward(model, microbatches, num_tokens, mesh, run.loss_scale)
            norms = gradient_norms(model, mesh.pipeline)
            run.update(optimizer, loss, norms)  # clips, steps, zeroes gradients; skips or stops if they are not finite
            run.log(loss=loss.mean, grad_norm=norms.total, lr=lr)
            run.measure()  # validation, where it is due
            if run.is_save_due:  # also when the run stops
                run.save(model, optimizer)


if __name__ == "__main__":
    main(recipe)
