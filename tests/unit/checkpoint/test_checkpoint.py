import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from tithe.checkpoint import find_checkpoints, load_checkpoint, prune, save_checkpoint, select_checkpoint
from tithe.errors import ResumeError, UserError


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "adapter/a": torch.randn(8, 16, generator=generator),
        "optimizer/exp_avg/a": torch.randn(8, 16, generator=generator),
        "rng/torch": generator.get_state(),
    }


def save(root, step):
    return save_checkpoint(root, step, tensors(step), {"step": step})


def steps(root):
    return sorted(p.name for p in root.iterdir())


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def test_tensors_and_state_come_back_to_the_bit(tmp_path):
    nan_with_payload = torch.tensor([0x7FC00123, 0x7F800000, -0x80000000], dtype=torch.int32).view(torch.float32)
    shared = torch.arange(12.0)
    saved = {
        "adapter/nan": nan_with_payload,
        "adapter/bf16": torch.randn(5).bfloat16(),
        "adapter/transposed": torch.arange(6.0).reshape(2, 3).t(),
        "adapter/view": shared[:6],
        "adapter/other_view": shared[6:],
        "adapter/alias": shared[:6],
        "optimizer/step": torch.tensor(41),
        "optimizer/empty": torch.zeros(0, 3),
        "optimizer/deep/name.with.dots": torch.tensor([True, False]),
        "rng/torch": torch.get_rng_state(),
    }
    state = {"kl_coef": 0.1 + 0.2, "best": -math.inf, "cursor": {"put_back": ["p1", "p2"], "at": 2**60}, "none": None}
    path = save_checkpoint(tmp_path, 7, saved, {**state, "pair": (1, 2.5), "nan": math.nan})
    back = load_checkpoint(path)
    assert back.step == 7
    assert back.tensors.keys() == saved.keys()
    for name, tensor in saved.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert back.tensors[name].shape == tensor.shape
        assert torch.equal(bits(back.tensors[name]), bits(tensor)), name
    nan = back.state["nan"]
    assert math.isnan(nan)
    assert back.state == {**state, "pair": [1, 2.5], "nan": nan}
    assert steps(path) == ["adapter.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]


def test_saving_does_not_change_or_hold_the_tensors(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    path = save_checkpoint(tmp_path, 1, {"adapter/w": weight}, {})
    with torch.no_grad():
        weight.add_(1)
    assert load_checkpoint(path).tensors["adapter/w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("name", ["plain", "/x", "adapter/", "../x/y", "Adapter/x", "a.b/x"])
def test_tensor_names_have_a_group(tmp_path, name):
    with pytest.raises(ValueError, match="group/rest"):
        save_checkpoint(tmp_path, 1, {name: torch.zeros(1)}, {})
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("state", "where"),
    [({"a": {1: 2}}, r"state\.a: key 1"), ({"a": [torch.zeros(1)]}, r"state\.a\[0\] is a Tensor"), ({"s": {1}}, "set")],
)
def test_state_that_json_would_change_is_refused(tmp_path, state, where):
    with pytest.raises(TypeError, match=where):
        save_checkpoint(tmp_path, 1, {}, state)
    assert steps(tmp_path) == []


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_last_bit(path):
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def change_state(path):
    content = json.loads(path.read_text())
    content["state"]["step"] += 1
    path.write_text(json.dumps(content))


DAMAGES = {
    "empty folder": (lambda p: [f.unlink() for f in p.iterdir()], "state.json is missing"),
    "half an adapter": (lambda p: halve(p / "adapter.safetensors"), "adapter.safetensors has"),
    "no optimizer file": (lambda p: (p / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    "zero-byte state": (lambda p: (p / "state.json").write_text(""), "state.json is empty"),
    "half a state": (lambda p: halve(p / "state.json"), "state.json is not whole"),
    "one bit": (lambda p: flip_last_bit(p / "rng.safetensors"), "rng.safetensors is damaged"),
    "changed state": (lambda p: change_state(p / "state.json"), "state.json is damaged"),
    "no object": (lambda p: (p / "state.json").write_text("[]"), "state.json is damaged"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_folder_is_passed_over_with_a_warning(tmp_path, kind):
    """Case E01."""
    save(tmp_path, 20)
    newest = save(tmp_path, 30)
    hurt, reason = DAMAGES[kind]
    hurt(newest)

    chosen, warnings = select_checkpoint(tmp_path)
    assert chosen.step == 20
    assert load_checkpoint(chosen.path).state == {"step": 20}
    assert len(warnings) == 1
    assert f"step_000030 is passed over: {reason}" in warnings[0]
    assert [(f.step, f.ok) for f in find_checkpoints(tmp_path)] == [(20, True), (30, False)]

    with pytest.raises(ResumeError, match=rf"step_000030.*{reason}"):
        select_checkpoint(tmp_path, step=30)
    with pytest.raises(ResumeError, match=reason):
        load_checkpoint(newest)

    # the damaged folder does not stand in the way of the run that gets there again
    save(tmp_path, 30)
    assert select_checkpoint(tmp_path)[0].step == 30


def test_leftovers_of_a_killed_save_are_not_checkpoints(tmp_path):
    """Case E01 (e)."""
    save(tmp_path, 20)
    leftover = save(tmp_path, 30).rename(tmp_path / ".tmp-step_000030-0123abcd")
    chosen, warnings = select_checkpoint(tmp_path)
    assert (chosen.step, warnings) == (20, [])
    with pytest.raises(ResumeError, match="no checkpoint of step 30; there are 20"):
        select_checkpoint(tmp_path, step=30)
    save(tmp_path, 40)
    assert not leftover.exists()


def test_a_renamed_folder_is_not_believed(tmp_path):
    save(tmp_path, 20).rename(tmp_path / "step_000030")
    with pytest.raises(ResumeError, match=r"no complete checkpoint: .*belongs to step 20"):
        select_checkpoint(tmp_path)


def test_nothing_to_resume_from(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ResumeError, match="holds no checkpoint"):
            select_checkpoint(root)
    assert prune(tmp_path / "absent", 1) == []


def test_keep_last_n(tmp_path):
    """Case E03: keep 1, steps 10 and 20, a crash while writing 30, resume, 30 again."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    assert prune(tmp_path, 1) == [10]
    (tmp_path / ".tmp-step_000030-0123abcd").mkdir()
    (tmp_path / ".tmp-step_000030-0123abcd" / "adapter.safetensors").write_bytes(b"half")
    assert select_checkpoint(tmp_path)[0].step == 20
    save(tmp_path, 30)
    assert prune(tmp_path, 1) == [20]
    assert steps(tmp_path) == ["step_000030"]


def test_steps_are_ordered_as_numbers(tmp_path):
    """Case E03; the folder name has no fixed width."""
    for step in (9, 10, 1_000_000, 999_999):
        save(tmp_path, step)
    assert [f.step for f in find_checkpoints(tmp_path)] == [9, 10, 999_999, 1_000_000]
    assert prune(tmp_path, 2, protect=[9]) == [10]
    assert [f.step for f in find_checkpoints(tmp_path)] == [9, 999_999, 1_000_000]


def test_prune_never_counts_a_damaged_checkpoint_and_never_removes_one(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    flip_last_bit(tmp_path / "step_000030" / "adapter.safetensors")
    (tmp_path / "step_000005").mkdir()
    assert prune(tmp_path, 1) == [10]
    assert steps(tmp_path) == ["step_000005", "step_000020", "step_000030"]
    assert prune(tmp_path, 3) == []
    with pytest.raises(ValueError, match="at least the newest"):
        prune(tmp_path, 0)


def test_saving_the_same_again_changes_nothing_and_other_content_replaces(tmp_path):
    """The final save may fall on a step that was just saved."""
    path = save(tmp_path, 30)
    before = (path / "state.json").stat()
    assert save(tmp_path, 30) == path
    assert (path / "state.json").stat() == before
    save_checkpoint(tmp_path, 30, tensors(1), {"again": True})
    assert load_checkpoint(path).state == {"again": True}
    assert steps(tmp_path) == ["step_000030"]


def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def fresh():
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def restore(path, groups):
    model, optimizer = fresh()
    checkpoint = load_checkpoint(path, groups)
    model.load_state_dict(checkpoint.group("adapter"))
    moments = checkpoint.group("optimizer")
    if moments:
        described = optimizer.state_dict()
        for i in range(2):
            described["state"][i] = {k: moments[f"{i}/{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.load_state_dict(described)
    return model, optimizer, checkpoint.step


def test_resume_with_and_without_the_optimizer(tmp_path):
    """Cases E07 and E09: five steps, a checkpoint, one more."""
    batches = torch.randn(6, 8, 4, generator=torch.Generator().manual_seed(1))
    model, optimizer = fresh()
    train(model, optimizer, batches[:5])
    moments = {f"{i}/{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    parts = {"adapter": model.state_dict(), "optimizer": moments}
    path = save_checkpoint(tmp_path, 5, {f"{g}/{n}": t for g, part in parts.items() for n, t in part.items()}, {})
    assert path.name == "step_000005"
    train(model, optimizer, batches[5:])

    for groups, same in ((None, True), (["adapter"], False)):
        resumed, resumed_optimizer, step = restore(path, groups)
        assert step == 5
        train(resumed, resumed_optimizer, batches[step:])
        assert torch.equal(resumed.weight, model.weight) == same
    with pytest.raises(ResumeError, match="holds no value_head; it holds adapter, optimizer"):
        load_checkpoint(path, ["adapter", "value_head"])


def test_a_disk_that_fills_up_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 20)
    written = []

    def full(members, path):
        written.append(path.name)
        data = safetensors.torch.save(members)
        path.write_bytes(data[: len(data) // len(written)])
        if len(written) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("tithe.checkpoint.saving.save_tensors", full)
    with pytest.raises(UserError, match=r"cannot save the checkpoint .*step_000030: no space left"):
        save(tmp_path, 30)
    assert steps(tmp_path) == ["step_000020"]
    assert select_checkpoint(tmp_path)[0].step == 20


def test_a_directory_that_cannot_be_written_is_a_user_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a directory"):
        save(tmp_path / "file", 1)

    def read_only(*_args, **_kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("pathlib.Path.mkdir", read_only)
    with pytest.raises(UserError, match="read-only; choose another directory"):
        save(tmp_path / "new", 1)


SAVER = """
import sys
from pathlib import Path
import torch
from tithe.checkpoint import prune, save_checkpoint

for step in range(1, 10**6):
    tensors = {"adapter/a": torch.full((2**18,), float(step)), "optimizer/a": torch.full((2**18,), float(step))}
    save_checkpoint(Path(sys.argv[1]), step, tensors, {"step": step})
    prune(Path(sys.argv[1]), 1)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen([sys.executable, "-c", SAVER, str(root)], env=env) as saver:
        deadline = time.monotonic() + 120
        reached = 0
        hidden = False
        while reached < 3 or not hidden:
            names = os.listdir(root) if root.is_dir() else []  # noqa: PTH208
            hidden = any(n.startswith(".tmp-step_") for n in names)
            reached = max([reached, *(int(n.removeprefix("step_")) for n in names if n.startswith("step_"))])
            assert saver.poll() is None
            assert time.monotonic() < deadline
        saver.send_signal(signal.SIGKILL)
    chosen, warnings = select_checkpoint(root)
    assert warnings == []
    assert chosen.step >= reached
    back = load_checkpoint(chosen.path)
    assert back.state == {"step": chosen.step}
    assert all(bool((t == chosen.step).all()) for t in back.tensors.values())
    save(root, chosen.step + 1)
    prune(root, 1)
    assert steps(root) == [f"step_{chosen.step + 1:06d}"]


def test_state_json_can_be_read_by_anyone(tmp_path):
    content = json.loads((save(tmp_path, 30) / "state.json").read_text())
    assert content["step"] == 30
    assert content["state"] == {"step": 30}
    assert set(content["files"]) == {"adapter.safetensors", "optimizer.safetensors", "rng.safetensors"}
