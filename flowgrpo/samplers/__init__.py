"""Samplers: noise grids, transition kernels, deterministic solvers, and plans of the stochastic and trained steps."""
