"""What can be set, how it is read, and what it becomes.

In: nested plain dicts, from Hydra, YAML or a caller. Out: one `Config`, resolved and within limits.
Knows nothing of models, graphs or the disk; only `compose` and `devices` import more than Python.
"""

from pcgsvc.config.choices import (
    CacheAction,
    CacheMode,
    Compiler,
    ErrorMode,
    Graphs,
    Job,
    Mode,
    MoeBackend,
    OnMismatch,
    OnUncovered,
    Outputs,
    Strategy,
)
from pcgsvc.config.limits import validate, validate_sizing
from pcgsvc.config.parse import copy, from_dict, replace, to_dict, unknown_setting, updated
from pcgsvc.config.resolve import captures, dropped_sizes, resolve, schedule
from pcgsvc.config.schema import (
    AUTO,
    AttentionConfig,
    BenchConfig,
    CacheConfig,
    CaptureConfig,
    CompareConfig,
    CompilerConfig,
    Config,
    DebugConfig,
    ExplainConfig,
    ModelConfig,
    MoeConfig,
    PartitionConfig,
    SizingConfig,
    SweepConfig,
)

__all__ = [
    "AUTO",
    "AttentionConfig",
    "BenchConfig",
    "CacheAction",
    "CacheConfig",
    "CacheMode",
    "CaptureConfig",
    "CompareConfig",
    "Compiler",
    "CompilerConfig",
    "Config",
    "DebugConfig",
    "ErrorMode",
    "ExplainConfig",
    "Graphs",
    "Job",
    "Mode",
    "ModelConfig",
    "MoeBackend",
    "MoeConfig",
    "OnMismatch",
    "OnUncovered",
    "Outputs",
    "PartitionConfig",
    "SizingConfig",
    "Strategy",
    "SweepConfig",
    "captures",
    "copy",
    "dropped_sizes",
    "from_dict",
    "replace",
    "resolve",
    "schedule",
    "to_dict",
    "unknown_setting",
    "updated",
    "validate",
    "validate_sizing",
]
