"""Scheduling policies: which waiting sequence starts first, which running one is preempted."""
