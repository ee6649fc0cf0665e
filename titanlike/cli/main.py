"""`titanlike COMMAND`: the commands that are not training itself."""

import argparse
import json

from titanlike.config import PretrainRecipe
from titanlike.config.schema import editor_schema


def main() -> None:
    """Run the command of this command line."""
    parser = argparse.ArgumentParser(prog="titanlike", description="Training itself is started by ./run_train.sh.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("schema", help="print the JSON Schema of recipes, for editors")
    parser.parse_args()
    print(json.dumps(editor_schema(PretrainRecipe), indent=2))


if __name__ == "__main__":
    main()
