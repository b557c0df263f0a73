"""One answer per release, kept; what it may cost in all; and files that are lost, old, damaged or wanted twice."""

from __future__ import annotations

import errno
import json
import logging
import math
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("opendp")

from fedentopt.errors import InputError
from fedentopt.release import Draw, OwnerSettings, draw_counts, release_counts

COUNTS = np.array([700, 0, 300, *range(60)])  # two draws at epsilon 0.5 are the same with a chance below 1e-50


@pytest.fixture
def owner(tmp_path: Path) -> OwnerSettings:
    return OwnerSettings(epsilon=0.5, file=tmp_path / "report.json", ledger=tmp_path / "ledger")


def never() -> np.ndarray:
    raise AssertionError("the labels were read again")


def ledger_file(owner: OwnerSettings) -> Path:
    assert owner.ledger is not None
    (path,) = owner.ledger.iterdir()
    return path


def test_the_first_answer_is_the_only_one_whatever_the_data_are_by_then(owner: OwnerSettings) -> None:
    first = release_counts(COUNTS, owner)
    assert all(isinstance(value, int) for value in first.counts)
    assert first.epsilon == first.spent == 0.5
    for later in (COUNTS, COUNTS[::-1], COUNTS + 1, np.zeros(5, dtype=int)):
        assert release_counts(later, owner) == first
    assert release_counts(never, owner) == first  # nothing about the data can show, not even in time


def test_another_epsilon_or_clipping_does_not_bring_another_draw(
    owner: OwnerSettings, caplog: pytest.LogCaptureFixture
) -> None:
    first = release_counts(COUNTS, owner)
    for epsilon in (0.4, 0.6, 100.0):
        assert release_counts(never, replace(owner, epsilon=epsilon, total=1000.0)) == first
        assert "release 1 was drawn at epsilon 0.5 and is kept" in caplog.text
        caplog.clear()
    assert release_counts(never, owner, samples_per_person=3) == first


def test_one_draw_per_release_number_within_the_total(owner: OwnerSettings) -> None:
    owner = replace(owner, epsilon=0.1, total=0.3)
    answers = [release_counts(COUNTS, replace(owner, release=number)) for number in (1, 2, 3)]  # 0.1 thrice is 0.3
    assert len({draw.counts for draw in answers}) == 3
    with pytest.raises(InputError, match=r"label-epsilon-total: release 4 .* from 0\.3 to more than 0\.3"):
        release_counts(never, replace(owner, release=4))
    for number, draw in enumerate(answers, start=1):
        assert release_counts(never, replace(owner, release=number)) == draw
    assert release_counts(COUNTS, replace(owner, release=4, total=0.4)).release == 4


def test_without_a_total_there_is_one_release(owner: OwnerSettings) -> None:
    release_counts(COUNTS, owner)
    with pytest.raises(InputError, match="label-epsilon-total"):
        release_counts(never, replace(owner, release=2))
    with pytest.raises(InputError, match="label-epsilon-total"):  # nor by asking for less noise
        release_counts(never, replace(owner, release=2, epsilon=0.9))


def test_a_release_beyond_the_total_is_refused_before_the_labels_are_read(owner: OwnerSettings) -> None:
    with pytest.raises(InputError, match="label-epsilon-total"):
        release_counts(never, replace(owner, total=0.4))
    assert owner.file is not None
    assert not owner.file.exists()


def test_deleting_the_report_file_brings_the_old_answer_back(owner: OwnerSettings) -> None:
    assert owner.file is not None
    first = release_counts(COUNTS, owner, name="oslo")
    written = owner.file.read_text()
    owner.file.unlink()
    assert release_counts(never, owner, name="oslo") == first
    assert owner.file.read_text() == written


def test_deleting_the_ledger_brings_it_back_from_the_report_file(owner: OwnerSettings) -> None:
    first = release_counts(COUNTS, owner)
    path = ledger_file(owner)
    path.unlink()
    assert release_counts(never, owner) == first
    assert json.loads(path.read_text())["file"] == str(owner.file)


def test_an_older_copy_of_the_report_file_does_not_lower_what_was_spent(owner: OwnerSettings) -> None:
    assert owner.file is not None
    owner = replace(owner, total=1.0)
    first = release_counts(COUNTS, owner)
    backup = owner.file.read_bytes()
    second = release_counts(COUNTS, replace(owner, release=2))
    owner.file.write_bytes(backup)
    assert release_counts(never, replace(owner, release=2)) == second
    owner.file.write_bytes(backup)
    with pytest.raises(InputError, match="from 1 to more than 1"):
        release_counts(never, replace(owner, release=3))
    assert release_counts(never, owner) == first


def test_two_draws_of_one_release_are_both_paid_for(owner: OwnerSettings) -> None:
    assert owner.file is not None
    release_counts(COUNTS, owner)
    owner.file.unlink()
    stolen = ledger_file(owner)
    aside = stolen.read_bytes()
    stolen.unlink()  # the owner removed both, which nothing on this machine can notice
    second = release_counts(COUNTS, owner)
    stolen.write_bytes(aside)  # unless a backup comes back
    assert release_counts(never, owner) == second
    with pytest.raises(InputError, match="from 1 to more than 1"):
        release_counts(never, replace(owner, release=2, total=1.0))


def test_clients_that_share_a_file_have_answers_and_budgets_of_their_own(owner: OwnerSettings) -> None:
    draws = {name: release_counts(COUNTS, owner, name=name) for name in ("", "a", "b")}
    assert len({draw.counts for draw in draws.values()}) == 3
    assert owner.file is not None
    owner.file.unlink()
    for name, draw in draws.items():
        assert release_counts(never, owner, name=name) == draw
    assert set(json.loads(owner.file.read_text())["clients"]) == {"", "a", "b"}


def test_the_default_ledger_lies_in_the_users_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    owner = OwnerSettings(epsilon=0.5, file=tmp_path / "report.json")
    first = release_counts(COUNTS, owner)
    (copy,) = (tmp_path / "state" / "fedentopt" / "label-ledger").iterdir()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    (tmp_path / "report.json").unlink()
    assert release_counts(never, owner) == first


@pytest.mark.skipif(os.name == "nt", reason="HOME")
def test_where_there_is_no_place_for_a_ledger_the_log_says_so_and_an_owners_own_is_a_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    owner = OwnerSettings(epsilon=0.5, file=tmp_path / "report.json")
    with caplog.at_level(logging.WARNING):
        first = release_counts(COUNTS, owner)
    assert "deleting the report file resets the budget" in caplog.text
    with pytest.raises(InputError, match="label-ledger: cannot be written to"):
        release_counts(never, replace(owner, ledger=tmp_path / "file" / "ledger"))
    assert release_counts(never, owner) == first


def test_file_and_folder_are_on_disk_ledger_first_before_the_answer_leaves(
    owner: OwnerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noting(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc")
    monkeypatch.setattr(os, "fsync", noting)
    release_counts(COUNTS, owner)
    assert owner.file is not None
    assert len(synced) == 4
    assert Path(synced[0]).parent == Path(synced[1]) == owner.ledger
    assert Path(synced[2]).parent == Path(synced[3]) == owner.file.parent
    release_counts(never, owner)
    assert len(synced) == 4  # nothing new, nothing written


def test_a_draw_that_was_not_written_is_not_given_away(owner: OwnerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"label-ledger: .*No space left"):
        release_counts(COUNTS, owner)
    monkeypatch.undo()
    assert owner.file is not None
    assert not owner.file.exists()


def test_a_kill_between_ledger_and_file_costs_nothing(owner: OwnerSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    written = os.replace

    def dies_at_the_file(source: Any, target: Any) -> None:
        if Path(target) == owner.file:
            raise KeyboardInterrupt
        written(source, target)

    monkeypatch.setattr(os, "replace", dies_at_the_file)
    with pytest.raises(KeyboardInterrupt):
        release_counts(COUNTS, owner)
    monkeypatch.undo()
    kept = json.loads(ledger_file(owner).read_text())["clients"][""][0]["counts"]
    assert list(release_counts(never, owner).counts) == kept


def test_nothing_in_the_files_is_a_function_of_the_true_counts_but_the_noisy_ones(owner: OwnerSettings) -> None:
    release_counts([1, 0, 2], owner)
    for path in (owner.file, ledger_file(owner)):
        assert path is not None
        content = json.loads(path.read_text())
        assert set(content) - {"file"} == {"format", "version", "clients"}
        (draw,) = content["clients"][""]
        assert set(draw) == {"release", "counts", "epsilon", "samples_per_person", "spent", "drawn"}
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


VERSION_1: dict[str, Any] = {
    "format": "fedentopt label reports",
    "version": 1,
    "reports": {
        name: {
            "counts": [701.25, -3.5, 298.0],
            "epsilon": 0.5,
            "salt": "00" * 16,
            "fingerprint": "ab" * 64,
            "drawn": "2026-01-01T00:00:00+00:00",
            "draws": 2,
            "epsilon_spent": 1.0,
        }
        for name in ("4", "5")
    },
}


def test_a_file_of_version_1_gives_its_answer_and_loses_its_hash(owner: OwnerSettings) -> None:
    assert owner.file is not None
    owner.file.write_text(json.dumps(VERSION_1))
    draw = release_counts(never, owner, name="4")
    assert draw.counts == (701.25, -3.5, 298.0)
    assert (draw.release, draw.epsilon, draw.spent) == (1, 0.5, 1.0)
    text = owner.file.read_text()
    assert "fingerprint" not in text
    assert "abab" not in text
    assert release_counts(never, owner, name="5").counts == draw.counts
    with pytest.raises(InputError, match=r"from 1 to more than 1\.2"):  # what its redraws cost is not forgotten
        release_counts(never, replace(owner, release=2, total=1.2), name="4")
    assert release_counts(never, owner, name="4") == draw


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[]", "is not a file of kept label reports"),
        ('{"format": "other"}', "is not a file of kept label reports"),
        ('{"format": "fedentopt label reports"}', "is damaged"),
        ('{"format": "fedentopt label reports", "version": 3}', "is of version 3; accepted: 1, 2"),
        ('{"format": "fedentopt label reports", "version": 1, "reports": {"": {}}}', "damaged|not readable"),
        ('{"format": "fedentopt label reports", "version": 2, "clients": {"": [{}]}}', "not readable"),
        ('{"format": "fedentopt label reports", "version": 2, "clients": []}', "is damaged"),
    ],
)
@pytest.mark.parametrize("where", ["file", "ledger"])
def test_a_damaged_file_is_refused_and_left_alone(owner: OwnerSettings, content: str, words: str, where: str) -> None:
    release_counts(COUNTS, owner)
    assert owner.file is not None
    path = owner.file if where == "file" else ledger_file(owner)
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        release_counts(never, owner)
    assert path.read_text() == content


@pytest.mark.parametrize(
    "change",
    [
        {"counts": []},
        {"counts": [math.nan]},
        {"counts": ["many"]},
        {"epsilon": 0},
        {"epsilon": math.inf},
        {"spent": 0.1},
        {"release": 0},
        {"release": "two"},
    ],
)
def test_what_is_no_draw_is_refused(owner: OwnerSettings, change: dict[str, Any]) -> None:
    fields = draw_counts(COUNTS, owner).to_dict()
    assert Draw.from_dict(fields).to_dict() == fields
    with pytest.raises(InputError, match="kept label report"):
        Draw.from_dict(fields | change)


@pytest.mark.parametrize(
    ("counts", "more", "words"),
    [
        ([], {}, r"counts: of shape \(0,\); accepted: one count per class"),
        ([[1, 2]], {}, r"counts: of shape \(1, 2\)"),
        ([1, 2], {"samples_per_person": 0}, "samples_per_person: 0"),
        ([1, 2], {"samples_per_person": 1.5}, "samples_per_person: 1.5"),
        ([1, 2], {"name": 5}, "name: 5 is not accepted; accepted: text"),
    ],
)
def test_a_refused_draw_costs_nothing_and_leaves_the_file_readable(
    owner: OwnerSettings, counts: Any, more: dict[str, Any], words: str
) -> None:
    first = release_counts(COUNTS, owner)
    later = replace(owner, release=2, total=1.0)
    with pytest.raises(InputError, match=words):
        release_counts(counts, later, **more)
    assert release_counts(never, owner) == first
    assert release_counts(COUNTS, later).release == 2


def test_numbers_of_numpy_are_kept_as_plain_ones(owner: OwnerSettings) -> None:
    ours = replace(owner, epsilon=np.float32(0.5), release=np.int64(2), total=np.float32(1.0))
    first = release_counts(COUNTS, ours, samples_per_person=np.int64(2))  # type: ignore[arg-type]
    assert first.to_dict()["epsilon"] == 0.5
    assert release_counts(never, replace(owner, release=2)) == first


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to a pipe", "link to itself", "no folder"])
def test_what_is_no_regular_file_is_refused_and_left_alone(owner: OwnerSettings, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    elif kind == "link to itself":
        path.symlink_to(path)
    else:
        path = tmp_path / "no" / "odd"
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"label-report-file: .*(not a regular file|no folder)"):
        release_counts(never, replace(owner, file=path))
    assert sorted(tmp_path.iterdir()) == before


def test_a_link_is_followed_and_stays(owner: OwnerSettings, tmp_path: Path) -> None:
    link, volume = tmp_path / "link.json", tmp_path / "volume"
    volume.mkdir()
    link.symlink_to(volume / "kept.json")  # nothing there yet
    first = release_counts(COUNTS, replace(owner, file=link))
    assert link.is_symlink()
    assert (volume / "kept.json").is_file()
    link.unlink()
    link.symlink_to(volume / "kept.json")  # a new container: the volume alone has stayed
    assert release_counts(never, replace(owner, file=link)) == first
    assert release_counts(never, replace(owner, file=volume / "kept.json")) == first


def _drawn_in_a_process(owner: OwnerSettings, queue: Any) -> None:
    queue.put(release_counts(COUNTS, owner).counts)


def test_processes_asked_at_once_give_one_answer(owner: OwnerSettings) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_drawn_in_a_process, args=(owner, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.skipif(os.name == "nt", reason="Windows has locks everywhere")
@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EINVAL, errno.EIO])
def test_where_two_processes_could_draw_at_once_nothing_is_drawn(
    owner: OwnerSettings, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    import fcntl

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(InputError, match="label-report-file: cannot be locked"):
        release_counts(COUNTS, owner)
    assert owner.file is not None
    assert not owner.file.exists()


def test_true_counts_and_answers_without_a_file_are_not_drawn(owner: OwnerSettings) -> None:
    with pytest.raises(InputError, match="label-epsilon: true counts"):
        release_counts(never, replace(owner, epsilon=None))
    with pytest.raises(InputError, match="label-report-file: not set"):
        release_counts(never, replace(owner, file=None))
    with pytest.raises(InputError, match="one count per class"):
        release_counts([[1, 2]], owner)
