"""Files on disk: checkpoints, JSON, paths that can be written."""
