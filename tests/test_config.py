"""Settings as plain dataclasses: kinds, forms, defaults, limits and their documentation."""

from __future__ import annotations

import enum
import json
import re
import typing
from typing import Any

import pytest

from pcgsvc.config import (
    CacheMode,
    CaptureConfig,
    Compiler,
    Config,
    Graphs,
    Mode,
    copy,
    dropped_sizes,
    from_dict,
    resolve,
    schedule,
    to_dict,
    validate,
)
from pcgsvc.config.settings import Setting, help_text, short_help, walk
from pcgsvc.errors import ConfigError
from pcgsvc.jobs.preflight import check
from pcgsvc.sizing.resolve import resolve_config

SETTINGS = list(walk())
BY_PATH = {s.path: s for s in SETTINGS}


def nested(path: str, value: Any) -> dict[str, Any]:
    tree: Any = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
    return typing.cast(dict[str, Any], tree)


def read(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def leaves(tree: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in tree.items():
        if isinstance(value, dict) and name not in (
            "options",
            "kwargs",
            "inputs",
            "null_rows",
            "user",
        ):
            found |= leaves(value, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


# ---- documentation -------------------------------------------------------------------------------


def test_walk_yields_every_setting_once_with_its_default() -> None:
    defaults = to_dict(Config())
    assert {s.path for s in SETTINGS} == leaves(defaults)
    assert len(SETTINGS) == len(BY_PATH)
    assert {s.path: s.default for s in SETTINGS} == {
        s.path: read(defaults, s.path) for s in SETTINGS
    }


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.path)
def test_every_setting_says_what_it_means(setting: Setting) -> None:
    assert setting.doc.endswith(".")
    assert len(setting.doc.split()) >= 3


def test_documentation_belongs_to_the_setting_above_it() -> None:
    assert BY_PATH["capture.max_size"].doc.startswith("Largest capture size in tokens")
    assert BY_PATH["cache.dir"].doc.startswith("Root directory")


def test_help_names_every_setting_its_default_and_its_choices_within_the_width() -> None:
    text = help_text({"model": ["llama", "smollm2"]}, 80)
    for setting in SETTINGS:
        assert f"\n  {setting.path}=" in text
        for word in setting.choices:
            assert word in text
    assert "\n  capture.warmup_calls=2\n" in text
    assert "\n  strict=false\n" in text
    assert "\n  dtype=null\n" in text
    assert "\n  model=llama | smollm2\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_short_help_fits_a_screen_and_names_only_what_there_is() -> None:
    text = short_help({"model": ["a_long_name"] * 12, "preset": ["fast"]})
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 80
    paths = set(BY_PATH) | {"model", "preset"}
    named = re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)*)=", text)
    assert {n for n in named if not n.startswith("hydra.")} <= paths
    for name in ("mode", "job"):
        for word in BY_PATH[name].choices:
            assert word in text
    assert "--help-all" in text


# ---- kinds ---------------------------------------------------------------------------------------

WRONG: dict[Any, list[Any]] = {
    int: ["many", 1.5, True, [1], {"a": 1}],
    float: ["many", True, [1.0], float("nan"), float("inf")],
    bool: ["yes", 1, 0, "true"],
    str: [3, True, 1.5, ["a"], {"a": 1}],
    list: [5, "abc", {"a": 1}, True],
    dict: [5, "abc", [1], True],
    enum.Enum: ["nope", 3, True, ["none"], {"a": 1}],
}


def family(kind: Any) -> Any:
    kind = typing.get_origin(kind) or kind
    return enum.Enum if issubclass(kind, enum.Enum) else kind


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.path)
def test_a_value_of_the_wrong_kind_is_refused_with_the_settings_path(setting: Setting) -> None:
    for value in WRONG[family(setting.kind)]:
        with pytest.raises(ConfigError) as raised:
            from_dict(nested(setting.path, value))
        assert str(raised.value).startswith(f"{setting.path}: got {value!r}")


@pytest.mark.parametrize(
    "setting", [s for s in SETTINGS if s.default is not None], ids=lambda s: s.path
)
def test_null_is_refused_where_no_default_is_worked_out(setting: Setting) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting.path}: got None"):
        from_dict(nested(setting.path, None))


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.choices], ids=lambda s: s.path)
def test_each_word_of_a_choice_is_accepted_and_a_typo_lists_them_all(setting: Setting) -> None:
    for word in setting.choices:
        found = read(from_dict(nested(setting.path, word)), setting.path)
        (choice,) = found if isinstance(found, list) else [found]  # a word stands for a list of it
        assert choice.value == word
    with pytest.raises(ConfigError) as raised:
        from_dict(nested(setting.path, setting.choices[0] + "x"))
    assert f"did you mean '{setting.choices[0]}'?" in str(raised.value)
    assert f"Choices: {', '.join(setting.choices)}." in str(raised.value)


@pytest.mark.parametrize("path", ["cache.mode", "capture.graphs"])
def test_off_that_yaml_read_as_false_is_off(path: str) -> None:
    assert read(from_dict(nested(path, False)), path).value == "off"


def test_a_group_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^capture: got 3, a group of settings"):
        from_dict({"capture": 3})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"mod": "full"}, r"^mod: there is no such setting; did you mean 'mode'\?"),
        ({"capture": {"foo": 3}}, r"^capture\.foo: there is no such setting\. Settings of capture"),
        ({"sizes": [1]}, r"^sizes: .*did you mean capture\.sizes\?"),
        ({"name": "eager"}, r"model\.name or attention\.name or compiler\.name\?"),
        ({"capture": {"size": [1]}}, r"^capture\.size: .*'capture\.sizes'\? Settings of capture: "),
        (
            {"capture": {"policy": "eager"}},
            r"^capture\.policy: there is no such setting; it had one value .*; remove it\. "
            r"Settings of capture: sizes, max_size, ",
        ),
        ({"zzz": 1}, r"^zzz: there is no such setting\. Settings at the top: model, attention, "),
    ],
)
def test_unknown_names_are_refused_with_the_nearest_and_all_that_there_are(
    tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(tree)


# ---- forms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "sizes"),
    [
        ([1, 2, 4], [1, 2, 4]),
        ((4, 2), [4, 2]),
        ("1,2,4", [1, 2, 4]),
        (" 1, 2 ,4 ", [1, 2, 4]),
        ("8", [8]),
        ("1:32:8", [1, 8, 16, 24, 32]),
        ("1:30:8", [1, 8, 16, 24, 30]),
        ("10:30:8", [10, 16, 24, 30]),
        ("8:8:8", [8]),
        ("1:4:1", [1, 2, 3, 4]),
    ],
)
def test_capture_sizes_may_be_a_list_a_string_or_a_range(form: Any, sizes: list[int]) -> None:
    assert from_dict({"capture": {"sizes": form}}).capture.sizes == sizes


@pytest.mark.parametrize(
    "form", ["1:2", "a", "", "0:8:1", "8:1:1", "1:8:0", "1;2", [1, "2"], [2.0]]
)
def test_capture_sizes_of_another_form_are_refused(form: Any) -> None:
    with pytest.raises(ConfigError, match=r"^capture\.sizes: got "):
        from_dict({"capture": {"sizes": form}})


def test_capture_sizes_that_yaml_read_as_a_time_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"got 5528, .*quoted: YAML reads 1:64:8 as a"):
        from_dict({"capture": {"sizes": 1 * 3600 + 32 * 60 + 8}})


@pytest.mark.parametrize(
    ("form", "number"),
    [(5, 5), ("5", 5), ("1KiB", 1024), ("1.5 MiB", 3 << 19), ("2gib", 2 << 30), ("3 MB", 3000000)],
)
def test_bytes_may_carry_a_unit(form: Any, number: int) -> None:
    assert from_dict({"capture": {"memory_budget": form}}).capture.memory_budget == number
    assert from_dict({"attention": {"max_cache_bytes": form}}).attention.max_cache_bytes == number


@pytest.mark.parametrize("form", ["", "MiB", "1 TiBs", "-1MiB", "1e3"])
def test_bytes_of_another_form_are_refused(form: str) -> None:
    with pytest.raises(ConfigError, match=r"^capture\.memory_budget: got .*'256MiB'"):
        from_dict({"capture": {"memory_budget": form}})


def test_dicts_and_dataclasses_convert_back_and_forth_unchanged() -> None:
    tree = {
        "mode": "piecewise",
        "capture": {"sizes": [1, 4], "memory_budget": 7},
        "cache": {"mode": "off", "dir": "/c"},
        "compiler": {"name": "inductor", "options": {"max_autotune": True}},
        "partition": {"splitting_ops": ["a::b"]},
    }
    config = from_dict(tree)
    assert config.mode is Mode.PIECEWISE
    assert config.cache.mode is CacheMode.OFF
    assert from_dict(to_dict(config)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_a_copy_shares_no_list_with_its_source() -> None:
    source = Config(capture=CaptureConfig(sizes=[1]))
    twin = copy(source)
    assert twin == source
    assert twin.capture.sizes is not None
    twin.capture.sizes.append(2)
    twin.partition.extra_splitting_ops.append("a::b")
    twin.compiler.options["x"] = 1
    assert source == Config(capture=CaptureConfig(sizes=[1]))


# ---- defaults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [*range(1, 70), 100, 512, 1000])
def test_default_schedule_ends_in_the_largest_size_and_ascends(largest: int) -> None:
    sizes = schedule(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1


@pytest.mark.parametrize("query_len", [2, 3, 5, 7, 16])
@pytest.mark.parametrize("largest", [5, 64, 512])
def test_every_size_of_the_default_schedule_but_the_last_is_of_whole_requests(
    largest: int, query_len: int
) -> None:
    sizes = schedule(largest, query_len)
    assert len(sizes) <= len(schedule(largest)) + 1
    assert sizes[-1] == largest
    assert all(size % query_len == 0 for size in sizes[:-1])
    if query_len <= largest:
        whole = [size for size in sizes if size % query_len == 0]
        assert (whole[0], whole[-1]) == (query_len, largest - largest % query_len)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", (Compiler.EAGER, "float32", 64, Graphs.RECORDED)),
        ("cuda", (Compiler.INDUCTOR, "bfloat16", 512, Graphs.CUDA)),
    ],
)
def test_what_is_left_open_is_chosen_by_device_and_the_source_stays(
    device: str, expected: tuple[Any, ...]
) -> None:
    source = Config()
    out = resolve(source, device_type=device)
    assert (out.compiler.name, out.dtype, out.capture.max_size, out.capture.graphs) == expected
    assert out.capture.sizes == schedule(out.capture.max_size or 0)
    assert source == Config()


def test_what_was_chosen_stays_as_chosen() -> None:
    tree = {
        "compiler": {"name": "inductor"},
        "dtype": "float64",
        "capture": {"max_size": 16, "sizes": [4], "graphs": "off"},
        "attention": {"max_model_len": 32},
    }
    out = to_dict(resolve(from_dict(tree), device_type="cpu"))
    assert out["compiler"]["name"] == "inductor"
    assert out["dtype"] == "float64"
    assert {k: out["capture"][k] for k in tree["capture"]} == tree["capture"]
    assert out["attention"]["max_model_len"] == 32


def test_named_sizes_above_the_default_largest_size_are_kept() -> None:
    config = resolve(from_dict({"capture": {"sizes": [1, 900]}}), device_type="cpu")
    assert config.capture.max_size == 900
    validate(config, device_type="cpu")


@pytest.mark.parametrize(
    ("capture", "final", "dropped"),
    [
        ({"sizes": [8, 2]}, [2, 8], []),
        ({"sizes": [64, 4, 50, 51], "max_size": 50}, [4, 50], [51, 64]),
        ({"max_size": 8}, [1, 2, 4, 8], []),
        ({}, schedule(64), []),
    ],
)
def test_resolved_sizes_ascend_within_the_largest_and_the_dropped_ones_are_known(
    capture: dict[str, Any], final: list[int], dropped: list[int]
) -> None:
    config = from_dict({"capture": capture})
    out = resolve(config, device_type="cpu")
    assert out.capture.sizes == out.capture.final_sizes == final
    assert dropped_sizes(config.capture) == dropped
    assert resolve(out, device_type="cpu") == out
    assert dropped_sizes(out.capture) == []


def test_what_is_dropped_is_warned_of_once_and_twice_resolved_is_resolved() -> None:
    config = from_dict({"device": "cpu", "capture": {"sizes": [64, 4], "max_size": 50}})
    found = resolve_config(config)
    assert found.warnings == ["capture.sizes: [64] are above capture.max_size=50 and are dropped"]
    again = resolve_config(found.config)
    assert (again.config, again.warnings) == (found.config, [])


# ---- limits --------------------------------------------------------------------------------------


def checked(tree: dict[str, Any]) -> None:
    check(from_dict({"device": "cpu", **tree}))


def test_the_defaults_are_valid() -> None:
    checked({})


NUMBERS = [s for s in SETTINGS if s.kind in (int, float)]


@pytest.mark.parametrize("setting", NUMBERS, ids=lambda s: s.path)
def test_no_number_may_be_negative(setting: Setting) -> None:
    with pytest.raises(ConfigError, match=rf"\b{setting.path}\b.*-1"):
        checked(nested(setting.path, -1))


BAD = [
    ({"capture": {"sizes": []}}, r"^capture\.sizes: got \[\].*mode=none"),
    ({"capture": {"sizes": [0, 4]}}, r"^capture\.sizes: got \[0\] among \[0, 4\]"),
    ({"capture": {"sizes": [-3]}}, r"^capture\.sizes: got \[-3\]"),
    ({"capture": {"sizes": [4, 2, 4]}}, r"^capture\.sizes: \[4\] appear twice"),
    ({"capture": {"sizes": [4, 8], "max_size": 2}}, r"^capture\.max_size: got 2, which is below"),
    ({"capture": {"max_size": 0}}, r"^capture\.(max_size|sizes): "),
    ({"capture": {"graphs": "cuda"}}, r"^capture\.graphs: got 'cuda' .*recorded"),
    (
        {"capture": {"graphs": "off"}, "on_uncovered": "error"},
        r"^capture\.graphs: got 'off' with on_uncovered=error .*mode=none",
    ),
    (
        {"capture": {"graphs": "off"}, "strict": True},
        r"^capture\.graphs: got 'off' with strict=true",
    ),
    ({"compiler": {"name": "eager", "options": {"a": 1}}}, r"^compiler\.options: .*inductor"),
    ({"debug": {"poison": True}, "capture": {"graphs": "off"}}, r"^debug\.poison: needs"),
    ({"seed": 2**63}, r"^seed: got 9223372036854775808, at most"),
    ({"device": "meta"}, r"^device: got 'meta'\. Choices: auto, cpu, cuda, cuda:N"),
    ({"device": "nonsense"}, r"^device: got 'nonsense'\. Choices"),
    ({"device": "cpu:1"}, r"^device: got 'cpu:1'\. Choices"),
    ({"dtype": "int8"}, r"^dtype: got 'int8'.*Choices: float32, bfloat16, float16, float64"),
    ({"dtype": "float8_e4m3fn"}, r"^dtype: got 'float8_e4m3fn'.*Choices"),
    ({"dtype": "nn"}, r"^dtype: got 'nn'"),
    ({"model": {"name": "lama"}}, r"^model: got 'lama'; did you mean 'llama'\?"),
    ({"model": {"preset": "2b"}}, r"^model\.preset: got '2b'.*tiny, 160m, 1b, 8b"),
    ({"model": {"weights": "/nowhere.gguf"}}, r"^model\.weights: '/nowhere\.gguf' does not exist"),
    ({"attention": {"name": "pagd"}}, r"^attention: got 'pagd'; did you mean 'paged'\?"),
    (
        {"partition": {"splitting_ops": ["no::such"]}},
        r"^partition\.splitting_ops: 'no::such' is no operator .*pcgsvc::attention",
    ),
    (
        {"partition": {"extra_splitting_ops": ["no::such"]}},
        r"^partition\.extra_splitting_ops: 'no::such' is no operator",
    ),
    ({"prompt": "hello"}, r"^prompt: model=llama .*smollm2"),
    ({"prompt": "hello", "job": "plan"}, r"^prompt: job=plan runs no model"),
    ({"report": "/proc"}, r"^report: got '/proc', the path of a file"),
    ({"report": ""}, r"^report: got ''"),
    ({"report": "/etc/passwd/x.json"}, r"^report: '/etc/passwd' is no folder"),
    ({"report": "/proc/x/r.json"}, r"^report: '/proc' cannot be written"),
    ({"debug": {"dump_dir": "/proc/zz"}}, r"^debug\.dump_dir: '/proc' cannot be written"),
    ({"cache": {"mode": "read", "dir": "/etc/passwd"}}, r"^cache root \(cache\.dir\): /etc/passwd"),
    ({"job": "cache", "cache": {"mode": "off"}}, r"^cache\.mode: got 'off' with job=cache"),
    ({"job": "cache", "cache": {"action": "export"}}, r"^cache\.file: .*export needs the path"),
    (
        {"job": "cache", "cache": {"action": "export", "file": "/etc/passwd/x.tar"}},
        r"^cache\.file: '/etc/passwd' is no folder",
    ),
    (
        {"job": "cache", "cache": {"action": "import", "file": "/no/such.tar"}},
        r"^cache\.file: there is no file '/no/such.tar'",
    ),
    ({"debug": {"dump_dir": "/etc/passwd"}}, r"^debug\.dump_dir: '/etc/passwd' is no folder"),
    (
        {"attention": {"name": "varlen"}, "strict": True},
        r"^strict=true, and full_and_piecewise was asked for, but attention=varlen",
    ),
]


@pytest.mark.parametrize(("tree", "message"), BAD, ids=lambda v: str(v) if type(v) is dict else "")
def test_what_cannot_be_built_is_refused_before_building(
    tree: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"capture": {"graphs": "off"}, "mode": "none", "on_uncovered": "error"},
        {"capture": {"sizes": [8, 2]}},
        {"debug": {"poison": True}},
        {"attention": {"name": "varlen"}, "strict": True, "mode": "piecewise"},
        {"attention": {"name": "varlen"}},
        {
            "partition": {
                "splitting_ops": ["aten.softmax.int", "aten::linear", "torch.ops.aten.mul"]
            }
        },
        {"model": {"name": "two_regions"}, "strict": True},
        {"report": "not/yet/there/report.json"},
        {"seed": 2**63 - 2},
    ],
    ids=str,
)
def test_what_can_be_built_is_let_through(tree: dict[str, Any]) -> None:
    checked(tree)
