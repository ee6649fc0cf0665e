"""Trains a language model on preference pairs with DPO, IPO or SimPO. The whole program, from top to bottom.

    ./run_train.sh train_configs/dpo_debug.toml --preference.beta=0.2

To change it, copy it: add a section of your own to the recipe and a line that uses it to the loop (docs/extending.md).
"""

import sys
from pathlib import Path

if (clone := Path(__file__).resolve().parents[1]).joinpath("titanlike").is_dir():
    sys.path.insert(0, str(clone))  # for `python recipes/dpo.py` where titanlike is not installed

from titanlike.recipe.dpo import DpoRecipe
from titanlike.run.start import start

if __name__ == "__main__":
    recipe = start(DpoRecipe)  # before torch is imported: a wrong recipe is refused within a second

import torch

from titanlike.data.batches import chats, openers
from titanlike.data.batches.dataloaders import build_dataloaders
from titanlike.data.tokens.tokenizer import build_tokenizer
from titanlike.inference.evaluator import Evaluator
from titanlike.models.common.init import initialize
from titanlike.models.registry import build_model
from titanlike.optim import build_optimizer, gradient_norms, learning_rate, set_learning_rate
from titanlike.parallelisms.mesh import build_mesh
from titanlike.parallelize import parallelize
from titanlike.run import preferences
from titanlike.run.loop import forward_backward, sum_over_data
from titanlike.run.run import Run


def main(recipe: DpoRecipe) -> None:
    """Trains as the recipe says, from the run's latest checkpoint if there is one."""
    training, parallelism, seed = recipe.training, recipe.parallelism, recipe.run.seed
    with Run(recipe) as run:  # process group, lock, watchdog, signals, metrics, checkpoints
        mesh = build_mesh(run.device.type, **parallelism.dimensions(), expert=parallelism.expert)

        # Data: pairs of conversations to tokens to batches, which depend on the seed and the step, not on the layout.
        tokenizer = build_tokenizer(recipe.tokenizer, recipe.model.vocab_size, recipe.checkpoint.initial)
        data = build_dataloaders(
            recipe.data, training, tokenizer, seed=seed, validate=recipe.validation.interval > 0,
            dropout=recipe.model.dropout > 0, vocab_size=recipe.model.vocab_size,
            device=run.device, open_sources=openers.of(recipe), **mesh.data_shard(training.seq_len),
        )  # fmt: skip
        template = chats.template_of(recipe.data, tokenizer)
        evaluator = Evaluator(
            recipe.evaluation, recipe.sample, recipe.data, training, recipe.model, tokenizer, seed, template
        )
        run.on_evaluation(evaluator, mesh)
        run.find_checkpoint(data, tokenizer, mesh)  # or refuses a recipe that would not continue its run

        # The model: built on the meta device, sharded and given its loss, then allocated; checkpoint.initial has its weights.
        with torch.device("meta"):
            model = build_model(recipe.model)
        model = parallelize(
            model, mesh, split=parallelism.split(recipe.model), training=training, parallelism=parallelism,
            float8=recipe.float8, lora=recipe.lora, activation_checkpoint=recipe.activation_checkpoint, compile=recipe.compile,
            loss_reduction="none",
        )  # fmt: skip
        initialize(model, run.device, seed, offload=parallelism.cpu_offload)
        optimizer = build_optimizer(model, recipe.optimizer, seed)
        objective = preferences.build_objective(recipe, model, mesh, run.device, data)  # with the initial weights
        run.on_validation(objective.validate, data.validation, mesh)
        run.restore(model, optimizer, data.training)  # a checkpoint, or the weights that the recipe names

        for step, microbatches in run.steps():  # to the last, or until all ranks agree to stop
            lr = learning_rate(step, training.steps, recipe.optimizer.lr, recipe.schedule)
            set_learning_rate(optimizer, lr)
            num_pairs = sum_over_data(preferences.num_pairs(microbatches), mesh)
            loss = forward_backward(model, microbatches, num_pairs, mesh, run.loss_scale, objective)
            norms = gradient_norms(model, mesh.pipeline)
            run.update(optimizer, loss, norms)  # clips, steps, zeroes gradients; skips or stops if they are not finite
            run.log(loss=loss.mean, grad_norm=norms.total, lr=lr, **loss.metrics)
            run.measure()  # validation, evaluation and samples, where they are due
            if run.is_save_due:  # also when the run stops
                run.save(model, optimizer)


if __name__ == "__main__":
    main(recipe)
