"""A reader maps what lies in the run folder, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from omni_async.messages import TensorRef
from omni_async.transports.run_dir import RunDir
from omni_async.transports.shm import Arena, ArenaReader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    run_dir = RunDir.create()
    yield run_dir.path
    run_dir.remove()


@pytest.fixture
def reader(folder: Path) -> Iterator[ArenaReader]:
    reader = ArenaReader(folder)
    yield reader
    reader.close()


@pytest.mark.parametrize("name", ["..", ".", "../x", "/etc/passwd", "sub/x", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(reader: ArenaReader, name: str) -> None:
    with pytest.raises(ValueError, match="not the name of an arena"):
        reader.view(TensorRef("uint8", (1,), segment=name))


def test_links_folders_and_pipes_are_refused(folder: Path, reader: ArenaReader) -> None:
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("link", "sub", "pipe"):
        with pytest.raises(ValueError, match="is not an arena"):
            reader.view(TensorRef("uint8", (1,), segment=name))


def test_an_arena_that_is_gone_is_a_file_not_found(reader: ArenaReader) -> None:
    with pytest.raises(FileNotFoundError):
        reader.view(TensorRef("uint8", (1,), segment="w.arena"))


def test_a_reference_beyond_the_file_is_refused(folder: Path, reader: ArenaReader) -> None:
    arena = Arena(folder, "w", 1 << 20)
    ref = arena.put(1, 0, np.zeros(64, np.uint8))
    assert ref is not None
    end = arena.reserved
    for offset, count in ((end, 1), (end - 1, 2), (0, end + 1), (2**62, 1), (0, 2**62)):
        with pytest.raises(ValueError, match="beyond the end"):
            reader.view(TensorRef("uint8", (count,), segment=ref.segment, offset=offset))
    with pytest.raises(ValueError, match="not in an arena"):
        reader.view(TensorRef("uint8", (1,), segment=ref.segment, offset=-1))
    assert reader.view(TensorRef("uint8", (1,), segment=ref.segment, offset=end - 1)).shape == (1,)
    arena.close()


def test_an_empty_file_is_refused(folder: Path, reader: ArenaReader) -> None:
    (folder / "empty.arena").touch()
    with pytest.raises(ValueError, match="beyond the end"):
        reader.view(TensorRef("uint8", (0,), segment="empty.arena"))


def test_views_from_before_the_arena_grew_stay_valid(folder: Path, reader: ArenaReader) -> None:
    arena = Arena(folder, "w", 64 << 20)
    refs = [arena.put(1, seq, np.full(3 << 20, seq, np.uint8)) for seq in range(6)]
    first = refs[0]
    assert first is not None
    early = reader.view(first)
    views = [reader.view(ref) for ref in refs if ref is not None]
    assert [view[-1] for view in views] == list(range(6))
    assert early[0] == 0
    arena.close()


def test_the_reader_lets_go_of_arenas_whose_owner_left(folder: Path, reader: ArenaReader) -> None:
    for owner in range(20):
        arena = Arena(folder, "same-name", 1 << 20)
        ref = arena.put(1, 0, np.full(100, owner, np.uint8))
        assert ref is not None
        assert reader.view(ref)[0] == owner
        arena.close()
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(folder)) <= 1


def test_the_arena_of_a_killed_owner_is_removed_by_the_next(folder: Path) -> None:
    script = (
        "import os, signal, sys, pathlib, numpy as np\n"
        "from omni_async.transports.shm import Arena\n"
        "arena = Arena(pathlib.Path(sys.argv[1]), 'killed', 1 << 20)\n"
        "arena.put(1, 0, np.zeros(10))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    living = Arena(folder, "living", 1 << 20)
    assert living.put(1, 0, np.zeros(10)) is not None
    done = subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=False)
    assert done.returncode < 0
    assert {path.name.split(".")[0] for path in folder.glob("*.arena")} == {"living", "killed"}
    successor = Arena(folder, "successor", 1 << 20)
    assert successor.put(1, 0, np.zeros(10)) is not None
    assert {path.name.split(".")[0] for path in folder.glob("*.arena")} == {"living", "successor"}
    for arena in (living, successor):
        arena.close()


def test_two_owners_of_one_name_do_not_meet(folder: Path, reader: ArenaReader) -> None:
    first, second = Arena(folder, "w", 1 << 20), Arena(folder, "w", 1 << 20)
    refs = [arena.put(1, 0, np.full(4, n)) for n, arena in enumerate((first, second))]
    assert [reader.view(ref)[0] for ref in refs if ref is not None] == [0, 1]
    first.close()
    second.close()
