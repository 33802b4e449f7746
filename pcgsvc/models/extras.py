"""Optional packages, imported at their use.

In: a module name and the extra of pcgsvc that brings it. Out: the module, or a `ConfigError` that
says what to install.
"""

from __future__ import annotations

import importlib
from typing import Any

from pcgsvc.errors import ConfigError


def require(module: str, extra: str) -> Any:
    """Import `module` and return it (as Any: optional packages are not part of our types).

    Raises:
        ConfigError: it cannot be imported; the message names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the Python package {module.partition('.')[0]!r} is needed here and cannot be "
            f"imported ({error}). Run: pip install 'pcgsvc[{extra}]'"
        ) from error
