"""Pages of samples: PNG grids, HTML, animated clips."""
