"""The shipped program with two faults inside: gradients that are NaN at some steps, and a clock that jumps by up to a day.

The soak test runs it. The steps are a function of the variable SOAK_SEED, so that the undisturbed run has the same NaNs. Only the
disturbed run has the variable SOAK_CLOCK, and jumps.
"""

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from titanlike import optim

SHIPPED = Path(__file__).resolve().parents[1] / "recipes" / "pretrain.py"
NAN_EVERY, JUMP_EVERY = 47, 31  # steps; a run stops at four NaNs in 100 steps

_learning_rate, _gradient_norms, _time = optim.learning_rate, optim.gradient_norms, time.time
_step, _offset = 0, 0.0


def _at_step(step: int, *arguments: Any) -> float:
    global _step, _offset
    _step = step
    if "SOAK_CLOCK" in os.environ and step % JUMP_EVERY == 0:
        _offset = random.Random(f"{os.environ['SOAK_SEED']} {step}").uniform(-86400.0, 86400.0)
    return _learning_rate(step, *arguments)


def _spoiled_norms(model: Any, *arguments: Any) -> Any:
    if _step % NAN_EVERY == int(os.environ["SOAK_SEED"]) % NAN_EVERY:
        for parameter in model.parameters():
            if parameter.grad is not None:
                getattr(parameter.grad, "_local_tensor", parameter.grad).fill_(float("nan"))
    return _gradient_norms(model, *arguments)


if __name__ == "__main__":
    setattr(optim, "learning_rate", _at_step)  # noqa: B010  functions with other types
    setattr(optim, "gradient_norms", _spoiled_norms)  # noqa: B010
    time.time = lambda: _time() + _offset
    sys.path[0] = str(SHIPPED.parent)
    # Not by runpy, which would make the shipped program the running one.
    exec(compile(SHIPPED.read_text(), SHIPPED, "exec"), {"__name__": "__main__", "__file__": str(SHIPPED)})
