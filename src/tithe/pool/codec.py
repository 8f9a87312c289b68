"""Between `RolloutGroup` and rows. The dtype of each array column is fixed here and nowhere else."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tithe.errors import Failure, FailureCause, PoolError
from tithe.types import ExpertArray, FinishReason, Rollout, RolloutGroup

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "token_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "logp": np.dtype("<f4"),
    "logp_behaviour": np.dtype("<f4"),
    "serials": np.dtype("<i4"),
}
"""Array columns of the table `rollout`, each of shape [T]."""

PROMPT_DTYPE = np.dtype("<i4")
_EXPERT_DTYPE = np.dtype("<u2")

ROLLOUT_COLUMNS = (
    "group_id",
    "sample",
    "reward",
    "reward_parts",
    "reason",
    "cause",
    "finish",
    "n_tokens",
    "min_serial",
    "max_serial",
    "temperature",
    "text",
    *ARRAY_DTYPES,
    "experts",
    "grader",
)


def check_group(group: RolloutGroup) -> None:
    """Raise `PoolError` for a group that could not be read back as it is: no samples, repeated sample numbers, arrays
    of different lengths, a reward that is not finite.
    """
    where = f"group {group.group_id}"
    samples = [rollout.sample for rollout in group.rollouts]
    if not samples or len(set(samples)) != len(samples):
        raise PoolError(f"{where}: its sample numbers are {samples}; each rollout needs its own")
    for rollout in group.rollouts:
        lengths = {name: np.shape(getattr(rollout, name)) for name in ARRAY_DTYPES}
        if len(set(lengths.values())) != 1 or len(lengths["token_ids"]) != 1:
            raise PoolError(f"{where}, sample {rollout.sample}: arrays differ in shape: {lengths}")
        positions = len(group.prompt_ids) + len(rollout.token_ids) - 1
        if rollout.experts is not None and (rollout.experts.ndim != 3 or len(rollout.experts) != positions):
            raise PoolError(
                f"{where}, sample {rollout.sample}: experts of shape {rollout.experts.shape}, not [{positions}, L, k]"
            )
        numbers = [*rollout.reward_parts.values(), *([] if rollout.reward is None else [rollout.reward])]
        if not all(math.isfinite(number) for number in numbers):
            raise PoolError(f"{where}, sample {rollout.sample}: reward {rollout.reward} or a part of it is not finite")


def rollout_row(group_id: int, rollout: Rollout) -> tuple[Any, ...]:
    """The values of ROLLOUT_COLUMNS."""
    failure, serials = rollout.failure, rollout.serials
    return (
        group_id,
        rollout.sample,
        None if rollout.reward is None else float(rollout.reward),
        json.dumps({name: float(value) for name, value in rollout.reward_parts.items()}),
        failure.message if failure else rollout.reward_reason or None,
        str(failure.cause) if failure else None,
        str(rollout.finish),
        len(rollout.token_ids),
        int(serials.min()) if len(serials) else None,
        int(serials.max()) if len(serials) else None,
        float(rollout.temperature),
        rollout.text,
        *(encode_array(getattr(rollout, name), dtype) for name, dtype in ARRAY_DTYPES.items()),
        _encode_experts(rollout.experts),
        rollout.grader or None,
    )


def read_group(group: sqlite3.Row, rollouts: list[sqlite3.Row]) -> RolloutGroup:
    """Back from rows; `rollouts` in order of sample. Raises `PoolError` when the arrays were pruned."""
    if group["prompt_tokens"] is None:
        raise PoolError(f"group {group['group_id']} has no token arrays: it is {group['state']}, or was pruned")
    return RolloutGroup(
        group_id=group["group_id"],
        prompt_id=group["prompt_id"],
        prompt_ids=decode_array(group["prompt_tokens"], PROMPT_DTYPE, np.int32),
        rollouts=tuple(_read_rollout(row) for row in rollouts),
        lineage=group["lineage"],
        admitted_serial=group["admitted_serial"],
    )


def _read_rollout(row: sqlite3.Row) -> Rollout:
    cause = row["cause"]
    return Rollout(
        sample=row["sample"],
        token_ids=decode_array(row["token_ids"], ARRAY_DTYPES["token_ids"], np.int32),
        loss_mask=decode_array(row["loss_mask"], ARRAY_DTYPES["loss_mask"], np.bool_),
        logp=decode_array(row["logp"], ARRAY_DTYPES["logp"], np.float32),
        logp_behaviour=decode_array(row["logp_behaviour"], ARRAY_DTYPES["logp_behaviour"], np.float32),
        serials=decode_array(row["serials"], ARRAY_DTYPES["serials"], np.int32),
        temperature=row["temperature"],
        finish=FinishReason(row["finish"]),
        text=row["text"],
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        failure=None if cause is None else Failure(FailureCause(cause), row["reason"] or ""),
        experts=_decode_experts(row["experts"]),
        reward_reason=(row["reason"] or "") if cause is None else "",
        grader=row["grader"] or "",
    )


def _encode_experts(experts: ExpertArray | None) -> bytes | None:
    """uint16: L, k, then [P + T - 1, L, k]."""
    if experts is None:
        return None
    return np.array(experts.shape[1:], _EXPERT_DTYPE).tobytes() + experts.astype(_EXPERT_DTYPE).tobytes()


def _decode_experts(data: bytes | None) -> ExpertArray | None:
    if data is None:
        return None
    layers, k = (int(x) for x in np.frombuffer(data, _EXPERT_DTYPE, 2))
    return np.frombuffer(data, _EXPERT_DTYPE, offset=4).reshape(-1, layers, k).astype(np.uint16)


def encode_array(array: NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Bytes of the array in the column's dtype. Whole numbers that the dtype cannot hold raise `PoolError`."""
    encoded = np.asarray(array).astype(dtype)
    if dtype.kind != "f" and not np.array_equal(encoded, array):
        raise PoolError(f"values of dtype {np.asarray(array).dtype} do not fit the pool's {dtype}")
    return encoded.tobytes()


def decode_array(data: bytes, dtype: np.dtype[Any], target: type[Any]) -> NDArray[Any]:
    """A fresh, writable array."""
    return np.frombuffer(data, dtype).astype(target)
