"""Files that are written whole, or stay as they were.

In: a path and content. Out: the file.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, its folder first if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: Path, tree: Any) -> None:
    """Write JSON in one step; what JSON cannot hold (NaN too) is an error."""
    write_whole(path, (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode())
