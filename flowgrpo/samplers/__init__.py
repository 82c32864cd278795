"""How samples are drawn: noise grids, transition kernels, deterministic solvers, plans of which steps do what."""
