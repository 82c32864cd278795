"""The error of a person: one clear line, shown without a traceback, exit code 2."""


class UserError(ValueError):
    """What was got, what was expected and how to fix it, in one line."""
