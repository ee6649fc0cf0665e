"""Preference pairs of different lengths, for tests."""

import json
from pathlib import Path
from typing import Any

from tests.training import tiny
from titanlike.config.dpo import PreferenceData
from titanlike.recipe.dpo import DpoRecipe

SEQ_LEN = 96


def write_pairs(path: Path, count: int = 60) -> Path:
    """Writes pairs in the formats that data sets have, of which some are longer than a sequence."""
    with path.open("w") as file:
        for n in range(count):
            prompt, chosen, rejected = f"{n}?", "yes" * (n % 5 + 1), "no" * (n % 7 + 1) + "é" * (60 * (n % 20 == 11))
            if n % 3 == 0:
                record: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            else:
                messages = [{"role": "user", "content": prompt}]
                if n % 3 == 1:  # a turn that both have
                    messages += [{"role": "assistant", "content": "what?"}, {"role": "user", "content": "go"}]
                answers = [[{"role": "assistant", "content": each}] for each in (chosen, rejected)]
                record = {"chosen": messages + answers[0], "rejected": messages + answers[1]}
            file.write(json.dumps(record) + "\n")
    return path


def preference_recipe(folder: Path, name: str, **sections: Any) -> DpoRecipe:
    """Returns a small recipe with these pairs."""
    file = folder / "pairs.jsonl"
    file = file if file.exists() else write_pairs(file)
    data = dict(source="preference", path=str(file), holdout_every=4, cache=str(folder / "cache")) | sections.pop(
        "data", {}
    )
    training = dict(steps=2, seq_len=SEQ_LEN) | sections.pop("training", {})
    validation = dict(interval=2, batches=1)
    recipe = tiny(
        folder, name, data=PreferenceData(**data), training=training, **{"validation": validation, **sections}
    )
    assert isinstance(recipe, DpoRecipe)
    return recipe
