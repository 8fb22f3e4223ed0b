"""Names the lines of code whose allocations grow, from two summaries of torch's memory snapshot.

The snapshot itself is a pickle and is never read back. The summary is made from the dict in memory and written as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_MAX_SITES = 200
_UNKNOWN = "unknown (recorded without stacks)"
_INSIDE = ("/torch/", "/holdfast/", "/site-packages/", "<frozen", "<string>", "??")
"""parts of file names that are not the user's code"""


class Site(NamedTuple):
    """A line of code and the bytes allocated there that are still in use."""

    place: str
    grown: int
    now: int


def summarize(snapshot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bytes in use by place, and the totals, of a snapshot dict. What has another form counts as unknown."""
    places: Counter[str] = Counter()
    reserved = unused = largest_unused = 0
    for segment in _dicts(snapshot.get("segments")):
        reserved += _size(segment, "total_size")
        for block in _dicts(segment.get("blocks")):
            size = _size(block, "size")
            if str(block.get("state", "")).startswith("active"):
                places[find_place(block)] += size
            else:
                unused, largest_unused = unused + size, max(largest_unused, size)
    totals = {"reserved": reserved, "unused": unused, "largest_unused": largest_unused, "in_use": places.total()}
    return {"places": dict(places.most_common(_MAX_SITES)), **totals}


def find_place(block: Mapping[str, Any]) -> str:
    """Return the innermost frame of the user's code that made an allocation, as `file:line in function`."""
    frames = block.get("frames")
    if not frames and (history := list(_dicts(block.get("history")))):
        frames = history[0].get("frames")
    described = [(str(f.get("filename", "")), f.get("line"), f.get("name")) for f in _dicts(frames)]
    python = [frame for frame in described if frame[0].endswith(".py")]
    for file, line, name in [f for f in python if not any(part in f[0] for part in _INSIDE)] or python[-1:]:
        return f"{file}:{line} in {name}"
    return _UNKNOWN


def growing(before: Mapping[str, Any], after: Mapping[str, Any], most: int = 5) -> list[Site]:
    """Return the places whose memory has grown between two summaries, the largest growth first."""
    old, new = before.get("places"), after.get("places")
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return []
    known = {place: size for place, size in new.items() if isinstance(size, int)}
    sites = [Site(str(place), size - int(old.get(place) or 0), size) for place, size in known.items()]
    return sorted((site for site in sites if site.grown > 0), key=lambda site: -site.grown)[:most]


def _dicts(values: Any) -> Iterable[Mapping[str, Any]]:
    return (value for value in values if isinstance(value, Mapping)) if isinstance(values, list | tuple) else ()


def _size(values: Mapping[str, Any], name: str) -> int:
    size = values.get(name)
    return size if isinstance(size, int) and size > 0 else 0
