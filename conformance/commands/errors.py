"""What a command cannot do."""


class CannotJudge(Exception):  # noqa: N818 -- a statement, as the message is
    """The command cannot be carried out; the message is the one line that the user sees. Exit code 2."""
