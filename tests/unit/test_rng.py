"""The generators of a program of one's own: seeded, and put back to where they stood."""

import json
import random

import numpy as np
import torch

from titanlike.utils.rng import generator_states, restore_generators, seed_generators


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.rand(2).tolist()]


def test_a_seed_is_a_beginning_for_all() -> None:
    seed_generators(5)
    first = draws()
    assert draws() != first
    seed_generators(5)
    assert draws() == first
    seed_generators(6)
    assert not set(draws()) & set(first)


def test_all_go_on_from_where_they_stood() -> None:
    seed_generators(1)
    draws()  # both kinds of normal numbers are drawn in pairs, of which one is kept: it is a part of the state
    states = json.loads(json.dumps(generator_states()))
    expected = [draws(), draws()]
    seed_generators(2)
    draws()
    restore_generators(states)
    assert [draws(), draws()] == expected
