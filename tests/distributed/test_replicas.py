"""Equal replicas raise no alarm; a replica that differs is found on the right rank."""

from __future__ import annotations


def test_four_ranks_find_the_replica_that_differs(run):
    """One job for many checks, since processes are slow to start. See the programs."""
    run("replica_programs.everything:4")
