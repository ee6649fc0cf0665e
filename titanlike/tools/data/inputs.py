"""The files that a command on text reads."""

from collections import Counter
from collections.abc import Sequence

from titanlike.config import UserError
from titanlike.data.documents.data_files import File
from titanlike.data.documents.listing import list_files


def list_inputs(inputs: Sequence[str | File]) -> list[File]:
    """Lists the files of a command's INPUT arguments, which must not overlap."""
    files = [file for item in inputs for file in ([item] if isinstance(item, File) else list_files(item, "INPUT"))]
    if twice := [name for name, count in Counter(file.name for file in files).items() if count > 1]:
        raise UserError(f"INPUT: {twice[0]} is given twice; give each file once")
    return files
