"""The trials of a sweep in Optuna's storage: suggestions, reports, pruning. Everything can be resumed after a kill at any time.

Suggestions and pruning are functions of the seed, the number of the trial and the results in the storage, and not of the history
of this process. The storage is a journal in the sweep's directory, which Optuna's dashboard reads as well.
"""

import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlike.config import UserError
from titanlike.config.schema import describe
from titanlike.tools.programs import recipe_types
from titanlike.tools.sweep.config import Dimension, SweepPlan, as_text
from titanlike.tools.sweep.results import Trial

try:
    import optuna
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise UserError('a sweep requires Optuna, which is not installed; run: pip install "titanlike[sweep]"') from None

JOURNAL = "optuna.journal"
STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Study:
    """The trials of one sweep. The caller excludes other processes from its directory."""

    def __init__(self, plan: SweepPlan) -> None:
        """Opens the storage, or creates it. Raises `UserError` if it has the trials of another sweep."""
        optuna.logging.set_verbosity(logging.ERROR)
        self.plan, self.sweep = plan, plan.sweep
        self.distributions = {key: _distribution(key, dimension) for key, dimension in plan.dimensions.items()}
        plan.path.mkdir(parents=True, exist_ok=True)
        self._storage = _open_storage(plan.path / JOURNAL)
        self._study = optuna.create_study(
            study_name="sweep", storage=self._storage, direction=self.sweep.direction, load_if_exists=True
        )
        self._id = self._storage.get_study_id_from_name("sweep")
        self._check_definition()

    def trials(self) -> list[Trial]:
        """Returns all trials in the order of their numbers."""
        return [self._as_trial(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def create_trial(self) -> Trial:
        """Suggests values and adds a running trial with them, in one write to the storage."""
        frozen = self._study.get_trials(deepcopy=False)
        number = len(frozen)
        # A sampler of its own for each trial: its random numbers do not depend on the earlier suggestions of this process.
        sampler = optuna.samplers.TPESampler(
            seed=(self.sweep.seed * 1_000_003 + number) % 2**32, n_startup_trials=self.sweep.startup_trials
        )
        copy = optuna.create_study(sampler=sampler, direction=self.sweep.direction)
        copy.add_trials([trial for trial in frozen if trial.state.is_finished()])
        suggested = copy.ask(self.distributions).params
        self._study.add_trial(
            optuna.create_trial(state=TrialState.RUNNING, params=suggested, distributions=dict(self.distributions))
        )
        return self.trials()[number]

    def report(self, number: int, records: Sequence[Mapping[str, Any]]) -> str:
        """Adds what the run of a running trial has recorded. Returns why it is pruned, or an empty string."""
        frozen, metric = self._frozen(number), self.sweep.metric
        if frozen.state.is_finished():
            return str(frozen.user_attrs["reason"])
        values = {record["step"]: record[metric] for record in records if metric in record}
        for step, recorded in sorted(values.items()):
            if step < max(frozen.intermediate_values, default=0):
                continue  # was reported, and was no reason to prune
            value = math.nan if recorded is None else float(recorded)
            if step not in frozen.intermediate_values:
                self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)
                frozen = self._frozen(number)
            if reason := self._prune_reason(frozen, step, value):
                self._end(number, TrialState.PRUNED, reason)
                return reason
        return ""

    def complete(self, number: int) -> None:
        """Ends a trial whose run has trained all steps. It fails without a value."""
        values = self._frozen(number).intermediate_values
        if not values:
            self.fail(number, f"the run recorded no {self.sweep.metric}")
        else:
            self._study.tell(number, values[max(values)], skip_if_finished=True)

    def fail(self, number: int, reason: str) -> None:
        """Ends a trial whose run failed, unless it was pruned."""
        if not self._frozen(number).state.is_finished():
            self._end(number, TrialState.FAIL, reason)

    def importance(self) -> dict[str, float]:
        """Returns the importance of each key by PED-ANOVA; the sum is 1. Empty with fewer than four complete trials."""
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        searched = [key for key, one in self.distributions.items() if not one.single()]
        if len(complete) < 4 or len(searched) < 2 or len({trial.value for trial in complete}) < 2:
            return {}
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=0.5, evaluate_on_local=False)
        return dict(optuna.importance.get_param_importances(self._study, evaluator=evaluator, params=searched))

    def _prune_reason(self, frozen: FrozenTrial, step: int, value: float) -> str:
        metric, pruning = self.sweep.metric, self.sweep.pruning
        if not math.isfinite(value):
            return f"{metric} of step {step} is not finite"
        if pruning.pruner == "none":
            return ""
        pruner = optuna.pruners.MedianPruner(pruning.startup_trials, pruning.warmup_steps)
        if not pruner.prune(self._study, frozen):
            return ""
        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        others = [trial.intermediate_values[step] for trial in complete if step in trial.intermediate_values]
        best, side = (min, "above") if self.sweep.direction == "minimize" else (max, "below")
        own = best(frozen.intermediate_values.values())
        return (
            f"the best {metric} up to step {step}, {own:.6g}, is {side} {statistics.median(others):.6g}, the median of "
            f"{len(others)} complete trials at step {step}"
        )

    def _end(self, number: int, state: TrialState, reason: str) -> None:
        self._storage.set_trial_user_attr(self._trial_id(number), "reason", reason)  # a finished trial cannot change
        self._study.tell(number, state=state)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _as_trial(self, frozen: FrozenTrial) -> Trial:
        values = {
            step: value if math.isfinite(value) else None for step, value in sorted(frozen.intermediate_values.items())
        }
        return Trial(
            trial=frozen.number,
            value=frozen.value if frozen.state.is_finished() else next(reversed(values.values()), None),
            settings={key: as_text(frozen.params[key]) for key in self.distributions},
            step=max(values, default=0),
            state=STATES.get(frozen.state, "running"),
            reason=frozen.user_attrs.get("reason", ""),
            run=self.plan.run_name(frozen.number),
            values=values,
        )

    def _check_definition(self) -> None:
        """Refuses to add trials to a sweep whose results are not comparable."""
        now, before = self.plan.definition(), self._study.user_attrs.get("definition")
        if before is None:
            self._study.set_user_attr("definition", now)
            return
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise UserError(
                f"{self.plan.path} has the trials of a sweep with another {', '.join(changed)}; restore it to resume them, or "
                "choose another name for this one"
            )


def _distribution(key: str, dimension: Dimension) -> BaseDistribution:
    if dimension.values:
        return CategoricalDistribution([as_text(value) for value in dimension.values])
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None and high is not None  # load_sweep has checked them
    types = {each.name: each.type for recipe_type in recipe_types().values() for each in describe(recipe_type)}
    if all(isinstance(each, int) for each in (low, high, step or 1)) and not types.get(key, "").startswith("number"):
        return IntDistribution(int(low), int(high), log=dimension.log, step=int(step or 1))
    return FloatDistribution(float(low), float(high), log=dimension.log, step=step)


def _open_storage(path: Path) -> JournalStorage:
    """Opens the journal after a process may have been killed while it wrote to it. Raises `UserError` if it is damaged."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(
            f"{path} is damaged; restore the file, or delete {path.parent} and start the sweep again"
        ) from None
