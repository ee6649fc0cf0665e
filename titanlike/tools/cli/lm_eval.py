"""`titanlike lm_eval`: the program of lm-evaluation-harness, which then knows models of this library."""

import argparse
import importlib.util
import sys
from typing import Any

from titanlike.config import UserError


def add(commands: Any) -> None:
    """Adds `lm_eval` to the commands of `titanlike`."""
    text = "Runs lm-evaluation-harness with --model titanlike --model_args path=RUN|CHECKPOINT|FOLDER"
    # All options, --help too, belong to the harness: no word that begins with - is an option of this parser.
    parser = commands.add_parser("lm_eval", help=text, add_help=False, prefix_chars="\0")
    parser.set_defaults(run=run, parser=parser, accepted="")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of lm_eval; --help lists them")


def run(arguments: argparse.Namespace) -> None:
    """Runs the program of the harness with these arguments."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed; run: pip install 'titanlike[eval]'")
    from lm_eval.__main__ import cli_evaluate

    import titanlike.tools.harness  # noqa: F401  registers the model

    sys.argv = ["lm_eval", *arguments.arguments]
    cli_evaluate()
