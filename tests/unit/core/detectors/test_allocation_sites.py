"""The lines whose allocations grow are named from two snapshots, whatever form a snapshot has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.detectors.allocation_sites import Site, growing, summarize


def frame(file: str, line: int, name: str) -> dict:
    return {"filename": file, "line": line, "name": name}


def block(size: int, *frames: dict, state: str = "active_allocated") -> dict:
    return {"size": size, "state": state, "frames": list(frames)}


INSIDE = frame("/venv/site-packages/torch/nn/functional.py", 5, "linear")
LOSS, MODEL = frame("/home/me/train.py", 42, "train"), frame("/home/me/model.py", 7, "forward")


def test_growth_is_named_by_the_innermost_line_of_the_user():
    before = summarize({"segments": [{"total_size": 100, "blocks": [block(10, INSIDE, MODEL, LOSS), block(30, LOSS)]}]})
    blocks = [block(60, INSIDE, MODEL, LOSS), block(35, LOSS), block(5, LOSS, state="inactive")]
    after = summarize({"segments": [{"total_size": 100, "blocks": blocks}]})
    assert growing(before, after) == [
        Site("/home/me/model.py:7 in forward", 50, 60),
        Site("/home/me/train.py:42 in train", 5, 35),
    ]
    assert (after["in_use"], after["unused"], after["largest_unused"], after["reserved"]) == (95, 5, 5, 100)


def test_allocations_without_stacks_are_unknown():
    summary = summarize({"segments": [{"blocks": [block(10), {"size": 4, "state": "active_pending_free"}]}]})
    assert summary["places"] == {"unknown (recorded without stacks)": 14}


anything = st.recursive(
    st.none() | st.integers() | st.text(max_size=8) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["segments", "blocks", "frames", "history", "size", "state", "places"]), inner
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["segments", "places"]), anything), anything)
def test_any_snapshot_is_summarized_without_an_error(snapshot, other):
    summary = summarize(snapshot)
    growing(summary, summary)
    growing(other if isinstance(other, dict) else {}, summary)
