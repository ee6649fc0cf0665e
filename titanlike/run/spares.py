"""The nodes of an elastic job that its recipe can use, and what the others do."""

import sys
from contextlib import suppress
from dataclasses import replace

from titanlike.config import UserError
from titanlike.distributed import environment
from titanlike.recipe import PretrainRecipe
from titanlike.run.checks import check_recipe
from titanlike.utils.live_line import LiveLine


def without_spares(recipe: PretrainRecipe, ranks: environment.RankInfo) -> environment.RankInfo:
    """Returns the ranks of an elastic job, on as many nodes as the recipe can use. Processes of other nodes wait here for the
    end of the job."""
    if recipe.checkpoint.resume_from:
        raise UserError(
            f"checkpoint.resume_from = {recipe.checkpoint.resume_from}, but a job whose number of nodes may change resumes from "
            "its newest checkpoint at every restart; resume from that step with a fixed NNODES first"
        )
    if not ranks.started_by_launcher:  # the launcher's check, for the least number of nodes
        return ranks
    for size in range(ranks.world_size, 0, -ranks.local_world_size):
        with suppress(UserError):
            check_recipe(recipe, size)
            break
    else:
        return ranks  # the check of all of them says what is wrong
    if ranks.rank >= size:
        from titanlike.distributed.end_of_job import wait_for_end

        nodes, used = (number // ranks.local_world_size for number in (ranks.world_size, size))
        if ranks.local_rank == 0:
            LiveLine().print(f"spare   the recipe can use {used} of the {nodes} nodes; this one waits")
        wait_for_end()
        sys.exit(0)
    environment.set_world_size(size)
    return replace(ranks, world_size=size)
