"""The requests of examples/sagemaker_estimator.py, with the SDK that is installed."""

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import boto3
import pytest
import sagemaker_estimator

from tests.sdk.test_senders import REQUESTS, ROLE, SDKS, installed, server, session  # noqa: F401  fixtures
