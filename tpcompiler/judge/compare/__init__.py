"""The judge: invariants of the stages, lock-step simulation of all ranks, comparison. Must not import `passes`."""
