"""Phases of a run: settings that change at an epoch."""
