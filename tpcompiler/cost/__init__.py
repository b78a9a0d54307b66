"""Costs: machines, kernels, collectives, paths between shardings, and the predicted time of a call."""
