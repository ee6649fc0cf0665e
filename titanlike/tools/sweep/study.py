"""The trials of a sweep in Optuna's storage: suggestions, reports, pruning. Everything can be resumed after a kill at any time.

Suggestions and pruning are functions of the seed, the number of the trial and the results in the storage, and not of the history
of this process. The storage is a journal in the sweep's directory, which Optuna's dashboard reads as well.
"""

import json
import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from titanlike.config import UserError
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
        self.distributions = {dimension.key: _distribution(dimension) for dimension in plan.dimensions}
        plan.path.mkdir(parents=True, exist_ok=True)
        self._storage = JournalStorage(_open_journal(plan.path / JOURNAL))
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
        template = optuna.create_trial(
            state=TrialState.RUNNING, params=suggested, distributions=dict(self.distributions)
        )
        self._storage.create_new_trial(self._id, template)
        return self.trials()[number]

    def report(self, number: int, values: Sequence[tuple[int, float]]) -> str:
        """Adds a running trial's values by step, in ascending order. Returns why it is pruned, or an empty string."""
        frozen = self._frozen(number)
        if frozen.state.is_finished():
            return self._reason(frozen)
        for step, value in values:
            if step < max(frozen.intermediate_values, default=0):
                continue  # was reported, and was no reason to prune
            if step not in frozen.intermediate_values:
                self._storage.set_trial_intermediate_value(self._trial_id(number), step, value)
                frozen = self._frozen(number)
            if reason := self._prune_reason(frozen, step, value):
                self._finish(number, TrialState.PRUNED, reason=reason, values=[value] if math.isfinite(value) else None)
                return reason
        return ""

    def complete(self, number: int) -> None:
        """Ends a trial whose run has trained all steps. It fails without a value."""
        frozen = self._frozen(number)
        if not frozen.intermediate_values:
            self.fail(number, f"the run recorded no {self.sweep.metric}")
        elif not frozen.state.is_finished():
            self._finish(number, TrialState.COMPLETE, values=[frozen.intermediate_values[frozen.last_step or 0]])

    def fail(self, number: int, reason: str) -> None:
        """Ends a trial whose run failed."""
        if not self._frozen(number).state.is_finished():
            self._finish(number, TrialState.FAIL, reason=reason)

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

    def _finish(self, number: int, state: TrialState, reason: str = "", values: list[float] | None = None) -> None:
        trial_id = self._trial_id(number)
        if reason:  # before the state: a finished trial cannot change
            self._storage.set_trial_user_attr(trial_id, "reason", reason)
        self._storage.set_trial_state_values(trial_id, state, values)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(self._trial_id(number))

    def _trial_id(self, number: int) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._id, number)

    def _as_trial(self, frozen: FrozenTrial) -> Trial:
        values = {step: frozen.intermediate_values[step] for step in sorted(frozen.intermediate_values)}
        return Trial(
            number=frozen.number,
            settings={key: as_text(frozen.params[key]) for key in self.distributions},
            state=STATES.get(frozen.state, "running"),
            value=frozen.value if frozen.state.is_finished() else next(reversed(values.values()), None),
            values=values,
            reason=self._reason(frozen) if frozen.state.is_finished() else "",
        )

    @staticmethod
    def _reason(frozen: FrozenTrial) -> str:
        return str(frozen.user_attrs.get("reason", ""))

    def _check_definition(self) -> None:
        """Refuses to add trials to a sweep whose results are not comparable."""
        now, before = self.plan.definition, self._study.user_attrs.get("definition")
        if before is None:
            self._storage.set_study_user_attr(self._id, "definition", now)
            return
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            raise UserError(
                f"{self.plan.path} has the trials of a sweep with another {', '.join(changed)}; restore it to resume them, or "
                "choose another name for this one"
            )


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.values:
        return CategoricalDistribution([as_text(value) for value in dimension.values])
    if dimension.is_integer:
        step = 1 if dimension.step is None else int(dimension.step)
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log, step=step)
    return FloatDistribution(float(dimension.low), float(dimension.high), log=dimension.log, step=dimension.step)


def _is_operation(line: bytes) -> bool:
    """Whether a line of the journal is an operation of Optuna."""
    try:
        return {"op_code", "worker_id"} <= json.loads(line).keys()
    except (ValueError, AttributeError, RecursionError):
        return False


def _open_journal(path: Path) -> JournalFileBackend:
    """Opens the journal after a process may have been killed while it wrote to it. Raises `UserError` if it is damaged."""
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        path.write_bytes(content)
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        if not _is_operation(line):
            raise UserError(
                f"{path}: line {number} is damaged; restore the file, or delete {path.parent} and start the sweep again"
            )
    return JournalFileBackend(str(path))
