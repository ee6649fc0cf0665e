"""The side-by-side benchmark: its comparisons, and titanlike against a hand-written loop."""

import pytest

from benchmarks.figures import figures, table


def test_ratios_compare_neighbouring_blocks() -> None:
    plain = {
        "blocks": [1.0, 2.0, 4.0], "losses": [3.0, 2.0], "seconds_to_second_step": 1.0, "peak_memory_gib": 1.0, "device": "cpu",
    }  # fmt: skip
    rows = {
        "plain.best": plain,
        "titanlike.best": plain | {"blocks": [0.5, 1.0, 4.0], "losses": [3.0, 2.002]},
        "other.best": plain | {"blocks": [1.0, 2.0, 8.0], "peak_memory_gib": 2.0},
        "wrong.best": plain | {"blocks": [0.1, 0.1, 0.1], "losses": [3.0, 2.02]},
        "broken.best": {"failed": "no such thing"},
        "absent.best": {"failed": "...", "skipped": "ModuleNotFoundError: No module named 'absent'"},
    }
    run = dict(
        model="cpu_6m", device="cpu", precision="float32", tokens_per_step=50, block=2, matmul_flops_per_second=1e12
    )
    compared = {row: figures(one, rows, run) for row, one in rows.items()}
    ours = compared["titanlike.best"]
    assert ours["tokens_per_second"] == 100.0
    assert ours["relative_to_plain.best"] == {"median": 2.0, "low": 1.0, "high": 2.0}
    assert ours["max_loss_difference"] == pytest.approx(0.001) and not compared["wrong.best"]["losses_match"]
    printed = table([run | {"rows": compared}])
    assert "| titanlike.best | 100 | 2.000 (1.00 to 2.00) | 0% | 1.00 | 1.0 / not measured | match |" in printed
    assert (
        "| wrong.best | 1,000 | 20.000 (10.00 to 40.00) | 4% | 1.00 | 1.0 / not measured | differ by 1e-02 |" in printed
    )
    assert "| broken.best | failed |" in printed
    assert "| absent.best | ModuleNotFoundError: No module named 'absent' |" in printed
    # A row whose losses differ is not a peer.
    assert (
        "the fastest peer, other.best: 2.000 (2.00 to 2.00) tokens/s, 0.50 peak memory, 1.00 time to the second"
        in printed
    )
