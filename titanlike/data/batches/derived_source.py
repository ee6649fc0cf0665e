"""A source of batches that changes the sequences of another one. No torch."""

from titanlike.data.batches.packed_dataset import BatchSource, Position


class DerivedSource:
    """What does not depend on how the sequences are changed: a subclass has `read`."""

    def __init__(self, source: BatchSource, seq_len: int) -> None:
        self.source, self.seq_len = source, seq_len

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def num_distinct(self) -> int:
        """Number of global batches before a sequence repeats, if the source knows it."""
        return self.source.num_distinct  # type: ignore[attr-defined]

    def load_position(self, position: Position | None) -> None:
        self.source.load_position(position)

    def position(self) -> Position | None:
        return self.source.position()
