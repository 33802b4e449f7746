"""What can be set: plain dataclasses with meaning, unit, default and limit of every setting.

In: nested plain dicts (from Hydra, from YAML, from a caller). Out: one validated `Config`.
Knows nothing of Hydra or OmegaConf, and imports no torch: `resolve` gets the device as a word.

Each default stands once, here; the YAML files under `conf/` only pick values. `None` means "chosen
by pcgsvc", and `resolve` replaces every such None by the value that is used.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union

from pcgsvc.errors import ConfigError, near

T = TypeVar("T")


class Mode(enum.Enum):
    """Which CUDA graphs serve which batches; the last two are (uniform decode, everything else)."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"
    FULL_DECODE_ONLY = "full_decode_only"
    FULL_AND_PIECEWISE = "full_and_piecewise"


class Strategy(enum.Enum):
    """Where the graph is cut: before the compiler, after fusion, or while capturing."""

    FX = "fx"
    INDUCTOR = "inductor"
    BREAKABLE = "breakable"


class Compiler(enum.Enum):
    """What makes a region's kernels."""

    EAGER = "eager"
    INDUCTOR = "inductor"


class Graphs(enum.Enum):
    """What a captured segment is: a CUDA graph, a recording on the CPU, or nothing."""

    AUTO = "auto"
    CUDA = "cuda"
    RECORDED = "recorded"
    OFF = "off"


class OnUncovered(enum.Enum):
    """What happens to a call that no captured graph serves."""

    RUN = "run"
    ERROR = "error"


class Outputs(enum.Enum):
    """Whose memory a call's results lie in."""

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


class ErrorMode(enum.Enum):
    """torch.cuda's capture error modes: whose CUDA calls may invalidate a running capture."""

    GLOBAL = "global"
    THREAD_LOCAL = "thread_local"
    RELAXED = "relaxed"


class Policy(enum.Enum):
    """When graphs are captured: all of them before the runner is handed out."""

    EAGER = "eager"


class MoeBackend(enum.Enum):
    """Where the experts of a mixture are: all here, or spread over a process group."""

    LOCAL = "local"
    ALL_TO_ALL = "all_to_all"


class Job(enum.Enum):
    """What `python -m pcgsvc` does."""

    RUN = "run"
    COMPILE = "compile"
    PLAN = "plan"
    CACHE = "cache"
    COMPARE = "compare"
    CONFIG = "config"
    SIZES = "sizes"


@dataclass(kw_only=True, slots=True)
class MoeConfig:
    """The mixture of experts of `model=llama_moe`; None: the preset's."""

    num_experts: int | None = None
    """Experts per layer, over all processes; `model.intermediate_size` is the width of each."""
    top_k: int | None = None
    """Experts that each token goes to; 1 to `num_experts`."""
    backend: MoeBackend = MoeBackend.LOCAL
    """`local` (this process holds every expert) or `all_to_all` (each process of the
    torch.distributed group holds an equal share, and tokens travel)."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Which model is built. A None among the dimensions means "the preset's"."""

    name: str = "llama"
    """Model family; one of the files under `conf/model/`."""
    preset: str = "tiny"
    """Named set of dimensions of the family (llama: tiny, 160m, 1b, 8b; llama_moe: tiny, 8x7b;
    encoder: tiny, minilm, base)."""
    weights: str | None = None
    """Path of a `.gguf` or `.safetensors` checkpoint (encoder, minilm: of a folder with
    model.safetensors; module: of a state dict, `.safetensors` or written by torch.save); None:
    random weights from `seed`."""
    path: str | None = None
    """With `model=hf`: a local directory with config.json and safetensors, or a `.gguf` file."""
    config: str | None = None
    """With `model=hf`: a shipped tiny config (`tiny-llama`, …) or the path of a config.json, for
    random weights from `seed`."""
    reference_check: bool = True
    """With `model=hf`: compare with transformers' own forward once, when the model is made."""
    vocab_size: int | None = None
    """Rows of the embedding."""
    hidden_size: int | None = None
    """Width of the residual stream, in features."""
    intermediate_size: int | None = None
    """Width of the feed-forward layer, in features."""
    num_layers: int | None = None
    """Transformer blocks, and so attention boundaries."""
    num_heads: int | None = None
    """Query heads per layer."""
    num_kv_heads: int | None = None
    """Key and value heads per layer; divides `num_heads`."""
    head_dim: int | None = None
    """Features per head; None: hidden_size / num_heads."""
    max_position: int | None = None
    """Longest sequence that the rotary or position table covers, in tokens."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    norm_eps: float | None = None
    """Epsilon of the norms."""
    tie_embeddings: bool | None = None
    """Whether the head shares the embedding's weight."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    target: str | None = None
    """With `model=module`: your class of modules, or a function that returns one:
    `package.module:Class` or `path/to/file.py:Class`. It is imported, so it runs."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """With `model=module`: the arguments that `target` is called with, by name."""
    inputs: dict[str, Any] = field(default_factory=dict)
    """With `model=module`: the forward's arguments by name. A tensor is its shape with a word for
    the rows, `{x: [tokens, 32]}`, or `{shape: …, dtype: …, fill: …, low: …, high: …}`; anything
    else, or `{value: …}`, is fixed. Empty: the module's `example_inputs(rows, generator)`."""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Which attention backend runs in the boundaries, and its paged KV cache."""

    name: str = "paged"
    """Backend: `paged` (plain torch, support ALWAYS), `varlen` (host lengths, NEVER) or `triton`
    (a paged kernel for CUDA, ALWAYS)."""
    block_size: int = 16
    """Tokens per KV-cache block; at least 1."""
    max_model_len: int | None = None
    """Longest sequence a request may reach, in tokens; None: 256 on the CPU, 2048 on CUDA, and
    never more than the model's own limit."""
    max_num_reqs: int | None = None
    """Most requests in one captured batch; None: the largest capture size."""
    num_blocks: int | None = None
    """Blocks in the KV cache, the null block and scratch blocks included; None: as many as
    `max_num_reqs` requests of `max_model_len` tokens need, within `max_cache_bytes`."""
    max_cache_bytes: int = 2 << 30
    """Ceiling of the KV cache when `num_blocks` is None, in bytes (also `"512MiB"`); at least 1."""


@dataclass(kw_only=True, slots=True)
class PartitionConfig:
    """Where the traced graph is cut."""

    strategy: Strategy = Strategy.FX
    """`fx` (before the compiler), `inductor` (after fusion) or `breakable` (while capturing)."""
    splitting_ops: list[str] | None = None
    """Op names (`ns::op`) that become boundaries; None: every registered splitting op."""
    extra_splitting_ops: list[str] = field(default_factory=list)
    """Op names that become boundaries as well as `splitting_ops`."""
    compile_modules: list[str] | None = None
    """With `strategy=breakable` and `compiler=inductor`: submodules that are compiled on their
    own, by name; None: the largest ones that hit no break."""


@dataclass(kw_only=True, slots=True)
class CompilerConfig:
    """What makes the regions' kernels."""

    name: Compiler | None = None
    """`eager` or `inductor`; None: eager on the CPU, inductor on CUDA."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor options by name (`inductor` only), passed through as they are; `freezing`, which
    folds weights into the code, is refused."""
    max_autotune: bool = False
    """Have Inductor time several kernels for each matrix product and keep the fastest."""
    combo_kernels: bool = False
    """Have Inductor merge independent small kernels into one launch."""
    threads: int = 1
    """Worker processes that compile kernels side by side, gone when the build ends; 1: none, the
    build's own process compiles. At least 1."""
    passes: list[str] | None = None
    """Custom graph passes by name, in order: `residual_add` leaves a residual's addition to the
    kernel that reads the sum, not to a matrix product that would copy it first; `attention_quant`
    makes attention and the quantisation of its output one op (fires under
    `partition.strategy=inductor` only). None: `[residual_add]` for Inductor on CUDA, else none."""
    specialize_sizes: list[int] = field(default_factory=list)
    """Capture sizes for which every region is compiled once more, with that size put in; the
    general artifact serves all others. Positive, without repetition."""


@dataclass(kw_only=True, slots=True)
class CaptureConfig:
    """Which graphs are captured before the runner takes traffic."""

    sizes: list[int] | str | None = None
    """Capture sizes in tokens: a list, `"1,2,4"`, `"1:64:8"` (1, then every multiple of 8 up to
    64), or `auto:FILE`: the best for a traffic file (see `traffic` and `sizing.*`); None: a
    schedule that ends in `max_size`. Positive, without repetition."""
    max_size: int | None = None
    """Largest capture size in tokens; None: 64 on the CPU, 512 on CUDA, and no limit for sizes that
    were named or chosen. Larger sizes are dropped with a warning."""
    uniform_query_len: int = 1
    """Tokens per request in a uniform batch (above 1: speculative decoding); at least 1."""
    graphs: Graphs = Graphs.AUTO
    """`cuda`, `recorded` (the CPU's stand-in, never faster), `off`, or `auto` by device."""
    error_mode: ErrorMode = ErrorMode.THREAD_LOCAL
    """torch.cuda's capture error mode."""
    memory_budget: int | None = None
    """Most device memory that captured graphs may take, in bytes (also `"256MiB"`); None: no
    limit. Sizes that would pass it are skipped with their reason."""
    policy: Policy = Policy.EAGER
    """When graphs are captured: `eager` captures all before the runner is handed out."""
    warmup_calls: int = 2
    """Plain calls of the program per size before it is captured; at least 1."""
    self_check: bool = True
    """Replay every captured entry once against plain execution while building."""


@dataclass(kw_only=True, slots=True)
class CacheConfig:
    """The disk cache of compiled artifacts. CUDA graphs are never written to it."""

    mode: CacheMode = CacheMode.READWRITE
    """`readwrite`, `read` (hits are served, misses are not stored), `off`, `refresh`."""
    dir: str | None = None
    """Root directory; None: PCGSVC_CACHE_DIR, the checkout's `cache/`, or the user's cache."""
    max_bytes: int = 8 << 30
    """Budget of the stored programs and pieces, in bytes (also `"8GiB"`); above it whole programs
    go, least recently used first."""
    lock_timeout_s: float = 600.0
    """How long to wait for another process that builds the same, in seconds; at least 0."""
    require_warm: bool = False
    """A miss is an error that names the facts that differ, instead of a build."""
    action: CacheAction = CacheAction.LS
    """With `job=cache`: `ls`, `explain`, `check`, `clear`, `export` or `import`."""
    file: str | None = None
    """With `cache.action=export` or `import`: path of the bundle."""
    import_sha256: str | None = None
    """With `cache.action=import`: the sha256 that the bundle must have; None: not compared."""


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Looking inside. None of these changes what a correct program computes."""

    dump_dir: str | None = None
    """Folder that gets each piece's FX source and Inductor source; None: nothing is dumped."""
    check_addresses: bool = False
    """Compare the addresses of all weights, of input buffers and of the KV cache before every call;
    else some weights in turn, and all when one was registered anew."""
    poison: bool = False
    """Recorded graphs only: before a replay, fill the memory of all other entries with NaN, as
    sharing one graph pool may."""
    profile_ranges: bool = False
    """Wrap every replay step in a profiler range that carries its piece's name."""


@dataclass(kw_only=True, slots=True)
class BenchConfig:
    """How `job=run` times what it built."""

    enabled: bool = True
    """Whether `job=run` times the captured entries."""
    repeats: int = 20
    """Timed calls per entry; the median is reported. At least 1."""


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """How the jobs of a sweep (`-m`) are run; a single job reads none of it."""

    isolate: bool = True
    """Run each job in a process of its own, which starts with no CUDA memory in use and whose end,
    whatever it is, does not end the sweep; what it prints goes to `output.txt` in its folder.
    `false`: in the sweep's process, for debuggers and profilers."""
    timeout_s: float | None = None
    """How long one isolated job may take, in seconds; after that it is ended and has failed. None:
    as long as it takes. At least 1."""


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    """What `job=compare` reads."""

    reports: list[str] = field(default_factory=list)
    """Paths of reports; a folder stands for every `report.json` below it."""


@dataclass(kw_only=True, slots=True)
class ExplainConfig:
    """What `job=config` explains."""

    explain: str | None = None
    """A setting (`capture.sizes`) or a group of settings (`capture`); None: all settings."""


@dataclass(kw_only=True, slots=True)
class SizingConfig:
    """How capture sizes are chosen for a traffic file: `capture.sizes=auto:FILE`, `job=sizes`."""

    count: int | None = None
    """How many sizes are taken; None: the knee, see `min_gain`. At least 1."""
    max_count: int = 64
    """Most sizes that are considered; at least 1."""
    min_gain: float = 0.005
    """The knee: a further size is taken while it saves at least this share of the expected time of
    a step without padding; 0 to 1."""
    cost: str | None = None
    """Path of a report of `job=run` whose timings say what a step of a size costs; None: modelled
    by `fixed_us` and `row_us`."""
    fixed_us: float = 0.0
    """Modelled time of a step without its rows, in microseconds; at least 0."""
    row_us: float = 1.0
    """Modelled time of each row of a step, in microseconds; above 0."""


@dataclass(kw_only=True, slots=True)
class Config:
    """All settings of one job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mode: Mode = Mode.FULL_AND_PIECEWISE
    """Which graphs serve which batches."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    compiler: CompilerConfig = field(default_factory=CompilerConfig)
    capture: CaptureConfig = field(default_factory=CaptureConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    config: ExplainConfig = field(default_factory=ExplainConfig)
    sizing: SizingConfig = field(default_factory=SizingConfig)
    on_uncovered: OnUncovered = OnUncovered.RUN
    """A call that no graph serves: `run` it uncaptured and count it, or raise an `error`."""
    outputs: Outputs = Outputs.CLONE
    """`clone`: results are the caller's own; `view`: they alias graph memory and the next call of
    the runner overwrites them."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: str | None = None
    """Torch dtype name of the model; None: float32 on the CPU, bfloat16 on CUDA, and with
    `model=module` whatever the module makes."""
    seed: int = 0
    """Seed of random weights and of verification inputs; 0 to 2**63 - 2."""
    strict: bool = False
    """Anything asked for that is not being done is an error, not a warning."""
    job: Job = Job.RUN
    """`run`, `compile` (fill the cache), `plan` (trace and cut only), `cache` (see
    `cache.action`), `compare` (one table of existing reports), `config` (see `config.explain`) or
    `sizes` (choose capture sizes for `traffic`)."""
    prompt: str | None = None
    """Text that a model with a tokenizer continues after `job=run` has verified it."""
    max_new_tokens: int = 48
    """Most tokens generated for `prompt`; at least 1."""
    traffic: str | None = None
    """Path of a traffic file, which `job=sizes` chooses sizes for and `job=run` replays: `.csv` or
    `.jsonl` with num_tokens and optionally count and uniform, or `.json`: a runner's `stats()` or a
    report."""
    max_traffic_calls: int = 1000
    """Most calls that replay `traffic`; of more, this many are taken evenly. At least 1."""
    report: str | None = None
    """Path of the JSON report; None: `report.json` in the run's output directory."""


AUTO = "auto:"
"""What `capture.sizes` begins with where a traffic file follows."""

# ---- plain dict -> dataclass ---------------------------------------------------------------------

_BYTES = {
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Build a `Config` from nested plain dicts; what is left out keeps its default.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind, or a choice that does not exist;
            the message names the setting by its dotted path. Ranges are `validate`'s business.
    """
    return _dataclass(Config, tree, "")


def to_dict(config: Any) -> dict[str, Any]:
    """Return nested plain dicts of JSON types (enum members by their word)."""
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        if is_dataclass(value):
            out[f.name] = to_dict(value)
        elif isinstance(value, enum.Enum):
            out[f.name] = value.value
        else:
            out[f.name] = value
    return out


def unknown_setting(path: str) -> str:
    """Return the message for a dotted name that no setting has."""
    tree, group = to_dict(Config()), ""
    for name in path.split(".")[:-1]:
        if not isinstance(tree.get(name), dict):
            break
        tree, group = tree[name], f"{group}.{name}".lstrip(".")
    last = path.rpartition(".")[2]
    choices = [f"{group}.{name}".lstrip(".") for name in tree]
    elsewhere = [f"{k}.{last}" for k, v in to_dict(Config()).items() if last in _names(v)]
    hint = f"; did you mean {' or '.join(elsewhere)}?" if elsewhere else near(path, choices)
    return (
        f"{path}: there is no such setting{hint} "
        f"Settings {'of ' + group if group else 'at the top'}: {', '.join(tree)}."
    )


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _dataclass(cls: type[T], tree: Any, path: str) -> T:
    if is_dataclass(tree):
        tree = to_dict(tree)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: got {tree!r}, a group of settings is needed here.")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for name in tree:
        if name not in names:
            raise ConfigError(unknown_setting(f"{path}.{name}".lstrip(".")))
    values = {
        name: _value(hints[name], value, f"{path}.{name}".lstrip("."))
        for name, value in tree.items()
    }
    return cls(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    """Convert one value to the annotated type, or say what is wrong with it."""
    if hint is Any:
        return value
    if path == "capture.sizes":
        return None if value is None else _auto_or_sizes(value, path)
    if typing.get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [a for a in typing.get_args(hint) if a is not type(None)]
    if path == "compiler.specialize_sizes":
        return _sizes(value, path)
    if path.endswith(("memory_budget", "_bytes")) and isinstance(value, str):
        return _bytes(value, path)
    if is_dataclass(hint):
        return _dataclass(typing.cast(Any, hint), value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice(hint, value, path)
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}: got {value!r}, a list is needed, such as '[a,b]'.")
        return [_value(item, v, f"{path}[{i}]") for i, v in enumerate(value)]
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}: got {value!r}, a mapping is needed, such as '{{a: 1}}'.")
        return dict(value)
    return _scalar(hint, value, path)


def _choice(hint: type[enum.Enum], value: Any, path: str) -> enum.Enum:
    if isinstance(value, hint):
        return value
    words = [m.value for m in hint]
    if value is False and "off" in words:  # YAML 1.1 reads an unquoted `off` as false
        value = "off"
    if value not in words:
        raise ConfigError(
            f"{path}: got {value!r}{near(str(value), words)} Choices: {', '.join(words)}."
        )
    return hint(value)


def _scalar(hint: type, value: Any, path: str) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    if hint is str and isinstance(value, Path):
        value = str(value)
    if type(value) is not hint:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        quoted = f"; write {path}='\"{value}\"'" if hint is str and value is not None else ""
        raise ConfigError(f"{path}: got {value!r}, {kind} is needed{quoted}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: got {value!r}, a finite number is needed.")
    return value


def _bytes(value: str, path: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    unit = (match.group(2) or "B").lower() if match else ""
    if not match or unit not in _BYTES:
        raise ConfigError(
            f"{path}: got {value!r}, bytes are needed, such as 268435456 or '256MiB'."
        )
    return int(float(match.group(1)) * _BYTES[unit])


def _auto_or_sizes(value: Any, path: str) -> list[int] | str:
    """Read what `_sizes` reads, or `auto:FILE`, whose file is read when the config is used."""
    if not isinstance(value, str) or not value.strip().startswith(AUTO):
        return _sizes(value, path)
    file = value.strip().removeprefix(AUTO).strip()
    if not file:
        raise ConfigError(f"{path}: got {value!r}, a traffic file is needed: auto:traffic.csv.")
    return f"{AUTO}{file}"


def _sizes(value: Any, path: str) -> list[int]:
    """Read a list, `"1,2,4"` or `"1:64:8"`."""
    help_ = (
        "a list such as '[1,2,4]', or the string '\"1:64:8\"' (quoted: YAML reads 1:64:8 as a time)"
    )
    if isinstance(value, str):
        text = value.strip()
        if re.fullmatch(r"\d+:\d+:\d+", text):
            start, stop, step = (int(p) for p in text.split(":"))
            if not 1 <= start <= stop or step < 1:
                raise ConfigError(
                    f"{path}: got {value!r}; start:stop:step needs 1 <= start <= stop, step >= 1."
                )
            return sorted({start, *range(step, stop + 1, step), stop} - set(range(start)))
        if re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
            return [int(p) for p in text.split(",")]
        raise ConfigError(f"{path}: got {value!r}, {help_} is needed.")
    if not isinstance(value, (list, tuple)) or any(type(v) is not int for v in value):
        # An unquoted 1:64:8 in a YAML file arrives here as the number 7448.
        raise ConfigError(f"{path}: got {value!r}, {help_} is needed.")
    return list(value)


# ---- defaults and limits -------------------------------------------------------------------------


def schedule(max_size: int) -> list[int]:
    """Return the default capture sizes up to `max_size` tokens, which is always one of them.

    Powers of two and one and a half times those: at most a third of a replay is padding above 8.
    """
    sizes = {1, 2, 4, 8, max_size}
    power = 16
    while power <= max_size:
        sizes |= {power, power + power // 2}
        power *= 2
    return sorted(s for s in sizes if s <= max_size)


def resolve(config: Config, *, device_type: str) -> Config:
    """Return a copy in which every device-dependent None has become the value that is used.

    Args:
        config: as composed.
        device_type: `cpu` or `cuda`.
    """
    cuda = device_type == "cuda"
    out = copy(config)
    if out.compiler.name is None:
        out.compiler.name = Compiler.INDUCTOR if cuda else Compiler.EAGER
    if cuda and out.compiler.name is Compiler.INDUCTOR and out.compiler.passes is None:
        out.compiler.passes = ["residual_add"]
    if out.dtype is None and out.model.name != "module":
        out.dtype = "bfloat16" if cuda else "float32"
    if out.capture.max_size is None:
        out.capture.max_size = 512 if cuda else 64
        out.capture.max_size = max([out.capture.max_size, *listed(out.capture)])
    if out.capture.sizes is None:
        out.capture.sizes = schedule(out.capture.max_size)
    if out.capture.graphs is Graphs.AUTO:
        out.capture.graphs = Graphs.CUDA if cuda else Graphs.RECORDED
    if out.attention.max_model_len is None:
        out.attention.max_model_len = 2048 if cuda else 256
    return out


def listed(capture: CaptureConfig) -> list[int]:
    """Return the capture sizes as they stand; `auto:FILE` must have been replaced by then."""
    assert not isinstance(capture.sizes, str), "capture.sizes=auto: was not replaced by sizes"
    return capture.sizes or []


def copy(config: Config) -> Config:
    """Return a deep copy, so that a resolved config never shares lists with its source."""
    return from_dict(to_dict(config))


_MAX_SEED = 2**63 - 2  # torch's generators take 64 bits with a sign, and seed + 1 is used as well


def validate(config: Config, *, device_type: str) -> None:
    """Check every range and every combination that can be judged without building anything.

    Args:
        config: a resolved config.
        device_type: `cpu` or `cuda`.

    Raises:
        ConfigError: naming the setting, what was got and what to do.
    """
    _validate_sizes(config.capture)
    for path, value, least in (
        ("attention.block_size", config.attention.block_size, 1),
        ("attention.max_model_len", config.attention.max_model_len, 1),
        ("attention.max_num_reqs", config.attention.max_num_reqs, 1),
        ("attention.num_blocks", config.attention.num_blocks, 2),
        ("attention.max_cache_bytes", config.attention.max_cache_bytes, 1),
        ("capture.uniform_query_len", config.capture.uniform_query_len, 1),
        ("capture.memory_budget", config.capture.memory_budget, 1),
        ("capture.warmup_calls", config.capture.warmup_calls, 1),
        ("cache.max_bytes", config.cache.max_bytes, 1),
        ("cache.lock_timeout_s", config.cache.lock_timeout_s, 0),
        ("compiler.threads", config.compiler.threads, 1),
        ("bench.repeats", config.bench.repeats, 1),
        ("sweep.timeout_s", config.sweep.timeout_s, 1),
        ("max_new_tokens", config.max_new_tokens, 1),
        ("max_traffic_calls", config.max_traffic_calls, 1),
        ("seed", config.seed, 0),
    ):
        _at_least(path, value, least)
    if config.seed > _MAX_SEED:
        raise ConfigError(f"seed: got {config.seed}, at most {_MAX_SEED} is possible.")
    _validate_combinations(config, device_type)
    validate_sizing(config)


def _at_least(path: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{path}: got {value}, at least {least} is needed.")


def validate_sizing(config: Config) -> None:
    """Check what choosing capture sizes reads; before `capture.sizes=auto:FILE` is replaced."""
    sizing, unset = config.sizing, SizingConfig()
    _at_least("capture.uniform_query_len", config.capture.uniform_query_len, 1)
    _at_least("sizing.count", sizing.count, 1)
    _at_least("sizing.max_count", sizing.max_count, 1)
    _at_least("sizing.min_gain", sizing.min_gain, 0)
    _at_least("sizing.fixed_us", sizing.fixed_us, 0)
    if sizing.min_gain > 1:
        raise ConfigError(f"sizing.min_gain: got {sizing.min_gain}, at most 1 is possible.")
    if sizing.row_us <= 0:
        raise ConfigError(f"sizing.row_us: got {sizing.row_us}, a number above 0 is needed.")
    modelled = (sizing.fixed_us, sizing.row_us) != (unset.fixed_us, unset.row_us)
    if sizing.cost is not None and modelled:
        raise ConfigError(
            "sizing.fixed_us and sizing.row_us: set, but sizing.cost is there, whose report gives "
            "the times; leave one of them out."
        )


def _validate_sizes(capture: CaptureConfig) -> None:
    sizes = listed(capture)
    if capture.max_size is not None and capture.max_size < 1:
        raise ConfigError(f"capture.max_size: got {capture.max_size}, at least 1 is needed.")
    if not sizes:
        raise ConfigError("capture.sizes: got [], at least one size is needed; or set mode=none.")
    bad = [s for s in sizes if s < 1]
    if bad:
        raise ConfigError(
            f"capture.sizes: got {bad} among {sizes}; sizes are token counts, at least 1."
        )
    twice = sorted({s for s in sizes if sizes.count(s) > 1})
    if twice:
        raise ConfigError(f"capture.sizes: {twice} stand twice in {sizes}; name each size once.")
    if min(sizes) > (capture.max_size or 0):
        raise ConfigError(
            f"capture.max_size: got {capture.max_size}, which is below every capture size {sizes}; "
            "raise it, or name smaller sizes."
        )


def _validate_combinations(config: Config, device_type: str) -> None:
    if config.capture.graphs is Graphs.CUDA and device_type != "cuda":
        raise ConfigError(
            f"capture.graphs: got 'cuda' with device={config.device!r}, which is no GPU; "
            "use capture.graphs=recorded or auto, or device=cuda."
        )
    if config.capture.graphs is Graphs.RECORDED and device_type == "cuda":
        raise ConfigError(
            "capture.graphs: got 'recorded' with a CUDA device; recordings are the CPU's stand-in. "
            "Use capture.graphs=cuda, auto or off."
        )
    if config.capture.graphs is Graphs.OFF and config.mode is not Mode.NONE:
        for path, refuses in (
            ("on_uncovered=error", config.on_uncovered is OnUncovered.ERROR),
            ("strict=true", config.strict),
        ):
            if refuses:
                raise ConfigError(
                    f"capture.graphs: got 'off' with {path} and mode={config.mode.value}, so that "
                    "every call would be refused; set mode=none, or capture graphs."
                )
    if config.partition.strategy is Strategy.INDUCTOR:
        if config.compiler.name is not Compiler.INDUCTOR:
            raise ConfigError(
                "partition.strategy: got 'inductor' with compiler=eager; it partitions what "
                "Inductor has fused. Use compiler=inductor, or partition.strategy=fx."
            )
        if device_type != "cuda":
            raise ConfigError(
                f"partition.strategy: got 'inductor' with device={config.device!r}: on the CPU "
                "Inductor makes no partitions and its kernels cannot be recorded. Use "
                "partition.strategy=fx, or device=cuda."
            )
    breakable = config.partition.strategy is Strategy.BREAKABLE
    if breakable and config.compiler.name is Compiler.INDUCTOR and device_type != "cuda":
        raise ConfigError(
            "compiler: got 'inductor' with partition.strategy=breakable on the CPU, whose Inductor "
            "kernels cannot be recorded. Use compiler=eager, or device=cuda."
        )
    if config.partition.compile_modules is not None and not (
        breakable and config.compiler.name is Compiler.INDUCTOR
    ):
        raise ConfigError(
            "partition.compile_modules: set, but it is read with partition.strategy=breakable and "
            "compiler=inductor only."
        )
    _validate_compiler(config.compiler)
    _validate_specialized(config)
    if config.debug.poison and config.capture.graphs is not Graphs.RECORDED:
        raise ConfigError(
            f"debug.poison: needs capture.graphs=recorded, got {config.capture.graphs.value!r}."
        )


def _validate_compiler(compiler: CompilerConfig) -> None:
    """Refuse settings of Inductor's where it is not used."""
    if compiler.options.get("freezing"):
        raise ConfigError(
            "compiler.options.freezing: it folds weights into the code, where "
            "runner.load_state_dict and other updates would not be seen; leave it out."
        )
    unset = to_dict(CompilerConfig(name=compiler.name))
    changed = [name for name, value in to_dict(compiler).items() if value and value != unset[name]]
    if changed and compiler.name is not Compiler.INDUCTOR:
        raise ConfigError(
            f"compiler.{changed[0]}: set, but compiler=eager does not read it; use "
            "compiler=inductor."
        )


def _validate_specialized(config: Config) -> None:
    """Refuse exact sizes that no call could reach."""
    wanted, limit = config.compiler.specialize_sizes, config.capture.max_size
    captured = sorted(s for s in listed(config.capture) if limit is None or s <= limit)
    bad = [s for s in wanted if s < 1]
    if bad:
        raise ConfigError(
            f"compiler.specialize_sizes: got {bad} among {wanted}; sizes are token counts, at "
            "least 1."
        )
    twice = sorted({s for s in wanted if wanted.count(s) > 1})
    if twice:
        raise ConfigError(
            f"compiler.specialize_sizes: {twice} stand twice in {wanted}; name each size once."
        )
    unreachable = [s for s in wanted if s not in captured]
    if unreachable:
        raise ConfigError(
            f"compiler.specialize_sizes: {unreachable} are no capture sizes, so calls of that size "
            f"are padded to another one and never get there. Capture sizes: {captured}. Add them "
            "to capture.sizes, or leave them out here."
        )
    if wanted and config.partition.strategy is Strategy.BREAKABLE:
        raise ConfigError(
            "compiler.specialize_sizes: not read with partition.strategy=breakable; use "
            "partition.strategy=fx or inductor."
        )


def replace(config: Config, **changes: Any) -> Config:
    """Return a copy with top-level fields replaced."""
    return dataclasses.replace(copy(config), **changes)
