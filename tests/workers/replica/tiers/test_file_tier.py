"""A folder of pages: what was stored comes back, and a file that is not what was stored is a miss."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crossdock.workers.replica.tiers.file_tier import FileTier
from crossdock.workers.schedule.memory.block_pool import STATES
from crossdock.workers.schedule.prefixes.tier_pages import PageKey

FINGERPRINT = bytes(range(16))
CONTENT = bytes(range(256)) * 8


def key_of(number: int, group: int = 0) -> PageKey:
    return PageKey(group, number.to_bytes(16, "big"))


def opened(folder: Path, most_bytes: int = 1 << 20, fingerprint: bytes = FINGERPRINT) -> FileTier:
    return FileTier(folder, most_bytes, fingerprint)


def stored(tier: FileTier, key: PageKey, content: bytes = CONTENT) -> set[PageKey]:
    return tier.write(key, [memoryview(content[:100]), memoryview(content[100:])])


def read(tier: FileTier, key: PageKey) -> bytes | None:
    into = bytearray(len(CONTENT))
    return bytes(into) if tier.read(key, memoryview(into)) else None


def only_file(folder: Path) -> Path:
    (file,) = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return file


@pytest.mark.parametrize("group", [0, 7, STATES])
def test_page_comes_back_to_another_process(tmp_path: Path, group: int) -> None:
    stored(opened(tmp_path), key_of(1, group))
    other = opened(tmp_path)
    assert other.changes() == ({key_of(1, group)}, set())
    assert read(other, key_of(1, group)) == CONTENT


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ranks_that_write_to_one_folder_keep_its_bound_together(tmp_path: Path, num_ranks: int) -> None:
    """Each counts the bytes of all parts, so that it looks in time."""
    most_bytes = 20 * num_ranks * len(CONTENT)
    parts = [FileTier(tmp_path, most_bytes, bytes([rank] * 16), num_ranks) for rank in range(num_ranks)]
    for number in range(100):
        for part in parts:
            stored(part, key_of(number))
        num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert num_bytes <= most_bytes
        assert all(part.num_bytes >= num_bytes for part in parts)
    assert all(read(part, key_of(99)) == CONTENT for part in parts)
    assert num_bytes > most_bytes // 2
    with pytest.raises(OSError, match="is larger than all files may be"):
        stored(FileTier(tmp_path, num_ranks * len(CONTENT), bytes(16), num_ranks), key_of(0))


def test_page_of_another_model_is_a_miss(tmp_path: Path) -> None:
    stored(opened(tmp_path), key_of(1))
    other = opened(tmp_path, fingerprint=bytes(16))
    assert other.changes() == (set(), set())
    assert read(other, key_of(1)) is None


def cut(file: Path) -> None:
    os.truncate(file, 200)


def lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def changed_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def changed_version(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[7] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "spoil", [cut, lengthened, emptied, changed_byte, changed_version], ids=lambda each: each.__name__
)
def test_file_that_is_not_what_was_stored_is_a_miss_and_deleted(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    file = only_file(tmp_path)
    spoil(file)
    assert read(tier, key_of(1)) is None
    assert not file.exists()


def test_file_under_the_name_of_another_page_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    file = only_file(tmp_path)
    file.rename(file.with_name(file.name[:-3] + "201"))  # in the same folder, by its last two digits
    assert read(tier, PageKey(0, bytes.fromhex(file.name[2:-3] + "201"))) is None


def test_file_that_has_vanished_is_a_miss_and_a_change(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    tier.changes()
    only_file(tmp_path).unlink()
    assert read(tier, key_of(1)) is None
    assert tier.changes() == (set(), {key_of(1)})


def test_pages_used_longest_ago_make_room(tmp_path: Path) -> None:
    tier = opened(tmp_path, most_bytes=5 * (len(CONTENT) + 100))
    for number in range(4):
        stored(tier, key_of(number))
        file = next(path for path in tmp_path.rglob(key_of(number).page_hash.hex().join(["*", ""])))
        os.utime(file, (1000 + number, 1000 + number))
    assert read(tier, key_of(0)) == CONTENT  # used now
    assert stored(tier, key_of(4)) | stored(tier, key_of(5)) >= {key_of(1)}
    assert read(tier, key_of(1)) is None
    assert read(tier, key_of(0)) == read(tier, key_of(5)) == CONTENT
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 5 * (len(CONTENT) + 100)


def test_pages_of_other_models_make_room(tmp_path: Path) -> None:
    most = 3 * (len(CONTENT) + 100)
    stored(opened(tmp_path, most, bytes(16)), key_of(1))
    tier = opened(tmp_path, most)
    for number in range(3):
        stored(tier, key_of(number))
    assert read(opened(tmp_path, most, bytes(16)), key_of(1)) is None
    assert read(tier, key_of(2)) == CONTENT


def test_page_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    tier = opened(tmp_path, most_bytes=100)
    with pytest.raises(OSError, match="larger than all files may be"):
        stored(tier, key_of(1))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".writable"]


def test_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", is_full)
    with pytest.raises(OSError, match="No space left"):
        stored(opened(tmp_path), key_of(1))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".writable"]


def test_what_dead_writers_left_is_deleted(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    left = only_file(tmp_path).with_name(".123.4")
    left.write_bytes(b"half a page")
    os.utime(left, (1000, 1000))
    opened(tmp_path)
    assert not left.exists()


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"kv_cache_files: .*/file must be a folder that can be written to"):
        opened(tmp_path / "file")


def test_files_of_other_programs_in_the_folder_stay_and_do_not_count(tmp_path: Path) -> None:
    """The folder may be one in which other things lie, three levels deep as pages do, or behind a link."""
    others = [tmp_path / name for name in ("work/notes/text", "work/notes/.settings", f"{'a' * 32}/bc/text")]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(CONTENT)
        os.utime(file, (1000, 1000))
    (tmp_path / ("b" * 32)).symlink_to(tmp_path / ("a" * 32))
    tier = opened(tmp_path, most_bytes=2 * (len(CONTENT) + 100))
    assert tier.num_bytes == 0
    for number in range(5):
        stored(tier, key_of(number))
    assert {file: file.read_bytes() for file in others} == dict.fromkeys(others, CONTENT)


def test_link_or_pipe_in_place_of_a_page_is_a_miss_and_nothing_waits_for_it(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, key_of(1))
    file = only_file(tmp_path)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert read(tier, key_of(1)) is None
    file.unlink()
    os.mkfifo(file)
    assert read(tier, key_of(1)) is None


def test_folder_that_another_user_may_have_written_is_refused(tmp_path: Path) -> None:
    """Checksums find torn files. They do not find pages that somebody has made."""
    own = tmp_path / FINGERPRINT.hex()
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(ValueError, match=r"kv_cache_files: .* its mode is 777"):
        opened(tmp_path)
    own.chmod(0o700)
    opened(tmp_path)
    own.rename(tmp_path / "elsewhere")
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="must be a folder that this user"):
        opened(tmp_path)
