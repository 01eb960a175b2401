"""The one family of errors whose message is meant for the user: it says what is wrong, where, and what to do."""


class UserError(ValueError):
    """A problem that the user can mend; the command line shows its message and no traceback."""
