"""What values a setting takes: enums whose values are the words of the YAML files, and forms."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated


class Mode(enum.Enum):
    """Which CUDA graphs serve which batches; the last two are (uniform decode, everything else)."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"


class Strategy(enum.Enum):
    """Where the graph is split: before the compiler, after fusion, or while capturing."""

    FX = "fx"
    INDUCTOR = "inductor"
    BREAKABLE = "breakable"


class Compiler(enum.Enum):
    """What compiles a region."""

    EAGER = "eager"
    INDUCTOR = "inductor"


class OnMismatch(enum.Enum):
    """What happens to a region whose compiled form computes something else than its ops."""

    ERROR = "error"
    EAGER = "eager"


class Graphs(enum.Enum):
    """What a captured segment is: a CUDA graph, a recording on the CPU, or nothing."""

    AUTO = "auto"
    CUDA = "cuda"
    RECORDED = "recorded"
    OFF = "off"


class Arrivals(enum.Enum):
    """When the requests of a trace arrive: as it says, or each as soon as one can be taken."""

    KEPT = "kept"
    CLOSED_LOOP = "closed_loop"


class Objective(enum.Enum):
    """What a sweep makes as small as it can."""

    DECODE_US = "bench.decode_us"
    MIXED_US = "bench.mixed_us"
    MEMORY = "memory"
    START_S = "start_s"


class OnUncovered(enum.Enum):
    """What happens to a call that no captured graph serves."""

    RUN = "run"
    ERROR = "error"


class Outputs(enum.Enum):
    """Whose memory a call's results are in."""

    CLONE = "clone"
    VIEW = "view"


class CacheMode(enum.Enum):
    """What the disk cache may do."""

    READWRITE = "readwrite"
    READ = "read"
    OFF = "off"
    REFRESH = "refresh"


class CacheAction(enum.Enum):
    """What `job=cache` does."""

    LS = "ls"
    EXPLAIN = "explain"
    CHECK = "check"
    CLEAR = "clear"
    EXPORT = "export"
    IMPORT = "import"
    PUSH = "push"
    PULL = "pull"


class ErrorMode(enum.Enum):
    """torch.cuda's capture error modes: whose CUDA calls may invalidate a running capture."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread_local"
    RELAXED = "relaxed"


class Replay(enum.Enum):
    """How captured pieces are replayed: one by one, or joined with what is between them."""

    AUTO = "auto"
    PIECES = "pieces"
    STITCHED = "stitched"


class MoeBackend(enum.Enum):
    """Where the experts of a mixture are: all here, or spread over a process group."""

    LOCAL = "local"
    ALL_TO_ALL = "all_to_all"


class Collectives(enum.Enum):
    """Where collectives run: inside of graphs, or between them."""

    REGION = "region"
    BOUNDARY = "boundary"


class Job(enum.Enum):
    """What `python -m pcgsvc` does."""

    RUN = "run"
    COMPILE = "compile"
    PLAN = "plan"
    CACHE = "cache"
    COMPARE = "compare"
    CONFIG = "config"
    SIZES = "sizes"
    VERIFY = "verify"
    DOCTOR = "doctor"


class Form(enum.Enum):
    """How a setting may be written besides as its type; `parse` reads each form."""

    BYTES = "a number, or text with a unit: 256MiB"
    SIZES = "a list, or text: 1,2,4 or 1:64:8"
    SIZES_OR_FILE = "as sizes, or auto:FILE"
    OBJECTIVES = "a word, or a list"


@dataclass(frozen=True)
class AtLeast:
    """The least value that a number may have; `limits` checks it."""

    least: int


NonNegative = AtLeast(0)
Positive = AtLeast(1)
Count = Annotated[int, Positive]
Bytes = Annotated[int, Form.BYTES, Positive]
Sizes = Annotated[list[int], Form.SIZES]
SizesOrFile = Annotated[list[int] | str, Form.SIZES_OR_FILE]
