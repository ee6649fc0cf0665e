"""Seeding and restoring the global random generators."""

import json
import random

import numpy as np
import torch

from titanlike.utils.rng import generator_states, restore_generators, seed_generators


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(2).tolist()]


def test_seed_applies_to_all_generators() -> None:
    seed_generators(5)
    first = draws()
    assert draws() != first
    seed_generators(5)
    assert draws() == first
    seed_generators(6)
    assert not set(draws()) & set(first)


def test_restored_generators_repeat_their_numbers() -> None:
    seed_generators(1)
    draws()  # normal numbers are generated in pairs: the state includes the second one
    states = json.loads(json.dumps(generator_states()))
    expected = [draws(), draws()]
    seed_generators(2)
    draws()
    if not torch.cuda.is_available():
        states["cuda"] = states["torch"]  # saved where there is a GPU
    restore_generators(states)
    assert [draws(), draws()] == expected
