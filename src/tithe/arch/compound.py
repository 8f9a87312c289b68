"""The tensors of a safetensors checkpoint → one `TensorEntry` for each of the architecture's, packed or not.

The files decide: a tensor that lies there as plain numbers is taken as it is, whatever the config's ignore list says;
otherwise the parts of the formats that the config names are looked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tithe.arch.checkpoint import MISSING_LISTED, TensorEntry
from tithe.arch.files import quote
from tithe.arch.formats import SAFETENSORS_FORMATS, StoredFormat, TensorFormat
from tithe.arch.layouts import Part, PartRole
from tithe.arch.quantization import Quantization
from tithe.arch.safetensors_file import SafetensorsTensor
from tithe.arch.spec import ArchSpec
from tithe.arch.tensors import Tensor, iter_tensors
from tithe.errors import ModelError

_ACTIVATION_SCALES: Final = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")
"""Scales of activations and of a quantized KV cache; the base's weights do not need them."""

Files = Mapping[str, SafetensorsTensor]


def make_entries(files: Files, spec: ArchSpec, quantization: Quantization | None) -> dict[str, TensorEntry]:
    """Entries by canonical name, and those of names that the architecture does not have under their own.

    Left out are layers for predicting further tokens and, beside packed weights, what a base does not keep.
    `ModelError` for a packed tensor that is incomplete or misshapen and for dtypes that are not read.
    """
    loaded = {name: file for name, file in files.items() if not _is_extra_layer(name, spec)}
    if quantization is None:
        return {name: _plain(name, file) for name, file in loaded.items()}
    entries: dict[str, TensorEntry] = {}
    used: set[str] = set()
    missing = 0
    for tensor in iter_tensors(spec):
        file = loaded.get(tensor.name)
        if file is not None and file.dtype in SAFETENSORS_FORMATS:
            entries[tensor.name] = _plain(tensor.name, file)
            used.add(tensor.name)
            continue
        entry = _packed(tensor, loaded, quantization, used) if tensor.family.is_linear else None
        if entry is not None:
            entries[tensor.name] = entry
        missing += entry is None
        if missing > MISSING_LISTED:
            break
    rest = {name: file for name, file in loaded.items() if name not in used and not name.endswith(_ACTIVATION_SCALES)}
    return entries | {name: _plain(name, file) for name, file in rest.items()}


def _is_extra_layer(name: str, spec: ArchSpec) -> bool:
    """True for tensors of the `n_mtp_layers` layers after the last one."""
    if not spec.n_mtp_layers or not name.startswith("model.layers."):
        return False
    number = name.split(".", 3)[2]
    return number.isascii() and number.isdigit() and 0 <= int(number) - spec.n_layers < spec.n_mtp_layers


def _plain(name: str, file: SafetensorsTensor) -> TensorEntry:
    return TensorEntry(name, file.shape, StoredFormat(file.format()), file.n_bytes, file.file, file.offset)


def _packed(tensor: Tensor, files: Files, quantization: Quantization, used: set[str]) -> TensorEntry | None:
    """The entry of a packed tensor, or `None` when the files have nothing of it. Adds the names it takes to `used`."""
    shape = tensor.family.matrix
    for stored in quantization.formats:
        try:
            parts = stored.parts(shape)
        except ValueError as error:
            raise ModelError(f"{tensor.name} of shape {shape} cannot be {stored.kind}: {error}") from error
        found = {part.suffix: files[name] for part in parts if (name := tensor.module + part.suffix) in files}
        if not any(part.suffix in found for part in parts if part.is_held):
            continue
        for part in parts:
            if part.is_held:
                _check_part(tensor, stored, part, found.get(part.suffix))
        used.update(file.name for file in found.values())
        held = {part.suffix: found[part.suffix] for part in parts if part.is_held}
        codes = found[parts[0].suffix]
        n_bytes = sum(file.n_bytes for file in held.values())
        return TensorEntry(tensor.name, shape, stored, n_bytes, codes.file, codes.offset, parts=held)
    return None


def _check_part(tensor: Tensor, stored: StoredFormat, part: Part, file: SafetensorsTensor | None) -> None:
    """Dtype and shape are the format's; scales of FP8 blocks may be bf16, as Qwen3's releases have them."""
    name = tensor.module + part.suffix
    if file is None:
        raise ModelError(f"{tensor.name} is incomplete: {stored.kind} also needs {name}; fetch the complete checkpoint")
    is_narrow = stored.kind is TensorFormat.FP8_BLOCK and part.role is PartRole.SCALE and file.dtype == "BF16"
    if file.shape != part.shape or (file.dtype != part.dtype and not is_narrow):
        raise ModelError(
            f"{file.file.path}: {quote(name)} is {file.dtype} {file.shape}, but {stored.kind} of shape "
            f"{tensor.family.matrix} has {part.dtype} {part.shape} there; config and weights do not belong together"
        )
