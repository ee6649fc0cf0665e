"""`titanlike COMMAND`, and `python -m titanlike COMMAND`."""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports, too, ends it without a stack trace

from titanlike.tools.cli.main import main  # noqa: E402

if __name__ == "__main__":
    main()
