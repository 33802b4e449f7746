"""What can be set: plain dataclasses with meaning, unit, default and limit of every setting.

In: nested plain dicts (from Hydra, from YAML, from a caller). Out: one validated `Config`.
Knows nothing of Hydra or OmegaConf, and imports no torch: `resolve` gets the device as a word.

Each default is here and nowhere else; the YAML files under `conf/` only pick values. `None` means
"chosen by pcgsvc", and `resolve` replaces every such None by the value that is used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from pcgsvc.config.choices import (
    Arrivals,
    AtLeast,
    Bytes,
    CacheAction,
    CacheMode,
    Collectives,
    Compiler,
    Count,
    ErrorMode,
    Form,
    Graphs,
    Job,
    Mode,
    MoeBackend,
    NonNegative,
    Objective,
    OnMismatch,
    OnUncovered,
    Outputs,
    Positive,
    Replay,
    Sizes,
    SizesOrFile,
    Strategy,
)

AUTO = "auto:"
"""What `capture.sizes` begins with where a traffic file follows."""


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
    """Named set of dimensions of the family (llama: tiny, 160m, 1b, 8b, 70b; llama_moe: tiny,
    8x7b; encoder: tiny, minilm, base)."""
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
    the rows, `{x: [tokens, 32]}`, or `{shape: …, dtype: …, fill: …, low: …, high: …}`, in place of
    `fill` also `kind: offsets`, `mask` or `sorted` (whole numbers that ascend); anything else, or
    `{value: …}`, is fixed. Empty: the module's `example_inputs(rows, generator)`."""


@dataclass(kw_only=True, slots=True)
class AttentionConfig:
    """Which attention backend runs in the boundaries, and its paged KV cache."""

    name: str = "paged"
    """Backend: `paged` (plain torch, support ALWAYS), `varlen` (host lengths, NEVER) or `triton`
    (a paged kernel for CUDA, ALWAYS)."""
    block_size: Count = 16
    """Tokens per KV-cache block; at least 1."""
    max_model_len: Count | None = None
    """Longest sequence a request may reach, in tokens; None: 256 on the CPU, 2048 on CUDA, and
    never more than the model's own limit."""
    max_num_reqs: Count | None = None
    """Most requests in one captured batch; None: the largest capture size."""
    num_blocks: Annotated[int, AtLeast(2)] | None = None
    """Blocks in the KV cache, the null block and scratch blocks included; None: as many as
    `max_num_reqs` requests of `max_model_len` tokens need, within `max_cache_bytes`."""
    max_cache_bytes: Bytes = 2 << 30
    """Ceiling of the KV cache when `num_blocks` is None, in bytes (also `"512MiB"`); at least 1."""


@dataclass(kw_only=True, slots=True)
class PartitionConfig:
    """Where the traced graph is split."""

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
class ParallelConfig:
    """Processes that run one model together, each on a device of its own."""

    tensor: Count = 1
    """Processes that share the model's heads and features; torchrun starts as many. At least 1."""
    collectives: Collectives | None = None
    """`region` (captured inside graphs, which NCCL can do) or `boundary` (between them); None:
    region on CUDA, boundary on the CPU."""
    timeout_s: Annotated[float, Positive] = 60.0
    """How long a process of whose peers one is gone goes on, in seconds; at least 1."""


@dataclass(kw_only=True, slots=True)
class CompilerConfig:
    """What compiles the regions."""

    name: Compiler | None = None
    """`eager` or `inductor`; None: eager on the CPU, inductor on CUDA."""
    options: dict[str, Any] = field(default_factory=dict)
    """Inductor options by name (`inductor` only), passed through as they are; `freezing`, which
    folds weights into the code, is refused."""
    max_autotune: bool = False
    """Have Inductor time several kernels for each matrix product and keep the fastest."""
    combo_kernels: bool = False
    """Have Inductor merge independent small kernels into one launch."""
    threads: Count = 1
    """Worker processes that compile kernels side by side, gone when the build ends; 1: none, the
    build's own process compiles. At least 1."""
    passes: list[str] | None = None
    """Custom graph passes by name, in order: `residual_add` leaves a residual's addition to the
    kernel that reads the sum, not to a matrix product that would copy it first; `attention_quant`
    makes attention and the quantisation of its output one op (fires under
    `partition.strategy=inductor` only); `gemv` makes matrix products of up to 16 rows by bfloat16
    weights Triton kernels, with norm, residual or SwiGLU in them, at the exact sizes of
    `specialize_sizes` and where they are faster. None: `[residual_add]` for Inductor on CUDA, else
    none."""
    specialize_sizes: Sizes = field(default_factory=list)
    """Capture sizes for which every region is compiled once more, with that size put in; the
    general artifact serves all others, but for those that break what the compiler assumed of the
    row count for it: they get their own in any case. Positive, without repetition. Empty: none, or
    those up to 16 with the pass `gemv` on CUDA."""
    on_mismatch: OnMismatch = OnMismatch.ERROR
    """When a cold build finds that a compiled region computes something else than its ops: `error`,
    or `eager`, which runs that region uncompiled, with a warning."""


@dataclass(kw_only=True, slots=True)
class CaptureConfig:
    """Which graphs are captured before the runner takes traffic."""

    sizes: SizesOrFile | None = None
    """Capture sizes in tokens: a list, `"1,2,4"`, `"1:64:8"` (1, then every multiple of 8 up to
    64), or `auto:FILE`: the best for a traffic file (see `traffic` and `sizing.*`); None: a
    schedule that ends in `max_size`, with a `prompt` 1 and 16. Positive, without repetition."""
    max_size: int | None = None
    """Largest capture size in tokens; None: 64 on the CPU, 512 on CUDA, and no limit for sizes that
    were named or chosen. Larger sizes are dropped with a warning."""
    uniform_query_len: Count = 1
    """Tokens per request in a uniform batch (above 1: speculative decoding); at least 1."""
    max_padding: Count = 4
    """How far a call may be padded: one whose next size is more than so many times its rows, and
    more than 256 rows away, runs in a nearer size of the other mode, or without a graph. At least
    1."""
    graphs: Graphs = Graphs.AUTO
    """`cuda`, `recorded` (the CPU's stand-in, never faster), `off`, or `auto` by device."""
    error_mode: ErrorMode = ErrorMode.THREAD_LOCAL
    """torch.cuda's capture error mode."""
    memory_budget: Bytes | None = None
    """Most device memory that captured graphs may take, in bytes (also `"256MiB"`); None: no
    limit. Sizes that would pass it are skipped with their reason."""
    warmup_calls: Count = 2
    """Plain calls of the program per size before it is captured; at least 1."""
    replay: Replay = Replay.AUTO
    """How a piecewise entry is replayed: `pieces` (a graph per region, the splitting ops between
    them), `stitched` (one graph in which the splitting ops' kernels get each step's parameters; the
    package cuda-bindings is needed), or `auto`: stitched where every splitting op has a launch plan
    and it is timed to be as fast."""
    self_check: bool = True
    """Compare program and captured entries, however calls pad them, with plain execution while
    building. A stored program that differs is dropped and built cold."""
    null_rows: dict[str, Any] = field(default_factory=dict)
    """Rows of the model's state that nobody reads, such as a null block that padding is written to:
    `{cache: [0]}`. The self-check leaves them out, and fails where a result depends on them."""

    @property
    def final_sizes(self) -> list[int]:
        """`sizes` of a resolved config: ascending and within `max_size`."""
        assert isinstance(self.sizes, list), "capture.sizes: the config is not resolved"
        return self.sizes


@dataclass(kw_only=True, slots=True)
class CacheConfig:
    """The disk cache of compiled artifacts. CUDA graphs are never written to it."""

    mode: CacheMode = CacheMode.READWRITE
    """`readwrite`, `read` (hits are served, misses are not stored), `off`, `refresh`."""
    dir: str | None = None
    """Root directory; None: PCGSVC_CACHE_DIR, the checkout's `cache/`, or the user's cache."""
    max_bytes: Bytes = 8 << 30
    """Budget of the stored programs and pieces, in bytes (also `"8GiB"`); above it whole programs
    go, least recently used first."""
    lock_timeout_s: Annotated[float, NonNegative] = 600.0
    """How long to wait for another process that builds the same, in seconds; at least 0."""
    require_warm: bool = False
    """A miss is an error that names the facts that differ, instead of a build."""
    prove: bool = True
    """With `job=compile`: a fresh process loads what was stored, or the job fails."""
    remote: str | None = None
    """URL (`s3://bucket/folder`, by fsspec) of a place that machines share: asked for what the
    store lacks, and given what is built here. None: there is none."""
    remote_key: str | None = None
    """Name of an environment variable, or else path of a file, that holds the key with which
    entries of the remote are signed; what is not signed with it is not loaded. None: nothing is."""
    remote_trust: bool = False
    """Load unsigned entries of any `cache.remote`, which runs code of all who may write there; else
    protocols but `file` and `memory` need `cache.remote_key`."""
    remote_timeout_s: Annotated[float, Positive] = 30.0
    """How long one call of the remote may take, and how long the end of a build waits for what is
    still being published, in seconds. At least 1."""
    action: CacheAction = CacheAction.LS
    """With `job=cache`: `ls`, `explain`, `check`, `clear`, `export` or `import`; with
    `cache.remote`, `push` and `pull` copy what the other side lacks, and `check` reads it too."""
    file: str | None = None
    """With `cache.action=export` or `import`: path of the bundle."""
    import_sha256: str | None = None
    """With `cache.action=import`: the sha256 that the bundle must have; None: not compared."""
    yes: bool = False
    """With `cache.action=clear` on a terminal: delete without asking."""


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
    check_calls: bool = False
    """Where processes run a model together: compare number, size and mode of every call over all of
    them, and refuse a call that differs. Else such a call hangs or gives wrong results."""
    profile_ranges: bool = False
    """Wrap every replay step in a profiler range that carries its piece's name."""


@dataclass(kw_only=True, slots=True)
class BenchConfig:
    """How `job=run` times what it built."""

    enabled: bool | None = None
    """Whether `job=run` times the captured entries; None: unless there is a `prompt`."""
    reduce_overhead: bool | None = None
    """Whether torch.compile's mode `reduce-overhead` is timed beside them, where any batch may be
    captured whole; it is compiled for that. None: on CUDA."""
    repeats: Count = 20
    """Timed calls per entry; the median is reported. At least 1."""


@dataclass(kw_only=True, slots=True)
class SweepConfig:
    """How the jobs of a sweep (`-m`) are run; a single job reads none of it."""

    isolate: bool = True
    """Run each job in a process of its own, which starts with no CUDA memory in use and whose end,
    whatever it is, does not end the sweep; what it prints goes to `output.txt` in its folder.
    `false`: in the sweep's process, for debuggers and profilers."""
    timeout_s: Annotated[float, Positive] | None = None
    """How long one isolated job may take, in seconds; after that it is ended and has failed. None:
    as long as it takes. At least 1."""
    objective: Annotated[list[Objective], Form.OBJECTIVES] | None = None
    """What is to be least, one or a list: `bench.decode_us` or `bench.mixed_us` (mean step time of
    batches of 1 to `capture.max_size` tokens, which a job's graphs must all serve), `memory` (bytes
    that graphs hold) or `start_s` (seconds until the runner is ready). The best job's settings are
    written for `--config-dir`; `hydra/sweeper=optuna` searches by it."""


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
class SchedulerConfig:
    """The serving engine that is simulated where a traffic file holds requests, not steps.

    Each step serves one decode step of every request that has its prompt done, then prompts in the
    order in which they arrived.
    """

    max_num_seqs: Count = 256
    """Most requests that run at once; at least 1."""
    max_num_batched_tokens: Count = 2048
    """Most tokens of a step; at least a decode step of `max_num_seqs` requests."""
    chunk: Count | None = None
    """Most tokens of one prompt in a step; None: what the step has room for. At least 1."""
    speculative_len: Annotated[int, NonNegative] = 0
    """Draft tokens that a decode step verifies per request, all taken as accepted; a request then
    has 1 more rows than these, which is what `capture.uniform_query_len` must be. At least 0."""
    arrivals: Arrivals | None = None
    """`kept`: requests arrive when the file says, which needs the time of a step (`sizing.cost`, or
    `sizing.fixed_us` and `row_us`); `closed_loop`: each arrives as soon as fewer than
    `max_num_seqs` run. None: kept where both times are known, else closed_loop."""


@dataclass(kw_only=True, slots=True)
class SizingConfig:
    """How capture sizes are chosen for a traffic file: `capture.sizes=auto:FILE`, `job=sizes`."""

    count: Count | None = None
    """How many sizes are taken; None: the knee, see `min_gain`. At least 1."""
    max_count: Count = 64
    """Most sizes that are considered; at least 1."""
    min_gain: Annotated[float, NonNegative] = 0.005
    """The knee: a further size is taken while it saves at least this share of the expected time of
    a step without padding; 0 to 1."""
    cost: str | None = None
    """Path of a report of `job=run` whose timings say what a step of a size costs; None: modelled
    by `fixed_us` and `row_us`, and while these are not set, counted in rows."""
    fixed_us: Annotated[float, NonNegative] = 0.0
    """Modelled time of a step without its rows, in microseconds; at least 0."""
    row_us: float = 1.0
    """Modelled time of each row of a step, in microseconds; above 0."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    @property
    def has_modelled_times(self) -> bool:
        """Whether times were set; the defaults only count rows."""
        unset = SizingConfig()
        return (self.fixed_us, self.row_us) != (unset.fixed_us, unset.row_us)


@dataclass(kw_only=True, slots=True)
class Config:
    """All settings of one job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    mode: Mode = Mode.FULL_AND_PIECEWISE
    """Which graphs serve which batches."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
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
    the runner overwrites them, except views of an input, which are cloned."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    dtype: str | None = None
    """Torch dtype name of the model; None: float32 on the CPU, bfloat16 on CUDA, and with
    `model=module` whatever the module makes."""
    seed: Annotated[int, NonNegative] = 0
    """Seed of random weights and of verification inputs; 0 to 2**63 - 2."""
    strict: bool = False
    """Anything that was asked for and is not done is an error, not a warning."""
    job: Job = Job.RUN
    """`run`, `compile` (fill the cache), `plan` (trace and split only), `cache` (see
    `cache.action`), `compare` (one table of existing reports), `config` (see `config.explain`),
    `sizes` (choose capture sizes for `traffic`), `verify` (compare every mode and strategy with
    plain execution) or `doctor` (what would not work here, and what the model does)."""
    prompt: str | None = None
    """Text that a model with a tokenizer continues after `job=run` has verified it."""
    max_new_tokens: Count = 48
    """Most tokens generated for `prompt`; at least 1."""
    traffic: str | None = None
    """Path of a traffic file, which `job=sizes` chooses sizes for and `job=run` replays: `.csv` or
    `.jsonl` with num_tokens and optionally count and uniform, `.json`: a runner's `stats()` or a
    report, or the requests of a trace or a serving benchmark (see `sizing.scheduler`)."""
    max_traffic_calls: Count = 1000
    """Most calls that replay `traffic`; of more, this many are taken evenly. At least 1."""
    report: str | None = None
    """Path of the JSON report; None: `report.json` in the run's output directory."""
    user: dict[str, Any] = field(default_factory=dict)
    """Variables of your own for other settings to interpolate, such as `user.width=64` with
    `model.kwargs='{width: ${user.width}}'`; nothing else reads them."""
