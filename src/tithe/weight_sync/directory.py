"""Versions as directories: the channel that needs nothing but a file system.

Publisher:   consumes adapter tensors from the trainer; produces one directory per version; waits for the disk only.
Subscriber:  lists and loads versions at any time; waits for nothing, is unblocked by nothing.

A version is a PEFT adapter directory plus ``manifest.json``, or a whole model's directory plus ``manifest.json`` where
every parameter is trained. It is complete and durable before its name appears and is never changed; any PEFT (or
Hugging Face) reader can load it. Checksums protect against damage and accident, not against someone who may write to
the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch

from tithe.errors import AdapterError, RunError, UserError
from tithe.lora import TENSOR_FILE, LoraSpec, load_adapter, write_adapter_files
from tithe.types import PolicyVersion
from tithe.utils.durable import (
    explain,
    hidden_directory,
    make_visible,
    remove_directory,
    sha256_file,
    sweep,
)
from tithe.weight_sync.manifest import MANIFEST_FILE, FileRecord, Manifest, check_run_name, parse_name, published_name
from tithe.weight_sync.probe import Probe

MODEL_FILE = "model.safetensors"
"""The weights of a version that is a whole model."""

_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    "lora": LoraSpec,
    "parent": (str, type(None)),
    "optimizer_step": int,
    "base_checksum": str,
    "numeric_mode": str,
    "probe": Probe,
}


def manifest_fields(
    *,
    lora: LoraSpec | None = None,
    parent: str | None,
    optimizer_step: int,
    base_checksum: str,
    numeric_mode: str,
    probe: Probe,
) -> dict[str, Any]:
    """The mapping that `DirectoryChannel` publishes with, with its types; see `Manifest` for the meanings. A whole
    model has no `lora`."""
    adapter = {} if lora is None else {"lora": lora}
    return {
        **adapter,
        "parent": parent,
        "optimizer_step": optimizer_step,
        "base_checksum": base_checksum,
        "numeric_mode": numeric_mode,
        "probe": probe,
    }


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a version, after verifying that every file is exactly what was published.

    Raises `AdapterError`: not a version, torn, changed, with a file too many or too few, or under another name.
    """
    path = directory / MANIFEST_FILE
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"), str(path))
        present = {p.name: p.stat().st_size for p in directory.iterdir() if p.name != MANIFEST_FILE}
        if present.keys() != manifest.files.keys():
            odd = sorted(present.keys() ^ manifest.files.keys())
            raise AdapterError(f"{directory}: missing or unexpected files: {', '.join(odd)}")
        for name, record in manifest.files.items():
            if present[name] != record.n_bytes:
                raise AdapterError(f"{directory}: {name} has {present[name]} bytes, {record.n_bytes} were published")
            if sha256_file(directory / name) != record.sha256:
                raise AdapterError(f"{directory}: {name} is not what was published (its checksum differs)")
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"{directory}: not a complete published version ({error})") from error
    _check_identity(directory, manifest)
    return manifest


def load_published(
    directory: Path, shapes: Mapping[str, tuple[int, int]] | None = None
) -> tuple[Manifest, dict[str, torch.Tensor], LoraSpec]:
    """Verify and read a version: manifest, float32 tensors by PEFT name, spec.

    With `shapes` ((out, in) of the model's linears) names and shapes are checked too. Raises `AdapterError`.
    """
    manifest = read_manifest(directory)
    tensors, spec = load_adapter(directory, shapes)
    return manifest, tensors, spec


class DirectoryChannel:
    """A `WeightChannel` over one directory. One publisher at a time; any number of readers, in any process.

    `root` is created by the first publish; versions of other runs in it are left alone. Raises `AdapterError` for a run
    name that cannot be part of a file name.
    """

    def __init__(self, root: Path, run_name: str) -> None:
        check_run_name(run_name)
        self._root = root
        self._run_name = run_name

    def publish(self, version: PolicyVersion, tensors: Mapping[str, torch.Tensor], manifest: Mapping[str, Any]) -> Path:
        """Make a version visible, complete and durable, and return where it lies. Blocks for the disk.

        `manifest` holds what `manifest_fields` makes. Versions only ascend: one that is not newer than the newest
        raises `RunError`, except that publishing again what is already there (a resumed run that repeats the same
        steps) returns the existing directory. Raises `AdapterError` for tensors that are no adapter and `UserError`
        when the disk refuses; nothing has then become visible.
        """
        fields = _checked(manifest, _FIELD_TYPES)
        lora = fields.pop("lora")
        return self._publish(version, lambda folder: write_adapter_files(folder, tensors, lora), fields)

    def publish_model(self, version: PolicyVersion, write: Callable[[Path], None], manifest: Mapping[str, Any]) -> Path:
        """As `publish`, of a whole model: `write` fills a folder with a Hugging Face directory, its weights in one
        ``model.safetensors``. `manifest` is what `manifest_fields` makes without `lora`.
        """
        kinds = {key: kind for key, kind in _FIELD_TYPES.items() if key != "lora"}
        return self._publish(version, write, _checked(manifest, kinds))

    def _publish(self, version: PolicyVersion, write: Callable[[Path], None], fields: Mapping[str, Any]) -> Path:
        newest = self.newest()
        try:
            sweep(self._root)
            with hidden_directory(self._root) as hidden:
                write(hidden)
                record = self._record(version, hidden, fields)
                target = self._root / record.name
                if newest is not None and version <= newest:
                    self._require_same(target, record, newest)
                    return target
                (hidden / MANIFEST_FILE).write_bytes(record.to_json().encode())
                make_visible(hidden, target)
        except OSError as error:
            raise UserError(f"cannot publish version {version.serial} in {self._root}: {explain(error)}") from error
        return target

    def _record(self, version: PolicyVersion, folder: Path, fields: Mapping[str, Any]) -> Manifest:
        """The manifest of what lies in a folder; the name is made from the tensors' checksum."""
        files = {p.name: FileRecord(p.stat().st_size, sha256_file(p)) for p in sorted(folder.iterdir())}
        name = published_name(self._run_name, version, _weights(files).sha256)
        return Manifest(name=name, version=version, files=files, **fields)

    def list_versions(self) -> list[Path]:
        """Complete versions of this run, oldest first (by lineage, then serial as a number)."""
        return [path for _, path in self._versions()]

    def newest(self) -> PolicyVersion | None:
        """The newest published version; None before the first."""
        versions = self._versions()
        return versions[-1][0] if versions else None

    def lineage_after_resume(self, serial: int, numeric_mode: str) -> int:
        """The lineage in which a run that resumes at `serial` under a numeric mode goes on.

        It is the newest one, unless versions beyond `serial` were published before the stop (their names are taken),
        or the newest was published under another mode: the same numbers would then be another policy.
        """
        versions = self._versions()
        if not versions:
            return 0
        newest, directory = versions[-1]
        goes_on = newest.serial <= serial and read_manifest(directory).numeric_mode == numeric_mode
        return newest.lineage if goes_on else newest.lineage + 1

    def prune(self, keep: int, protect: Container[str] = ()) -> list[str]:
        """Remove all but the newest `keep` (>= 1) versions and those whose names are in `protect`; returns the names.

        The newest always stays, so that no version is ever published twice. For the publishing process only.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the newest version stays")
        removed = [path for path in self.list_versions()[:-keep] if path.name not in protect]
        try:
            for path in removed:
                remove_directory(path)
        except OSError as error:
            raise UserError(f"cannot remove old versions in {self._root}: {explain(error)}") from error
        return [path.name for path in removed]

    def _versions(self) -> list[tuple[PolicyVersion, Path]]:
        if not self._root.is_dir():
            return []
        found: list[tuple[PolicyVersion, Path]] = []
        for path in self._root.iterdir():
            parsed = parse_name(path.name)
            if parsed is not None and parsed[0] == self._run_name and (path / MANIFEST_FILE).is_file():
                found.append((parsed[1], path))
        return sorted(found)

    @staticmethod
    def _require_same(target: Path, record: Manifest, newest: PolicyVersion) -> None:
        """Refuse a version number that was given out before, unless it is the very same policy."""
        if target.is_dir():
            old = read_manifest(target)
            if all(getattr(old, key) == getattr(record, key) for key in ("files", "base_checksum", "numeric_mode")):
                return
        wanted, there = (f"{v.lineage}-v{v.serial}" for v in (record.version, newest))
        raise RunError(
            f"version {wanted} cannot be published: {there} already is, and a version is never given out twice; "
            "continue in a new lineage"
        )


def _checked(manifest: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    if manifest.keys() != kinds.keys():
        odd = sorted(manifest.keys() ^ kinds.keys())
        raise TypeError(f"manifest: missing or unknown fields {odd}; make it with manifest_fields()")
    for key, kind in kinds.items():
        if not isinstance(manifest[key], kind):
            raise TypeError(f"manifest: {key} is {manifest[key]!r}")
    return dict(manifest)


def _weights(files: Mapping[str, FileRecord]) -> FileRecord:
    """The file that gives a version its name."""
    return files[TENSOR_FILE if TENSOR_FILE in files else MODEL_FILE]


def _check_identity(directory: Path, manifest: Manifest) -> None:
    """The directory's name, the manifest's and the tensors' checksum tell the same story."""
    parsed = parse_name(manifest.name)
    if directory.name != manifest.name or parsed is None or not manifest.files.keys() & {TENSOR_FILE, MODEL_FILE}:
        raise AdapterError(f"{directory}: its manifest belongs to {manifest.name!r}")
    if parsed[1] != manifest.version or not _weights(manifest.files).sha256.startswith(parsed[2]):
        raise AdapterError(f"{directory}: name, version and checksum of its manifest contradict each other")
