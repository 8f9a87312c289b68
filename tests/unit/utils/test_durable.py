import errno
import os

import pytest

from tithe.utils.durable import complete_directory, explain, remove_directory, sweep


def fill(target, text, **options):
    with complete_directory(target, **options) as hidden:
        (hidden / "sub").mkdir()
        (hidden / "sub" / "a").write_text(text)


def test_nothing_is_visible_before_the_end(tmp_path):
    target = tmp_path / "new" / "parents" / "x"
    with complete_directory(target) as hidden:
        (hidden / "a").write_text("1")
        assert not target.exists()
        assert hidden.parent == target.parent
    assert (target / "a").read_text() == "1"
    assert not hidden.exists()


def fill_half(target, error):
    with complete_directory(target, replace=True) as hidden:
        (hidden / "a").write_text("half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_inside_leaves_nothing_or_the_old_one(tmp_path, error):
    fill(tmp_path / "x", "old")
    for name in ("x", "y"):
        with pytest.raises(error):
            fill_half(tmp_path / name, error)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "sub" / "a").read_text() == "old"


def test_an_existing_directory_is_replaced_only_on_demand(tmp_path):
    fill(tmp_path / "x", "old")
    with pytest.raises(FileExistsError):
        fill(tmp_path / "x", "new")
    fill(tmp_path / "x", "new", replace=True)
    assert (tmp_path / "x" / "sub" / "a").read_text() == "new"
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty", "filled")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "x"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    fill(tmp_path / "x", "old")
    rename = os.rename

    def fails_for_the_new_one(source, target):
        if os.fspath(target).endswith("x") and "new" in (source / "sub" / "a").read_text():
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr("pathlib.Path.rename", fails_for_the_new_one)
    with pytest.raises(OSError, match="Input/output"):
        fill(tmp_path / "x", "new", replace=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x" / "sub" / "a").read_text() == "old"


def test_everything_is_flushed_before_the_name_appears(tmp_path, monkeypatch):
    target = tmp_path / "x"
    flushed = []
    fsync = os.fsync

    def watched(descriptor):
        flushed.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), target.exists()))  # noqa: PTH115, PTH119
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", watched)
    fill(target, "1")
    names = [name for name, _ in flushed]
    assert names[:2] == ["a", "sub"]
    assert names[2].startswith(".tmp-")
    assert [visible for _, visible in flushed] == [False, False, False, True]
    assert names[3] == tmp_path.name


def test_sweep_and_remove(tmp_path):
    fill(tmp_path / "x", "1")
    fill(tmp_path / ".tmp-y-1", "2")
    (tmp_path / ".tmp-file").write_text("")
    assert sweep(tmp_path) == [".tmp-file", ".tmp-y-1"]
    assert sweep(tmp_path / "absent") == []
    remove_directory(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_errors_are_explained():
    assert "free some" in explain(OSError(errno.ENOSPC, "No space left on device"))
    assert explain(OSError(errno.EIO, "Input/output error")) == "Input/output error"
    assert explain(OSError("odd")) == "odd"
