"""What can be set, how it is read, and what it becomes.

In: nested plain dicts, from Hydra, YAML or a caller. Out: one `Config`, resolved and within limits.
Knows nothing of models, graphs or the disk; only `compose` and `devices` import more than Python.
"""

from pcgsvc.config.choices import Arrivals as Arrivals
from pcgsvc.config.choices import CacheAction as CacheAction
from pcgsvc.config.choices import CacheMode as CacheMode
from pcgsvc.config.choices import Collectives as Collectives
from pcgsvc.config.choices import Compiler as Compiler
from pcgsvc.config.choices import ErrorMode as ErrorMode
from pcgsvc.config.choices import Graphs as Graphs
from pcgsvc.config.choices import Job as Job
from pcgsvc.config.choices import Mode as Mode
from pcgsvc.config.choices import MoeBackend as MoeBackend
from pcgsvc.config.choices import Objective as Objective
from pcgsvc.config.choices import OnMismatch as OnMismatch
from pcgsvc.config.choices import OnUncovered as OnUncovered
from pcgsvc.config.choices import Outputs as Outputs
from pcgsvc.config.choices import Replay as Replay
from pcgsvc.config.choices import Strategy as Strategy
from pcgsvc.config.limits import validate as validate
from pcgsvc.config.limits import validate_sizing as validate_sizing
from pcgsvc.config.parse import copy as copy
from pcgsvc.config.parse import from_dict as from_dict
from pcgsvc.config.parse import to_dict as to_dict
from pcgsvc.config.parse import updated as updated
from pcgsvc.config.resolve import captures as captures
from pcgsvc.config.resolve import dropped_sizes as dropped_sizes
from pcgsvc.config.resolve import resolve as resolve
from pcgsvc.config.resolve import schedule as schedule
from pcgsvc.config.schema import AUTO as AUTO
from pcgsvc.config.schema import AttentionConfig as AttentionConfig
from pcgsvc.config.schema import BenchConfig as BenchConfig
from pcgsvc.config.schema import CacheConfig as CacheConfig
from pcgsvc.config.schema import CaptureConfig as CaptureConfig
from pcgsvc.config.schema import CompareConfig as CompareConfig
from pcgsvc.config.schema import CompilerConfig as CompilerConfig
from pcgsvc.config.schema import Config as Config
from pcgsvc.config.schema import DebugConfig as DebugConfig
from pcgsvc.config.schema import ExplainConfig as ExplainConfig
from pcgsvc.config.schema import ModelConfig as ModelConfig
from pcgsvc.config.schema import MoeConfig as MoeConfig
from pcgsvc.config.schema import ParallelConfig as ParallelConfig
from pcgsvc.config.schema import PartitionConfig as PartitionConfig
from pcgsvc.config.schema import SchedulerConfig as SchedulerConfig
from pcgsvc.config.schema import SizingConfig as SizingConfig
from pcgsvc.config.schema import SweepConfig as SweepConfig
