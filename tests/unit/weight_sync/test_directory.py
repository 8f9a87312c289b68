import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import peft
import pytest
import torch

from tithe.errors import AdapterError, RunError, UserError
from tithe.lora import LoraSpec, init_tensors
from tithe.types import PolicyVersion
from tithe.weight_sync import DirectoryChannel, Manifest, Probe, load_published, manifest_fields, read_manifest

SPEC = LoraSpec(r=4, alpha=8, target_modules=("q_proj",))
SHAPES = {f"model.layers.{i}.self_attn.q_proj": (12, 16) for i in range(2)}
PROBE = Probe((1, 7, 9), 1, (-0.1, float(torch.tensor(1e-7))), noise_floor=3.1e-7, parent_logp=(-0.3, -0.2))


def tensors(seed):
    return init_tensors(SPEC, SHAPES, seed)


def fields(**changes):
    base = {
        "lora": SPEC,
        "parent": None,
        "optimizer_step": 1,
        "base_checksum": "ab12",
        "numeric_mode": "packed/bf16",
        "probe": PROBE,
    }
    return manifest_fields(**{**base, **changes})


@pytest.fixture
def channel(tmp_path):
    return DirectoryChannel(tmp_path / "adapters", "sums")


def publish(channel, serial, seed=None, lineage=0, **changes):
    seed = serial if seed is None else seed
    return channel.publish(PolicyVersion(lineage, serial), tensors(seed), fields(**changes))


def test_a_version_comes_back_as_it_was_published(channel):
    path = publish(channel, 3, parent="sums-0-v2-00000000")
    manifest, loaded, spec = load_published(path, SHAPES)
    assert manifest.name == path.name
    assert path.name.startswith("sums-0-v3-")
    assert manifest.version == PolicyVersion(0, 3)
    assert manifest.probe == PROBE
    assert (manifest.parent, manifest.optimizer_step) == ("sums-0-v2-00000000", 1)
    assert (manifest.base_checksum, manifest.numeric_mode) == ("ab12", "packed/bf16")
    assert spec == SPEC
    assert all(torch.equal(loaded[n], t) for n, t in tensors(3).items())
    assert manifest.files["adapter_model.safetensors"].sha256.startswith(path.name[-8:])
    assert peft.LoraConfig.from_pretrained(path).r == 4


def test_versions_are_listed_as_numbers_and_by_run(channel, tmp_path):
    for serial in (1, 2, 9, 10):
        publish(channel, serial)
    publish(channel, 4, lineage=1, seed=77)
    other = DirectoryChannel(tmp_path / "adapters", "sums-0-v1")
    publish(other, 5)
    assert [read_manifest(p).version for p in channel.list_versions()] == [
        *(PolicyVersion(0, s) for s in (1, 2, 9, 10)),
        PolicyVersion(1, 4),
    ]
    assert other.newest() == PolicyVersion(0, 5)
    assert DirectoryChannel(tmp_path / "nothing", "sums").list_versions() == []


def test_a_serial_is_never_used_twice(channel):
    publish(channel, 1)
    publish(channel, 2)
    for serial in (0, 1, 2):
        with pytest.raises(RunError, match="never given out twice"):
            publish(channel, serial, seed=99)
    assert len(channel.list_versions()) == 2
    publish(channel, 1, lineage=1, seed=99)
    with pytest.raises(RunError):
        publish(channel, 3)


def test_a_resumed_run_that_repeats_its_steps_finds_its_versions(channel):
    first = publish(channel, 1)
    publish(channel, 2)
    before = (first / "manifest.json").stat()
    assert publish(channel, 1) == first
    assert (first / "manifest.json").stat() == before
    with pytest.raises(RunError):
        publish(channel, 1, numeric_mode="dequantized/bf16")


def test_lineage_after_resume(channel):
    mode = fields()["numeric_mode"]
    assert channel.lineage_after_resume(0, mode) == 0
    for serial in (1, 2, 3):
        publish(channel, serial)
    assert channel.lineage_after_resume(3, mode) == 0
    assert channel.lineage_after_resume(3, "another mode") == 1, "the same numbers would be another policy"
    assert channel.lineage_after_resume(2, mode) == 1
    publish(channel, 3, lineage=1, seed=9)
    assert channel.lineage_after_resume(3, mode) == 1


def test_prune_keeps_the_newest_and_the_protected(channel, tmp_path):
    paths = [publish(channel, s) for s in (8, 9, 10, 11)]
    assert channel.prune(2, protect={paths[0].name}) == [paths[1].name]
    assert channel.list_versions() == [paths[0], *paths[2:]]
    assert channel.prune(1) == [paths[0].name, paths[2].name]
    with pytest.raises(ValueError, match="at least the newest"):
        channel.prune(0)
    assert [p.name for p in (tmp_path / "adapters").iterdir()] == [paths[3].name]


def test_what_is_no_adapter_is_never_published(channel, tmp_path):
    broken = tensors(1)
    broken[max(broken)][0, 0] = float("inf")
    with pytest.raises(AdapterError, match="NaN or infinity"):
        channel.publish(PolicyVersion(0, 1), broken, fields())
    with pytest.raises(TypeError, match="probe"):
        channel.publish(PolicyVersion(0, 1), tensors(1), {k: v for k, v in fields().items() if k != "probe"})
    with pytest.raises(TypeError, match="probe"):
        publish(channel, 1, probe=None)
    assert list((tmp_path / "adapters").iterdir()) == []
    with pytest.raises(AdapterError, match="run name"):
        DirectoryChannel(tmp_path, "a/b")


def test_wrong_names_are_refused_with_the_names(channel):
    """Case D03: a version for another model."""
    path = publish(channel, 1)
    with pytest.raises(AdapterError, match=r"0 of 2 modules match.*layers\.0\.self_attn\.q_proj"):
        load_published(path, {"transformer.h.0.attn.q_proj": (12, 16)})


def damage(path, kind):
    tensor_file = path / "adapter_model.safetensors"
    data = tensor_file.read_bytes()
    manifest = path / "manifest.json"
    if kind == "torn":
        tensor_file.write_bytes(data[: len(data) // 2])
    elif kind == "flipped bit":
        tensor_file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif kind == "lost file":
        (path / "adapter_config.json").unlink()
    elif kind == "extra file":
        (path / "adapter_model.bin").write_bytes(b"")
    elif kind == "changed scale":
        config = path / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    elif kind == "empty manifest":
        manifest.write_text("")
    elif kind == "torn manifest":
        manifest.write_text(manifest.read_text()[:-30])
    elif kind == "other version":
        manifest.write_text(manifest.read_text().replace('"serial": 1', '"serial": 2'))
    elif kind == "no manifest":
        manifest.unlink()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("torn", "bytes"),
        ("flipped bit", r"checksum differs"),
        ("lost file", r"missing or unexpected files: adapter_config\.json"),
        ("extra file", r"missing or unexpected files: adapter_model\.bin"),
        ("changed scale", "checksum differs"),
        ("empty manifest", "not JSON"),
        ("torn manifest", "not JSON"),
        ("other version", "contradict"),
        ("no manifest", "not a complete published version"),
    ],
)
def test_a_damaged_version_is_refused(channel, kind, reason):
    path = publish(channel, 1)
    damage(path, kind)
    with pytest.raises(AdapterError, match=reason):
        load_published(path, SHAPES)


def test_a_version_under_another_name_is_refused(channel):
    path = publish(channel, 1)
    moved = path.rename(path.with_name("sums-0-v2-" + path.name[-8:]))
    with pytest.raises(AdapterError, match="belongs to"):
        read_manifest(moved)


def test_manifest_json_is_strict(channel):
    path = publish(channel, 1)
    good = json.loads((path / "manifest.json").read_text())
    text = json.dumps(good)
    assert Manifest.from_json(text) == read_manifest(path)
    wrong = [
        ({"surprise": 1}, "surprise"),
        ({"optimizer_step": "1"}, "optimizer_step"),
        ({"optimizer_step": True}, "optimizer_step"),
        ({"parent": 3}, "parent"),
        ({"format": 2}, "format"),
        ({"version": {"lineage": 0}}, "serial is missing"),
        ({"version": {"lineage": 0, "serial": 1.5}}, "serial"),
        ({"files": {"a": {"n_bytes": 1}}}, "sha256 is missing"),
        ({"probe": None}, "probe"),
        ({"probe": {**good["probe"], "logp": [-0.1]}}, "logp has 1 values"),
        ({"probe": {**good["probe"], "logp": [-0.1, None]}}, "logp"),
        ({"probe": {**good["probe"], "noise_floor": float("nan")}}, "noise_floor"),
    ]
    for change, reason in wrong:
        with pytest.raises(AdapterError, match=reason):
            Manifest.from_json(json.dumps({**good, **change}))
    for key in good:
        with pytest.raises(AdapterError, match=f"{key} is missing"):
            Manifest.from_json(json.dumps({k: v for k, v in good.items() if k != key}))
    with pytest.raises(AdapterError, match="not a JSON object"):
        Manifest.from_json("[]")


def test_a_disk_that_refuses_leaves_nothing(channel, tmp_path, monkeypatch):
    publish(channel, 1)

    def full(path, data):
        path.write_text("part")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(UserError, match="no space left"):
            publish(channel, 2)
    assert len(list((tmp_path / "adapters").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, not a directory"):
        publish(DirectoryChannel(tmp_path / "file" / "x", "sums"), 1)


SLOW_PUBLISHER = """
import sys, time
from pathlib import Path
import safetensors.torch
import torch
from tithe.lora import LoraSpec, peft_io
from tithe.types import PolicyVersion
from tithe.weight_sync import DirectoryChannel, Probe, manifest_fields

def slow(tensors, path, metadata):
    data = safetensors.torch.save(tensors, metadata)
    step = max(1, len(data) // 10)
    with path.open("wb") as file:
        for start in range(0, len(data), step):
            file.write(data[start : start + step])
            file.flush()
            time.sleep(0.02)

peft_io.save_tensors = slow
root = Path(sys.argv[1])
spec = LoraSpec(r=4, alpha=8, target_modules=("q_proj",))
channel = DirectoryChannel(root, "sums")
name = "base_model.model.q_proj.lora_{}.weight"
for serial in range(1, 1000):
    value = float(serial)
    tensors = {name.format("A"): torch.full((4, 32768), value), name.format("B"): torch.full((32768, 4), value)}
    probe = Probe((1, 2), 1, (-value,), 0.0)
    channel.publish(PolicyVersion(0, serial), tensors, manifest_fields(
        lora=spec, parent=None, optimizer_step=serial, base_checksum="", numeric_mode="", probe=probe))
"""


def test_a_reader_sees_the_old_version_or_the_new_one_never_part(tmp_path):
    """Case D21: 1 MiB in ten slow chunks under a polling reader, the publisher killed in the middle of one."""
    root = tmp_path / "adapters"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    channel = DirectoryChannel(root, "sums")

    def newest_is_whole():
        versions = channel.list_versions()
        if not versions:
            return 0
        manifest, loaded, _ = load_published(versions[-1])
        serial = manifest.version.serial
        assert manifest.probe.logp == (-float(serial),)
        assert all(bool((t == serial).all()) for t in loaded.values())
        return serial

    def half_written():
        # the publisher renames what is being looked at
        with contextlib.suppress(FileNotFoundError):
            hidden = [p for p in root.iterdir() if p.name.startswith(".tmp-")]
            return any(0 < (p / "adapter_model.safetensors").stat().st_size < 2**20 for p in hidden)
        return False

    with subprocess.Popen([sys.executable, "-c", SLOW_PUBLISHER, str(root)], env=env) as publisher:
        seen = set()
        deadline = time.monotonic() + 120
        while len(seen) < 2 or not half_written():
            seen.add(newest_is_whole())
            assert publisher.poll() is None
            assert time.monotonic() < deadline
        publisher.send_signal(signal.SIGKILL)
    last = newest_is_whole()
    assert last >= max(seen) > 0
    assert [p for p in root.iterdir() if p.name.startswith(".tmp-")], "the kill left a half-written version"

    # the next publisher goes on after the last good version and clears the leftovers
    path = publish(channel, last + 1)
    assert channel.list_versions()[-1] == path
    assert not [p for p in root.iterdir() if p.name.startswith(".tmp-")]
