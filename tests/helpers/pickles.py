"""Pickles that nobody may read."""

import os


class Command:
    """A pickle that runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)
