"""Confirms a plan: its memory from the real model under fake tensors. Imports torch when it does."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from titanlike.tools.planning.plan import Plan, make_plan, ranks_to_simulate
from titanlike.utils import system

LARGE = 2e10
"""Parameters of a model whose ranks are simulated in parallel: half a minute each, and a process takes five seconds to start."""


def confirm(plan: Plan, progress: Callable[[str, int, int], None]) -> Plan:
    """Returns the plan with the simulated memory of the pipeline ranks that decide, or the same plan if it cannot be simulated.

    Args:
        plan: A plan from formulas.
        progress: Called with a text, the number of ranks that are done, and that of all.
    """
    from titanlike.tools.planning.simulate import can_simulate, simulate

    if not can_simulate(plan.job):
        return plan
    simulated = {}
    ranks = ranks_to_simulate(plan)
    if len(ranks) == 1 or plan.job.recipe.model.num_parameters() < LARGE:
        for done, rank in enumerate(ranks):
            progress(f"simulating pipeline rank {rank} with fake tensors", done, len(ranks))
            simulated[rank] = simulate(plan.job, rank)
    else:
        num_workers = min(len(ranks), system.num_cores())
        context = get_context("spawn")
        with ProcessPoolExecutor(num_workers, context, system.end_with_parent, (os.getpid(),)) as workers:
            tasks = {rank: workers.submit(simulate, plan.job, rank) for rank in ranks}
            for done, (rank, task) in enumerate(tasks.items()):
                progress(f"simulating {len(ranks)} pipeline ranks with fake tensors", done, len(ranks))
                simulated[rank] = task.result()
    return make_plan(plan.job, plan.hardware, simulated)
