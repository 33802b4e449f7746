"""One file out, the same entries in; and every way in which such a file is refused."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_helpers import PIECES, PROGRAMS, all_files, fill, key, misses, open_store, value_file

from pcgsvc.cache.bundle import MANIFEST, export_bundle, import_bundle
from pcgsvc.cache.envelope import Entry, Kind, encode
from pcgsvc.cache.store import Store
from pcgsvc.config import CacheMode
from pcgsvc.errors import CacheError

Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    with open_store(folder / "root") as store:
        fill(store)
        export_bundle(store, folder / "bundle.tar")
    return folder


@pytest.fixture
def bundle(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(pristine / "bundle.tar", tmp_path / "bundle.tar"))


def read(path: Path) -> Members:
    with tarfile.open(path) as archive:
        out = []
        for info in archive:
            file = archive.extractfile(info)
            out.append((info, file.read() if file else b""))
        return out


def write(path: Path, members: Members, **settings: Any) -> None:
    with tarfile.open(path, "w", **settings) as archive:
        for info, raw in members:
            archive.addfile(info, io.BytesIO(raw))


def info(name: str, raw: bytes) -> tarfile.TarInfo:
    out = tarfile.TarInfo(name)
    out.size = len(raw)
    return out


def expect_refused(path: Path, tmp_path: Path, cause: str, **settings: Any) -> None:
    with open_store(tmp_path / "into") as store:
        before = all_files(tmp_path)
        with pytest.raises(CacheError, match=cause):
            import_bundle(store, path, **settings)
        assert all_files(tmp_path) == before
        assert set(misses(store)) == {"absent"}


# ---- there and back ------------------------------------------------------------------------------


def test_export_clear_import_gives_all_entries_back_as_they_were(
    pristine: Path, tmp_path: Path
) -> None:
    root = Path(shutil.copytree(pristine / "root", tmp_path / "root"))
    with open_store(root) as store:
        before = [store.read(Kind.PROGRAM, name) for name in PROGRAMS]
        exported = export_bundle(store, tmp_path / "out.tar")
        store.clear()
        imported = import_bundle(store, tmp_path / "out.tar")
        assert imported.bundle == exported
        assert (imported.num_written, imported.num_present) == (len(PIECES) + len(PROGRAMS), 0)
        assert misses(store) == []
        assert [store.read(Kind.PROGRAM, name) for name in PROGRAMS] == before
        assert store.check().ok
    assert exported.sha256 == hashlib.sha256((tmp_path / "out.tar").read_bytes()).hexdigest()
    assert (exported.num_programs, exported.num_pieces) == (len(PROGRAMS), len(PIECES))


def test_the_same_entries_give_the_same_bytes(pristine: Path, tmp_path: Path, bundle: Path) -> None:
    with open_store(tmp_path / "other") as store:
        import_bundle(store, bundle)
        export_bundle(store, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == bundle.read_bytes()


def test_entries_that_are_there_already_are_left_as_they_are(tmp_path: Path, bundle: Path) -> None:
    first = next(iter(PIECES))
    with open_store(tmp_path / "into") as store:
        store.put_piece(first, b"built here", facts={})
        assert import_bundle(store, bundle).num_present == 1
        assert store.get_piece(first).value == b"built here"
        assert import_bundle(store, bundle).num_written == 0


def test_a_damaged_entry_is_replaced_by_the_bundle_s(tmp_path: Path, bundle: Path) -> None:
    name = list(PIECES)[1]
    with open_store(tmp_path / "into") as store:
        import_bundle(store, bundle)
        value_file(tmp_path / "into", name).write_bytes(b"damage")
        assert import_bundle(store, bundle).num_written == 1
        assert misses(store) == []


def test_chosen_programs_are_exported_with_just_their_pieces(
    pristine: Path, tmp_path: Path
) -> None:
    name, (_, pieces) = next(iter(PROGRAMS.items()))
    with open_store(pristine / "root") as store:
        exported = export_bundle(store, tmp_path / "out.tar", keys=[name])
        assert (exported.num_programs, exported.num_pieces) == (1, len(pieces))
        with pytest.raises(CacheError, match="not whole: absent"):
            export_bundle(store, tmp_path / "none.tar", keys=[key("unknown")])
    assert not (tmp_path / "none.tar").exists()


def test_an_incomplete_program_is_left_out_with_a_warning(
    pristine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Path(shutil.copytree(pristine / "root", tmp_path / "root"))
    value_file(root, next(p for p in PIECES if p in PROGRAMS[key("program a")][1][1:2])).unlink()
    with open_store(root) as store:
        assert export_bundle(store, tmp_path / "out.tar").num_programs == 1
    assert "left out of the bundle" in caplog.text


def test_an_empty_store_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    with open_store(tmp_path / "root") as store, pytest.raises(CacheError, match="no program"):
        export_bundle(store, tmp_path / "out.tar")
    assert not (tmp_path / "out.tar").exists()


def test_an_export_that_fails_leaves_the_old_file_and_no_other(
    pristine: Path, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    before = bundle.read_bytes()
    with open_store(pristine / "root") as store:
        monkeypatch.setattr("pcgsvc.cache.bundle.os.fsync", fail)
        with pytest.raises(CacheError, match="no space"):
            export_bundle(store, bundle)
    assert bundle.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bundle.tar"]


# ---- pinned --------------------------------------------------------------------------------------


def test_a_pinned_import_takes_that_file_and_no_other(tmp_path: Path, bundle: Path) -> None:
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    expect_refused(bundle, tmp_path, "pinned is", expected_sha256="0" * 64)
    expect_refused(bundle, tmp_path, "pinned is", expected_sha256="")
    with open_store(tmp_path / "into") as store:
        import_bundle(store, bundle, expected_sha256=digest.upper())
        assert misses(store) == []


def test_a_sound_bundle_of_other_content_does_not_pass_for_the_pinned_one(
    pristine: Path, tmp_path: Path, bundle: Path
) -> None:
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    with open_store(pristine / "root") as store:
        export_bundle(store, bundle, keys=[key("program a")])
    expect_refused(bundle, tmp_path, "pinned is", expected_sha256=digest)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 7])
def test_a_byte_flipped_anywhere_is_refused_or_changes_nothing(
    tmp_path: Path, bundle: Path, step: int
) -> None:
    """Padding and the unused fields of tar headers are the only bytes that do not count."""
    raw = bundle.read_bytes()
    refused = 0
    offsets = range(0, len(raw), len(raw) // 60 + step)
    for offset in offsets:
        flipped = bytearray(raw)
        flipped[offset] ^= 1 << (offset % 8)
        bundle.write_bytes(flipped)
        with open_store(tmp_path / f"into {offset}") as store:
            try:
                import_bundle(store, bundle)
            except CacheError:
                refused += 1
                assert set(misses(store)) == {"absent"}
            else:
                assert misses(store) == []
    assert refused > len(offsets) // 2


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.9, 0.999])
def test_a_bundle_cut_short_is_refused(tmp_path: Path, bundle: Path, share: float) -> None:
    raw = bundle.read_bytes().rstrip(b"\0")  # the zeros at the end are padding
    bundle.write_bytes(raw[: int(len(raw) * share)])
    expect_refused(bundle, tmp_path, "cannot be read|truncated|missing|manifest")


def add(name: str, raw: bytes = b"x") -> Callable[[Members], Members]:
    return lambda members: [*members, (info(name, raw), raw)]


def special(kind: bytes, name: str, target: str = "") -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        new = info(name, b"")
        new.type, new.linkname = kind, target
        return [*members, (new, b"")]

    return change


def repeat(members: Members) -> Members:
    return [*members, members[1]]


def second_manifest(members: Members) -> Members:
    return [*members, members[0]]


def no_manifest(members: Members) -> Members:
    return members[1:]


def manifest_last(members: Members) -> Members:
    return [*members[1:], members[0]]


def leave_one_out(members: Members) -> Members:
    return members[:-1]


def swap(members: Members) -> Members:
    """Give each of two pieces the bytes of the other."""
    (first, a), (second, b) = members[2:4]
    first.size, second.size = len(b), len(a)
    return [*members[:2], (first, b), (second, a), *members[4:]]


def manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Members], Members]:
    def apply(members: Members) -> Members:
        about = json.loads(members[0][1])
        change(about)
        raw = json.dumps(about).encode()
        return [(info(MANIFEST, raw), raw), *members[1:]]

    return apply


def with_entry(entry: Entry, name: str | None = None) -> Callable[[Members], Members]:
    """Add an entry, with a manifest that lists it."""

    def apply(members: Members) -> Members:
        raw = encode(entry)
        line = {
            "kind": entry.kind.value,
            "key": name or entry.key,
            "size": len(raw),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
        members = manifest(lambda about: about["entries"].append(line))(members)
        path = f"{entry.kind.value}s/{name or entry.key}"
        return [*members, (info(path, raw), raw)]

    return apply


NEW = key("new")
PIECE = Entry(kind=Kind.PIECE, key=NEW, payload=b"x")
PROGRAM = Entry(kind=Kind.PROGRAM, key=NEW, payload=b"x", pieces=(key("nowhere"),))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (add("../../escape"), "no name of a bundle"),
        (add("/etc/escape"), "no name of a bundle"),
        (add(f"pieces/../{NEW}"), "no name of a bundle"),
        (add(f"pieces/{NEW}/x"), "no name of a bundle"),
        (add(f"pieces/{NEW}"), "not in its manifest"),
        (add("README"), "no name of a bundle"),
        (special(tarfile.SYMTYPE, f"pieces/{NEW}", "/etc/passwd"), "no plain file"),
        (special(tarfile.LNKTYPE, f"pieces/{NEW}", f"pieces/{NEW}"), "no plain file"),
        (special(tarfile.DIRTYPE, "pieces"), "no plain file"),
        (special(tarfile.FIFOTYPE, f"pieces/{NEW}"), "no plain file"),
        (special(tarfile.CHRTYPE, f"pieces/{NEW}"), "no plain file"),
        (repeat, "there twice"),
        (second_manifest, "not in its manifest"),
        (no_manifest, "not in its manifest"),
        (manifest_last, "not in its manifest"),
        (leave_one_out, "members are missing"),
        (swap, "digest of the manifest"),
        (manifest(lambda about: about.update(version=2)), "version 2, this pcgsvc reads"),
        (manifest(lambda about: about.update(format="other")), "'other'"),
        (manifest(lambda about: about.pop("entries")), "manifest is unreadable"),
        (manifest(lambda about: about.update(entries=[])), "manifest is empty"),
        (manifest(lambda about: about["entries"].append(about["entries"][0])), "twice"),
        (manifest(lambda about: about["entries"][0].update(key="../x")), "64 lower-case hex"),
        (manifest(lambda about: about["entries"][0].update(sha256="0" * 64)), "digest of the"),
        (with_entry(PIECE), "not those that its programs need"),
        (with_entry(PROGRAM), "not those that its programs need"),
        (with_entry(PIECE, key("renamed")), "entry of another key"),
    ],
)
def test_a_bundle_that_is_not_exactly_its_manifest_is_refused_before_anything_is_written(
    tmp_path: Path, bundle: Path, change: Callable[[Members], Members], cause: str
) -> None:
    write(bundle, change(read(bundle)), format=tarfile.USTAR_FORMAT)
    expect_refused(bundle, tmp_path, cause)


def test_a_member_with_extended_headers_is_refused(tmp_path: Path, bundle: Path) -> None:
    members = read(bundle)
    members[-1][0].pax_headers = {"path": "../../escape"}
    write(bundle, members, format=tarfile.PAX_FORMAT)
    expect_refused(bundle, tmp_path, "no plain file|no name of a bundle")


def test_bytes_after_the_end_are_refused(tmp_path: Path, bundle: Path) -> None:
    with bundle.open("ab") as file:
        file.write(b"\0" * 10240 + b"x")
    expect_refused(bundle, tmp_path, "more after its end")


@pytest.mark.parametrize("raw", [b"", b"x" * 2000, b"PK\x03\x04" + b"\0" * 2000])
def test_a_file_that_is_no_bundle_is_refused(tmp_path: Path, bundle: Path, raw: bytes) -> None:
    bundle.write_bytes(raw)
    expect_refused(bundle, tmp_path, "cache.file: .* cannot be read as a bundle.*export writes one")


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    expect_refused(tmp_path / "none.tar", tmp_path, "none.tar cannot be read")


def test_a_bundle_beyond_the_budget_is_refused(tmp_path: Path, bundle: Path) -> None:
    with (
        open_store(tmp_path / "into", max_bytes=5000) as store,
        pytest.raises(CacheError, match="budget is 5000"),
    ):
        import_bundle(store, bundle)


@pytest.mark.parametrize("mode", [CacheMode.READ, CacheMode.OFF])
def test_an_import_that_nothing_can_be_written_by_is_an_error(
    tmp_path: Path, bundle: Path, mode: CacheMode
) -> None:
    with (
        Store.open(str(tmp_path / "into"), mode=mode) as store,
        pytest.raises(CacheError, match=f"cache.mode={mode.value}"),
    ):
        import_bundle(store, bundle)


def test_an_import_that_fails_half_way_is_taken_back(
    tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = os.fsync

    def full(fd: int) -> None:
        calls.append(fd)
        if len(calls) >= 3:
            raise OSError(28, "No space left on device")
        real(fd)

    with open_store(tmp_path / "into") as store:
        first = next(iter(PIECES))
        store.put_piece(first, PIECES[first], facts={"of": first})
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CacheError, match="took no more"):
            import_bundle(store, bundle)
        monkeypatch.undo()
        assert misses(store).count("absent") == len(PIECES) + len(PROGRAMS) - 1
        assert store.check().ok
        assert not store.check().strays
