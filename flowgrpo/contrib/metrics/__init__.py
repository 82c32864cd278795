"""Metrics of other packages as rewards: imscore, pyiqa and torchmetrics."""
