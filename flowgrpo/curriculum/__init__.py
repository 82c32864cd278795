"""Optional prompt curricula and resampling of groups; the parts of every method are in `advantages` and
`objectives`."""
