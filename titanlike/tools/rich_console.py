"""Rich's console, for output that another program may stop reading."""

import rich.console


class RichConsole(rich.console.Console):
    """A console that reports a closed pipe as `print` does. Rich's own exits with code 1."""

    def on_broken_pipe(self) -> None:
        """Raises the error that is being handled."""
        raise
