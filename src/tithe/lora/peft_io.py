"""Adapters on disk, in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Supported: LoRA on linears with r, lora_alpha, lora_dropout, use_rslora, rank_pattern, alpha_pattern, and
target_modules as names, paths or a pattern (the tensors say which modules it meant). Everything else that changes what
the adapter computes (DoRA, biases, fully trained modules, trained tokens, ...) is refused by name, and so is a setting
this reader does not know: an adapter is either applied in full or not at all.

Names, shapes, ranks and numbers are checked on both ways: unmatched tensors are listed, an adapter that matches no
module is never "loaded", and NaN or infinity is refused. Pickle files are never opened.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from tithe.errors import AdapterError, UserError
from tithe.lora.files import save_tensors
from tithe.lora.spec import ALL_LINEAR, LoraSpec, matches, module_of, resolve_targets, tensor_names
from tithe.utils.durable import complete_directory, explain

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

# Settings that do not change what the loaded adapter computes, whatever their value.
_NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "inference_mode",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
# Settings read below.
_READ = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Initialisations that leave the base weights as they are; the others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) subtract
# something from the base, so that the file alone does not hold the whole change.
_HARMLESS_INIT = (True, False, None, "gaussian", "eva", "orthogonal")


def save_adapter(
    directory: Path, tensors: Mapping[str, torch.Tensor], spec: LoraSpec, *, base_model: str | None = None
) -> None:
    """Write an adapter directory: complete and durable, or not at all. An existing one is replaced.

    `tensors` is keyed by PEFT name; A [r, in], B [out, r], written as float32. `base_model` is what PEFT shows as the
    model the adapter belongs to. Raises `AdapterError` for tensors that are no adapter, `UserError` when the disk
    refuses.
    """
    try:
        with complete_directory(directory, replace=True) as hidden:
            write_adapter_files(hidden, tensors, spec, base_model=base_model)
    except OSError as error:
        raise UserError(f"cannot write the adapter {directory}: {explain(error)}") from error


def write_adapter_files(
    folder: Path, tensors: Mapping[str, torch.Tensor], spec: LoraSpec, *, base_model: str | None = None
) -> None:
    """Write an adapter's two files into `folder`; equal adapters give equal bytes.

    Contiguous float32 tensors go to the file as they lie in memory, without a copy. Raises `AdapterError`, `OSError`.
    """
    modules = _check_tensors(tensors, spec, "adapter to save")
    _check_coverage(spec.target_modules, modules, "adapter to save")
    config = json.dumps(_config_of(spec, modules, base_model), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_bytes(config.encode())
    on_disk: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, t in tensors.items():
        own = t.detach().to("cpu", torch.float32).contiguous()
        on_disk[name] = own.clone() if own.data_ptr() in seen else own  # the format has no two names for one tensor
        seen.add(own.data_ptr())
    save_tensors(on_disk, folder / TENSOR_FILE, metadata={"format": "pt"})


def load_adapter(
    directory: Path, shapes: Mapping[str, tuple[int, int]] | None = None
) -> tuple[dict[str, torch.Tensor], LoraSpec]:
    """Read an adapter directory: float32 CPU tensors by PEFT name, and the spec.

    With `shapes` ((out, in) of every linear of the model that can carry an adapter) the adapter is also checked against
    the model, see `check_adapter`. Raises `AdapterError`; nothing is returned in part.
    """
    where = str(directory)
    config = _read_config(directory)
    tensors = _read_tensors(directory)
    modules = _modules_of(tensors, where)
    spec = _spec_of(config, modules, where)
    _check_tensors(tensors, spec, where)
    _check_coverage(spec.target_modules, modules, where)
    if shapes is not None:
        check_adapter(tensors, spec, shapes, where)
    return {name: tensor.to(torch.float32) for name, tensor in tensors.items()}, spec


def check_adapter(
    tensors: Mapping[str, torch.Tensor],
    spec: LoraSpec,
    shapes: Mapping[str, tuple[int, int]],
    where: str = "adapter",
) -> None:
    """Refuse (`AdapterError`) an adapter that does not fit a model exactly.

    `shapes` gives (out, in) of every linear that can carry an adapter. Listed in the message: tensors whose module the
    model does not have, modules that the targets name but the adapter lacks, and tensors of another shape.
    """
    modules = _check_tensors(tensors, spec, where)
    unknown = [m for m in modules if m not in shapes]
    if unknown:
        matched = len(modules) - len(unknown)
        names = [name for m in unknown for name in tensor_names(m)]
        raise AdapterError(
            f"{where}: {matched} of {len(modules)} modules match this model; unmatched tensors: {_listed(names)}"
        )
    missing = [m for m in resolve_targets(spec.target_modules, shapes) if m not in modules]
    if missing:
        raise AdapterError(f"{where}: targeted modules without tensors: {_listed(missing)}")
    for module in modules:
        out_features, in_features = shapes[module]
        wanted = ((spec.rank(module), in_features), (out_features, spec.rank(module)))
        for name, shape in zip(tensor_names(module), wanted, strict=True):
            if tuple(tensors[name].shape) != shape:
                raise AdapterError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, this model needs {shape}")


# ---- tensors


def _read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / TENSOR_FILE
    if not path.is_file():
        pickled = sorted(p.name for p in directory.glob("adapter_model.*") if p.suffix in {".bin", ".pt", ".pth"})
        hint = f"; {pickled[0]} is a pickle, which can run code: convert it to safetensors" if pickled else ""
        raise AdapterError(f"{directory}: {TENSOR_FILE} is missing{hint}")
    try:
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{path}: not a complete safetensors file ({error})") from error


def _modules_of(names: Iterable[str], where: str) -> tuple[str, ...]:
    """Module paths of PEFT tensor names; both halves of each must be there."""
    present = set(names)
    strange = sorted(n for n in present if module_of(n) is None)
    if strange:
        raise AdapterError(
            f"{where}: holds tensors that are not LoRA matrices of linears: {_listed(strange)}; "
            "fully trained modules, biases and other adapter kinds are not supported"
        )
    modules = tuple(sorted({m for n in present if (m := module_of(n)) is not None}))
    if not modules:
        raise AdapterError(f"{where}: holds no adapter tensor")
    halves = [n for m in modules for n in tensor_names(m) if n not in present]
    if halves:
        raise AdapterError(f"{where}: missing tensors: {_listed(halves)}")
    return modules


def _check_tensors(tensors: Mapping[str, torch.Tensor], spec: LoraSpec, where: str) -> tuple[str, ...]:
    modules = _modules_of(tensors, where)
    for module in modules:
        name_a, name_b = tensor_names(module)
        a, b, rank = tensors[name_a], tensors[name_b], spec.rank(module)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise AdapterError(
                f"{where}: rank of {module} is {rank} in the configuration, "
                f"but A has shape {tuple(a.shape)} and B {tuple(b.shape)}"
            )
    not_float = [n for n, t in tensors.items() if not t.is_floating_point()]
    if not_float:
        raise AdapterError(f"{where}: not floating point: {_listed(not_float)}")
    broken = [n for n, t in tensors.items() if not bool(torch.isfinite(t).all())]
    if broken:
        raise AdapterError(f"{where}: NaN or infinity in {_listed(broken)}")
    return modules


def _check_coverage(targets: tuple[str, ...], modules: tuple[str, ...], where: str) -> None:
    """Targets and tensors name the same modules, as far as can be seen without the model."""
    if targets == (ALL_LINEAR,):
        return
    untargeted = [m for m in modules if not any(matches(t, m) for t in targets)]
    if untargeted:
        raise AdapterError(f"{where}: tensors on modules that target_modules does not name: {_listed(untargeted)}")
    empty = [t for t in targets if not any(matches(t, m) for m in modules)]
    if empty:
        raise AdapterError(f"{where}: target_modules names {_listed(empty)}, but no tensor belongs there")


def _listed(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


# ---- configuration


def _config_of(spec: LoraSpec, modules: tuple[str, ...], base_model: str | None) -> dict[str, Any]:
    if spec.target_modules == (ALL_LINEAR,):
        # PEFT would expand the word by its own rule, which may name other modules than these.
        targets = sorted({m.rpartition(".")[2] for m in modules})
    else:
        targets = sorted(spec.target_modules)
    return {
        "alpha_pattern": dict(spec.alpha_pattern),
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.r,
        "rank_pattern": dict(spec.rank_pattern),
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": spec.use_rslora,
    }


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AdapterError(f"{directory}: {CONFIG_FILE} is missing; this is not a PEFT adapter directory") from error
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path}: must hold a JSON object")
    return config


def _spec_of(config: Mapping[str, Any], modules: tuple[str, ...], where: str) -> LoraSpec:
    where = f"{where}/{CONFIG_FILE}"
    _refuse_unsupported(config, where)
    return LoraSpec(
        r=_number(config, "r", int, where),
        alpha=_number(config, "lora_alpha", float, where),
        dropout=_number({"lora_dropout": 0.0, **config}, "lora_dropout", float, where),
        target_modules=_targets(config, modules, where),
        use_rslora=bool(config.get("use_rslora")),
        rank_pattern=_pattern(config, "rank_pattern", int, where),
        alpha_pattern=_pattern(config, "alpha_pattern", float, where),
    )


def _refuse_unsupported(config: Mapping[str, Any], where: str) -> None:
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{where}: peft_type is {config.get('peft_type')!r}; only LORA is supported")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{where}: bias is {config['bias']!r}; trained biases are not supported, only 'none'")
    init = config.get("init_lora_weights", True)
    if init not in _HARMLESS_INIT:
        raise AdapterError(f"{where}: init_lora_weights is {init!r}, which changes the base weights; not supported")
    active = sorted(k for k, v in config.items() if k not in _NEUTRAL | _READ and v not in (None, False, [], {}, ""))
    if active:
        shown = ", ".join(f"{k} = {config[k]!r}" for k in active)
        raise AdapterError(f"{where}: not supported: {shown}")


def _number(config: Mapping[str, Any], key: str, kind: Callable[[Any], Any], where: str) -> Any:
    """A number of the configuration. Never a default for rank or alpha: a guessed scale is a wrong adapter."""
    value = config.get(key)
    if value is None:
        raise AdapterError(f"{where}: {key} is missing; the adapter's scale cannot be known without it")
    if isinstance(value, bool) or not isinstance(value, int | float) or kind(value) != value:
        raise AdapterError(f"{where}: {key} is {value!r}, not a number of the right kind")
    return kind(value)


def _pattern(config: Mapping[str, Any], key: str, kind: Callable[[Any], Any], where: str) -> dict[str, Any]:
    pattern = config.get(key) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{where}: {key} must be an object of names and numbers")
    # PEFT reads keys as regular expressions; names, with ^ for "from the start", are the plain part of that.
    regex = [k for k in pattern if not k.removeprefix("^").replace(".", "").replace("_", "").isalnum()]
    if regex:
        raise AdapterError(f"{where}: {key} holds regular expressions ({_listed(regex)}); write plain module names")
    return {k: _number(pattern, k, kind, f"{where}: {key}") for k in pattern}


def _targets(config: Mapping[str, Any], modules: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Targets as names; where the file narrows them down by other means, the exact paths of its tensors."""
    targets = config.get("target_modules")
    narrowed = any(config.get(k) not in (None, [], "") for k in ("exclude_modules", "layers_to_transform"))
    if narrowed or (isinstance(targets, str) and targets):
        return modules
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) and t for t in targets):
        raise AdapterError(f"{where}: target_modules is {targets!r}; it must list module names")
    return tuple(sorted(targets))
