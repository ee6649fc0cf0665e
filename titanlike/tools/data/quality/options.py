"""The stages of `titanlike data prepare` besides tokenization, and their options."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from titanlike.data.tokens.tokenization import Options
from titanlike.tools.data.quality.filters import OwnFilter, Thresholds

FOLDER = "stages"  # in the folder that is being prepared: what the stages write for each other

Duplicates = Literal["count", "count-near", "remove", "remove-near"]
Stage = Literal["duplicates", "lines", "tokenize"]


@dataclass(frozen=True)
class Quality:
    """Which documents are removed, and why."""

    duplicates: Duplicates = "count"
    limits: Thresholds | None = None
    repeated_lines: int = 0  # documents that have a line which is removed; 0: no line is removed
    own: OwnFilter | None = None

    @property
    def stages(self) -> list[Stage]:
        """The passes over the text that are needed, in their order."""
        before: list[Stage] = ["duplicates"] if self.finds_duplicates else []
        if self.repeated_lines:
            before.append("lines")
        return [*before, "tokenize"]

    @property
    def finds_duplicates(self) -> bool:
        """Whether a pass finds duplicates. Exact ones are counted without."""
        return self.duplicates != "count"

    @property
    def finds_near_duplicates(self) -> bool:
        return self.duplicates.endswith("near")

    @property
    def removes_duplicates(self) -> bool:
        return self.duplicates.startswith("remove")

    @property
    def reads_documents(self) -> bool:
        """Whether complete documents are read, and not chunks of long ones."""
        return bool(self.finds_duplicates or self.limits or self.repeated_lines or self.own)

    def parameters(self) -> dict[str, Any]:
        """Returns what differs from the defaults, for the plan and the report."""
        found: dict[str, Any] = {}
        if self.own:
            found["filter"] = [self.own.name, self.own.fingerprint]
        if self.limits:
            found["quality"] = asdict(self.limits)
        if self.duplicates != "count":
            found["duplicates"] = self.duplicates
        if self.repeated_lines:
            found["repeated_lines"] = self.repeated_lines
        return found


@dataclass(frozen=True)
class WorkerOptions(Options):
    """What worker processes do with each work unit."""

    quality: Quality = Quality()
    stage: Stage = "tokenize"

    @property
    def stages(self) -> Path:
        """The folder of what the stages write for each other."""
        return self.folder / FOLDER
