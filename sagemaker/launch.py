"""Submits a recipe to SageMaker, as `titanlike launch sagemaker` does.

python sagemaker/launch.py llama3_8b --nodes 4 --dry-run
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # for `titanlike`, which need not be installed

from titanlike.tools.cli.main import main

sys.argv[1:1] = ["launch", "sagemaker"]
main()
