"""What the commands write to: files are replaced whole, anything else is written into and stays what it is."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedentopt import files
from fedentopt.errors import InputError
from fedentopt.files import lock_file, written_aside

posix = pytest.mark.skipif(sys.platform == "win32", reason="devices, pipes and links in the file system")


def put(path: Path, text: bytes) -> None:
    with written_aside(path) as file:
        file.write(text)


def put_half(path: Path) -> None:
    with written_aside(path) as file:
        file.write(b"half")
        raise KeyError


@posix
def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        device.write_bytes(b"")
    except PermissionError:
        pytest.skip("making devices is not allowed here")
    put(device, b"gone")
    assert stat.S_ISCHR(device.lstat().st_mode)
    assert os.listdir(tmp_path) == ["null"]


@posix
def test_a_pipe_gets_the_bytes_or_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    with pytest.raises(KeyError):
        put_half(pipe)
    put(pipe, b"whole")
    reader.join(10)
    assert got == [b"whole"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@posix
def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    link, further, target = tmp_path / "link", tmp_path / "further", folder / "file"
    further.symlink_to(target)
    link.symlink_to("further")
    for text in (b"new", b"changed"):  # at first the link leads to nothing
        put(link, text)
        assert link.is_symlink()
        assert further.is_symlink()
        assert not target.is_symlink()
        assert target.read_bytes() == text
    assert os.listdir(folder) == ["file"]
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(InputError, match="loop: "):
        put(loop, b"")
    assert loop.is_symlink()


@posix
def test_standard_output_in_a_file_is_written_on_not_over(tmp_path: Path) -> None:
    """A link that stands for /dev/stdout, which leads to the same place but is nothing to try things on."""
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1" if sys.platform == "linux" else "/dev/fd/1")
    words = "print('before'); put(Path('stdout'), b'here\\n'); print('after')"
    source = f"from pathlib import Path\nfrom test_files import put\n{words}\n"
    with (tmp_path / "all").open("wb") as file:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
        subprocess.run([sys.executable, "-c", source], cwd=tmp_path, stdout=file, env=environment, check=True)
    assert (tmp_path / "all").read_bytes() == b"before\nhere\nafter\n"
    piped = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, stdout=subprocess.PIPE, env=environment, check=True
    )
    assert piped.stdout == b"before\nhere\nafter\n"
    assert (tmp_path / "stdout").is_symlink()


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, b"old")
    with pytest.raises(KeyError):
        put_half(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(InputError, match="accepted: a file that can be written"):
        put(tmp_path, b"")


@pytest.mark.parametrize("inherited", [False, True])
def test_a_lock_keeps_out_the_rest_of_its_process_and_others_all_the_same(tmp_path: Path, inherited: bool) -> None:
    def held() -> AbstractContextManager[None]:
        refusals = (lambda holder: InputError("held"), lambda error: InputError(f"unusable: {error}"))
        return lock_file(tmp_path / "lock", *refusals, inherited=inherited)

    ask = (
        "import pathlib, sys; from fedentopt.files import lock_file\n"
        "with lock_file(pathlib.Path(sys.argv[1]), lambda holder: SystemExit(7), lambda error: SystemExit(8), "
        f"inherited={inherited}): pass"
    )
    words = [sys.executable, "-c", ask, str(tmp_path / "lock")]
    with held():
        with pytest.raises(InputError, match=r"^held$"), held():
            pass
        assert subprocess.run(words, check=False).returncode == 7, "the refusal has not let go of the first one's lock"
    assert subprocess.run(words, check=False).returncode == 0
    forgotten = held()
    forgotten.__enter__()
    del forgotten  # whoever held it was garbage-collected
    with held():
        pass


@posix
@pytest.mark.parametrize("inherited", [False, True])
def test_a_child_that_ends_inside_a_lock_does_not_take_it_away(tmp_path: Path, inherited: bool) -> None:
    hold = (
        "import os, pathlib, sys; from fedentopt.files import lock_file\n"
        "path = pathlib.Path(sys.argv[1])\n"
        f"with lock_file(path, lambda holder: SystemExit(7), lambda error: SystemExit(8), inherited={inherited}):\n"
        "    child = os.fork()\n"
        "    if not child: sys.exit()\n"
        "    os.waitpid(child, 0)\n"
        "    assert path.exists()\n"
        "assert not path.exists()\n"
    )
    words = [sys.executable, "-c", hold, str(tmp_path / "lock")]
    assert subprocess.run(words, check=False).returncode == 0


def test_ctrl_c_at_the_very_beginning_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(dict[object, object]):
        def setdefault(self, key: object, default: object = None) -> object:
            super().setdefault(key, default)
            raise KeyboardInterrupt

    def held() -> AbstractContextManager[None]:
        return lock_file(tmp_path / "lock", lambda holder: InputError("held"), lambda error: InputError("unusable"))

    interrupted = Interrupted()
    monkeypatch.setattr(files, "_held_here", interrupted)
    with pytest.raises(KeyboardInterrupt), held():
        pass
    assert not interrupted


def test_a_disk_without_room_for_a_holders_number_still_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)

    def held() -> AbstractContextManager[None]:
        refusals = (lambda holder: InputError("held"), lambda error: InputError(f"unusable: {error}"))
        return lock_file(tmp_path / "lock", *refusals, inherited=True)

    with held(), pytest.raises(InputError, match=r"^held$"), held():
        pass
