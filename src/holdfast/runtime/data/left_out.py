"""How much data may be left out in a row before the run ends: without a bound it would look for a batch for ever."""

from __future__ import annotations

from holdfast.core.base.errors import DataError
from holdfast.core.record.quarantine import Quarantine

MAX_EPOCHS = 500
"""whole epochs in a row of which ranges leave nothing. An incident leaves out single batches, but an epoch may be one"""
MAX_SAMPLER_BATCHES, MAX_STREAM_BATCHES = 10_000, 100_000
"""batches in a row, of a sampler that goes on beyond its length, and of a stream, which may have no end"""


def nothing_left(quarantine: Quarantine, where: str) -> DataError:
    """Return the error of a run whose data is left out entirely."""
    return DataError(
        f"{where} has no sample left that is not quarantined ({quarantine.summary()}): look at {quarantine.run}/"
        f"quarantine.json and correct the data; `holdfast ack {quarantine.run} --release-data` serves everything again; or "
        "start over in another run_dir"
    )
