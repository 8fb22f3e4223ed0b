"""Every kind an incident can have: those of the curve, and those of the machine."""

from __future__ import annotations

from holdfast.diagnosis.find.episodes import KINDS as OF_THE_CURVE

OF_THE_MACHINE = {
    "oom": "the device ran out of memory",
    "memory_leak": "allocated memory rises and does not stop",
    "fragmentation": "reserved memory grows away from what is allocated",
    "hang": "a rank or a collective stands still",
    "throughput_drop": "steps become much slower and stay so",
    "straggler": "one rank is slower than the rest",
}
INCIDENTS = {**OF_THE_CURVE, **OF_THE_MACHINE}
