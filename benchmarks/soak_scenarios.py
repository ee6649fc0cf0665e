"""The runs of the soak test: where their checkpoints are, their layouts, and what disturbs and kills them."""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = {
    "rank": "one rank, SIGKILL",
    "all": "all processes, SIGKILL",
    "launcher": "the launcher, SIGKILL",
    "term": "the launcher, SIGTERM",
}
AIMS = {"start": 6, "load": 4, "steps": 4, "save": 6}  # kills out of twenty
PHASES = {
    "launch": "launcher start", "start": "rank start", "load": "loading", "steps": "training", "save": "saving",
}  # fmt: skip
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"replicate": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"context": 2},
)  # the other dimension is `shard`


@dataclass(frozen=True)
class Scenario:
    """A run of the soak test."""

    name: str
    recipe: Mapping[str, str]
    disturbances: tuple[str, ...]
    layouts: tuple[Mapping[str, int], ...] = ({},)
    """The layout of each start is drawn from these. With more than one, the numbers are close and not equal."""

    @property
    def is_exact(self) -> bool:
        return len(self.layouts) == 1


DROPOUT = {"model.dropout": "0.1"}
SCENARIOS = (
    Scenario("local disk", DROPOUT, ("paused rank", "full disk")),
    Scenario("S3", DROPOUT | {"checkpoint.dir": "s3://soak"}, ("paused rank", "slow store", "lost store")),
    Scenario("changing layouts", {}, ("paused rank", "full disk"), LAYOUTS),
)
