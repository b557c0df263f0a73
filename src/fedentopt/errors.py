"""The one error a user can cause."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message names what was wrong (field or file), the value, and what would be accepted. The command
    line prints it without a traceback and ends with exit code 2; as a library error it is a `ValueError`.
    """
