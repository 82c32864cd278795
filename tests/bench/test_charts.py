"""Charts of a bench's page."""

from __future__ import annotations

from flowgrpo.bench.charts import LONGEST, bars, shortened


def test_long_labels_keep_their_end():
    names = ["mix_grpo+grpo_guard", "mix_grpo+grpo_guard+texforce"]
    assert [shortened(name) for name in names] == ["mix_grpo+…po_guard", "mix_grpo+…texforce"]
    assert all(len(shortened(name)) == LONGEST for name in names) and shortened("awm") == "awm"
    drawn = bars([(name, 0.5, "0.500") for name in names], "accuracy")
    assert all(f">{shortened(name)}<title>{name}</title>" in drawn for name in names)
