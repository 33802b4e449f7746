"""Files that are whole or as they were.

In: a path and what it shall hold. Out: the file. Knows nothing of what is in it.
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
    """Write JSON in one step; what JSON has no form for (NaN too) is an error, and no file."""
    write_whole(path, (json.dumps(tree, indent=2, allow_nan=False) + "\n").encode())
