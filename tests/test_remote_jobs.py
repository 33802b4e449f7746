"""`cache.remote` from the command line: warm on another machine, counted, refused where unsafe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from remote_helpers import objects, overwrite
from warm_cli_helpers import PLAIN, TINY, WARM, Cli, finish, in_process

from pcgsvc.cache.remote import open_remote
from pcgsvc.config import CacheConfig, CacheMode
from pcgsvc.errors import ConfigError


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/remote"


@pytest.fixture
def remote(url: str) -> str:
    return f"cache.remote={url}"


def elsewhere(tmp_path: Path, name: str = "elsewhere") -> str:
    return f"cache.dir={tmp_path / name}"


def test_what_one_machine_compiles_another_one_starts_warm_with(
    cached_cli: Cli, remote: str, tmp_path: Path, validate_report: object
) -> None:
    assert callable(validate_report)
    first = cached_cli("job=compile", remote)
    assert (first.code, first.start[0]) == (0, "cold")
    found = first.reports[-1]["cache"]["remote"]
    assert (found["unpublished"], found["problems"]) == (0, [])
    assert found["published"] > 1
    second = cached_cli(remote, elsewhere(tmp_path), "cache.require_warm=true")
    assert (second.code, second.start) == (0, WARM)
    counted = second.reports[-1]["cache"]["remote"]
    assert counted["hits"] > 1
    assert (counted["published"], counted["misses"]) == (0, 0)
    for done in (first, second):
        validate_report(done.reports[-1])
    third = cached_cli(elsewhere(tmp_path), "cache.require_warm=true")  # without the remote
    assert (third.code, third.start) == (0, WARM)


def test_require_warm_with_a_remote_that_lacks_the_program_names_both_misses(
    cached_cli: Cli, remote: str
) -> None:
    done = cached_cli(remote, "cache.require_warm=true")
    assert done.code == 1
    assert "absent; on the remote: absent" in done.out


def test_a_remote_of_another_version_is_a_miss_that_names_it(
    cached_cli: Cli, remote: str, url: str
) -> None:
    cached_cli("job=compile", remote, "cache.dir=other")
    place = Path(url.removeprefix("file://"))
    for path in place.glob("versions/*"):
        path.rename(path.with_name("pcgsvc-0.0.9-1_torch-2.4.0"))
    for path in place.glob("p*/*"):
        path.rename(path.with_name(path.name[::-1]))
    done = cached_cli("job=compile", remote)
    assert (done.code, done.start[0]) == (0, "cold")
    assert "pcgsvc-0.0.9-1_torch-2.4.0" in done.reasons


def test_tampered_entries_are_compiled_again_and_counted(
    cached_cli: Cli, remote: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "a secret")
    signed = [remote, "cache.remote_key=KEY"]
    cached_cli("job=compile", *signed)
    for name, data in objects(url).items():
        if not name.startswith("versions/"):
            overwrite(url, name, data[:-1] + bytes([data[-1] ^ 1]))
    done = cached_cli(*signed, elsewhere(tmp_path))
    assert (done.code, done.start[0]) == (0, "cold")
    assert "signature does not match" in done.out + done.log
    found = done.reports[-1]["cache"]["remote"]
    assert found["refused"] > 1
    assert len(found["problems"]) == 1
    mended = cached_cli(*signed, elsewhere(tmp_path, "third"), "cache.require_warm=true")
    assert (mended.code, mended.start) == (0, WARM)


def test_strict_makes_an_error_of_what_the_remote_did_not_do(
    cached_cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    remote = f"cache.remote={tmp_path}/file/below"
    done = cached_cli("job=compile", remote)
    assert (done.code, done.start[0]) == (0, "cold")
    assert "NotADirectoryError" in done.out + done.log
    strict = cached_cli(remote, "strict=true", "cache.mode=refresh")
    assert strict.code == 1
    assert "NotADirectoryError" in strict.out


def test_explain_and_doctor_ask_the_remote(cached_cli: Cli, url: str, tmp_path: Path) -> None:
    remote = f"cache.remote={url}"
    cached_cli("job=compile", remote)
    explain = ["job=cache", "cache.action=explain", elsewhere(tmp_path)]
    assert "miss: program" in cached_cli(*explain).out
    assert "hit: program" in cached_cli(*explain, remote).out
    assert f"{url} answers" in cached_cli("job=doctor", remote).out.replace("\n", "")


# ---- push, pull, check ---------------------------------------------------------------------------


def test_push_check_and_pull_copy_what_the_other_side_lacks(
    cached_cli: Cli, remote: str, url: str, tmp_path: Path
) -> None:
    job = ["job=cache", remote]
    for action, words in (
        ("pull", f"cache pull: there is no entry at {url}"),
        ("push", "cache push: the store holds no program"),
    ):
        empty = cached_cli(*job, f"cache.action={action}")
        assert (empty.code, words in empty.out.replace("\n", "")) == (1, True)
    cached_cli("job=compile")
    assert "0 there" in cached_cli(*job, "cache.action=push").out
    assert cached_cli(*job, "cache.action=push").out.startswith("0 entries published")
    checked = cached_cli(*job, "cache.action=check", elsewhere(tmp_path))
    assert (checked.code, "sound" in checked.out.splitlines()[-1]) == (0, True)
    assert "0 already stored" in cached_cli(*job, "cache.action=pull", elsewhere(tmp_path)).out
    assert cached_cli("job=cache", "cache.action=check", elsewhere(tmp_path)).code == 0
    warm = cached_cli("job=compile", elsewhere(tmp_path), "cache.require_warm=true")
    assert (warm.code, warm.start) == (0, WARM)

    name = next(n for n in objects(url) if n.startswith("pieces/"))
    overwrite(url, name, objects(url)[name][:-1])
    checked = cached_cli(*job, "cache.action=check")
    assert checked.code == 1
    assert f"{name[:6].rstrip('s')} {name[7:19]}" in checked.out.replace("pieces", "piece")
    pulled = cached_cli(*job, "cache.action=pull", elsewhere(tmp_path, "third"))
    assert pulled.code == 1
    (lacking,) = [line for line in pulled.out.splitlines() if "left out: program" in line]
    assert (lacking.count("program "), "are not stored" in lacking) == (1, True)
    assert "1 entry published" in cached_cli(*job, "cache.action=push").out
    assert cached_cli(*job, "cache.action=check").code == 0


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remote": "memroy://x"}, "no protocol 'memroy'; did you mean 'memory'?"),
        ({"remote": "simplecache::memory://x"}, "no protocol 'simplecache::memory'"),
        ({"remote": "ftp://host/x"}, "without cache.remote_key, and loading runs code"),
        ({"remote": "ftp://me:word@host/x", "remote_trust": True}, "holds a password"),
        ({"remote": "memory://x", "remote_key": "MISSING"}, "no environment variable, nor a file"),
        ({"remote": "memory://x", "remote_key": "EMPTY"}, "the key in 'EMPTY' is empty"),
        ({"remote": "smb://host/x", "remote_key": "KEY"}, "a package is missing"),
    ],
)
def test_a_remote_that_cannot_be_used_as_asked_is_one_message(
    settings: dict[str, object], message: str
) -> None:
    cache = CacheConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        open_remote(cache, {"KEY": "secret", "EMPTY": " "})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_may_be_in_a_file_and_an_off_cache_has_no_remote(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    cache = CacheConfig(remote="memory://x", remote_key=str(tmp_path / "key"))
    assert open_remote(cache, {}) is not None
    assert open_remote(CacheConfig(remote="memory://x", mode=CacheMode.OFF)) is None
    assert open_remote(CacheConfig()) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cache.remote=s4://bucket"], "no protocol"),
        (["job=cache", "cache.action=push"], "needs the URL of a remote"),
        (["cache.remote=memory://x", "cache.remote_timeout_s=0"], "at least 1 is needed"),
    ],
)
def test_bad_settings_of_a_remote_end_before_any_work(
    cached_cli: Cli, words: list[str], message: str
) -> None:
    done = cached_cli(*words)
    assert done.code == 2
    assert message in done.out
    assert not done.reports


# ---- two machines --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_with_their_own_folders_and_one_remote_compile_once(
    tmp_path: Path, remote: str
) -> None:
    nodes = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        words = [*TINY, "job=compile", "cache.prove=true", remote]
        words.append(elsewhere(tmp_path / name, "cache"))
        nodes.append((in_process(PLAIN, words, tmp_path / name), tmp_path / name))
    reports = []
    for process, folder in nodes:
        finish(process)
        (path,) = folder.rglob("report.json")
        reports.append(json.loads(path.read_text()))
    starts = sorted(report["compile"]["start"] for report in reports)
    assert starts == ["cold", "warm"]
    assert sum(report["compile"]["num_traces"] for report in reports) == 1
