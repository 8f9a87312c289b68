"""The commands beside `train` and `resume`: check, eval, sample, parity, report, demo."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from tithe.arch import find_demo_model
from tithe.build.certificate import certify
from tithe.build.ended import final_policy, question_texts
from tithe.build.hooks import Evaluator, make_publisher
from tithe.build.running import run
from tithe.build.scoring import uses_own_base
from tithe.build.session import Session, open_session, say
from tithe.config import RunConfig, choose_run_dir, demo_config, load_config, load_run
from tithe.envs import instructed, load_task
from tithe.errors import ConfigError, ResumeError, RunError, UserError
from tithe.metrics import read_rows
from tithe.monitoring import build_report, summary_table
from tithe.orchestration import ServedVersion
from tithe.pool import PoolReader
from tithe.renderers import load_renderer
from tithe.rewards import BUILT_IN
from tithe.types import GenerateRequest, PolicyVersion, RolloutGroup
from tithe.weight_sync import DirectoryChannel

PARITY_STEPS, PARITY_AGE = 3, 2
SMALL_CONTEXT = 8192
"""Positions of the demo's model."""


def evaluate(target: Path, overrides: list[str]) -> dict[str, object]:
    """Score a run's final adapter, or the starting policy of a run file, on the held-out questions."""
    is_run = target.is_dir()
    cfg = load_run(target, overrides) if is_run else load_config(target, overrides)
    adapter = _final_policy(target, cfg) if is_run else None
    with open_session(cfg, adapter=adapter) as session, tempfile.TemporaryDirectory() as scratch:
        row = Evaluator(session, Path(scratch), None)(_serve(session, Path(scratch)))
        assert row is not None  # nobody breaks it off
        return {**row, "text": summary_table(row)}


def sample(run_dir: Path, prompt: str, overrides: list[str]) -> dict[str, object]:
    """Answer a prompt with a run's final adapter, asked as the run's questions are (system prompt, `task.instruction`)
    and under its own sampling settings. Raises `ConfigError` for a run with tools, before anything is loaded."""
    cfg = load_run(run_dir, overrides)
    if cfg.task.tools:
        raise ConfigError(
            f"this run plays conversations with tools (task.tools = [{', '.join(cfg.task.tools)}]), and `tithe sample` "
            f"asks for one reply without them: `tithe eval {run_dir}` plays the held-out questions with their tools",
            key="task.tools",
        )
    with open_session(cfg, adapter=_final_policy(run_dir, cfg)) as session, tempfile.TemporaryDirectory() as scratch:
        served = _serve(session, Path(scratch))
        renderer = session.base.renderer
        asked = instructed(prompt, cfg.task.instruction)
        message = [{"role": "user", "content": asked}]
        ids = renderer.render(message if renderer.has_template else asked, cfg.rollout.system_prompt)
        longest = cfg.model.max_context - cfg.rollout.max_new_tokens
        if not 0 < len(ids) <= longest:
            raise UserError(
                f"the prompt has {len(ids)} tokens; 1 to {longest} leave room for an answer "
                "(model.max_context - rollout.max_new_tokens)"
            )
        request = GenerateRequest(ids, session.params, served.name)
        answer = session.engine.submit(request).result()
        text = renderer.decode_reply(answer.token_ids.tolist())
        return {
            "prompt": prompt,
            "answer": text,
            "tokens": len(answer.token_ids),
            "finish": str(answer.finish),
            "text": text,
        }


def parity(cfg_or_run_dir: RunConfig | Path) -> dict[str, object]:
    """The parity certificate of a run directory; of a run file, after a short training run in a scratch directory."""
    if isinstance(cfg_or_run_dir, Path):
        cfg = load_run(cfg_or_run_dir)
        with open_session(cfg, adapter=_final_policy(cfg_or_run_dir, cfg)) as session:
            result = _certificate(session, cfg_or_run_dir)
        return {**result, "text": _certificate_text(result)}
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "parity"
        run(_short(cfg_or_run_dir), run_dir, evaluating=False, report=False, cross_check=True)
        result = _read_certificate(run_dir)
    return {**result, "text": _certificate_text(result)}


def report(run_dir: Path) -> dict[str, object]:
    """Write report.html again from what the run directory holds, with the questions of its task where they can be read
    without running anybody's code.
    """
    page = build_report(run_dir, _questions(load_run(run_dir)))
    return {"report": str(page), "text": f"report: {page}"}


def _questions(cfg: RunConfig) -> dict[str, str]:
    """Prompt id → text; empty, with a word on it, for a task that is made by a function or is no longer there."""
    functions = [name for name in (cfg.task.source, cfg.task.eval_source) if name is not None and not _is_data(name)]
    if functions:
        say(f"questions are shown by their ids: the task is made by {functions[0]}")
        return {}
    try:
        task = load_task(cfg.task, needs_answer=cfg.reward.function in BUILT_IN)
    except UserError as error:
        say(f"warning: questions are shown by their ids: {error}")
        return {}
    return question_texts(task.train)


def _is_data(source: str) -> bool:
    """Whether reading a task's source calls nobody's function."""
    name, _, size = source.partition(":")
    built_in = name == "reasoning_gym" or (name in ("sums", "products") and size.isdecimal() == bool(size))
    return built_in or source.endswith((".jsonl", ".parquet", "/"))


def check(cfg: RunConfig) -> dict[str, object]:
    """One step on the demo's small model with the user's data and reward, everything shown; leaves nothing behind.

    A run's own base may take minutes to load; what is checked here (rows, template, reward, settings) does not need it,
    unless a reward model judges with that base.
    """
    small, changed = _one_small_step(cfg)
    if changed:
        say(f"check: what does not count in this small step: {', '.join(changed)}")
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "check"
        finished = run(small, run_dir, evaluating=False, report=False)
        groups = _read_groups(run_dir)
        metrics = _last_row(run_dir)
        prompts = _prompt_texts(groups, small)
    lines: list[str] = []
    for g, prompt in zip(groups, prompts, strict=True):
        lines += ["", f"prompt {g.prompt_id} ({len(g.prompt_ids)} tokens):", prompt]
        for r in g.rollouts:
            parts = ", ".join(f"{k} {v:g}" for k, v in r.reward_parts.items())
            lines.append(f"  reward {r.reward!s:>6} ({parts}) {r.finish}: {r.text!r:.160}")
    lines += ["", "one step: " + ", ".join(f"{k} {v:.4g}" for k, v in sorted(metrics.items()))]
    lines.append(f"sampler against trainer: max |Δlog-prob| {finished.result.get('max_abs_dlogp')}")
    rewards = [r.reward for g in groups for r in g.rollouts]
    return {"rewards": rewards, "metrics": metrics, "text": "\n".join(lines).strip()}


def _one_small_step(cfg: RunConfig) -> tuple[RunConfig, list[str]]:
    """The configuration of `check`, and what of the run's it leaves out, as ``key = value``: settings that
    only the run's own base can take, and a completion too long for the small model."""
    group = cfg.rl.samples_per_prompt
    context = min(cfg.model.max_context, SMALL_CONTEXT)
    model: dict[str, object] = {"max_context": context}
    lora: dict[str, object] = {}
    rl: dict[str, object] = {
        "batch_size_per_update": 2 * group,
        "rollout_buffer_size": 2 * group,
        "max_policy_update_lag": 0,
        "max_sample_age": 0,
        "sync_every": 1,
    }
    rollout: dict[str, object] = {}
    changed: list[str] = []
    if not uses_own_base(cfg):
        model |= {"path": None, "train": "lora", "quantize": "none", "load_in_8bit": False}
        if cfg.lora.target_modules != "all-linear":
            lora["target_modules"] = "all-linear"
            changed.append(f"lora.target_modules = [{', '.join(cfg.lora.target_modules)}]")
        if cfg.lora.init_from is not None:
            lora["init_from"] = None
            changed.append(f"lora.init_from = {cfg.lora.init_from}")
        if cfg.rl.kl_reference != "base" and cfg.rl.reference_every is None:
            rl["kl_reference"] = "base"
            changed.append(f"rl.kl_reference = {cfg.rl.kl_reference}")
    room = context - cfg.rollout.max_prompt_tokens
    if 0 < room < cfg.rollout.max_new_tokens:
        rollout["max_new_tokens"] = room
        changed.append(f"rollout.max_new_tokens = {cfg.rollout.max_new_tokens} ({room} fit)")
    sections = {
        "model": cfg.model.model_copy(update=model),
        "lora": cfg.lora.model_copy(update=lora),
        "rl": cfg.rl.model_copy(update=rl),
        "rollout": cfg.rollout.model_copy(update=rollout),
        "run": cfg.run.model_copy(update={"max_steps": 1, "checkpoint_every": 1, "eval_every": None, "ranks": 1}),
        "monitor": cfg.monitor.model_copy(update={"progress": False, "tensorboard": False, "report": False}),
        "schedule": cfg.schedule.model_copy(update={"phases": cfg.schedule.phases[:1]}),  # one step sees the first
    }
    return cfg.model_copy(update=sections), changed


def demo(overrides: list[str]) -> dict[str, object]:
    """Train the demo model on the demo task; the last line of the answer is where everything lies."""
    started = time.monotonic()
    cfg = choose_run_dir(demo_config(overrides))
    say(f"demo: {cfg.task.source}, {cfg.run.max_steps} steps in {cfg.run.dir}")
    finished = run(cfg, Path(cfg.run.dir))
    before, after = finished.before or {}, finished.after or {}
    memory = _memory(Path(cfg.run.dir))
    numbers: dict[str, object] = {
        "before": before.get("eval_sampled"),
        "after": after.get("eval_sampled"),
        "before_greedy": before.get("eval_greedy"),
        "after_greedy": after.get("eval_greedy"),
        "ci95_before": [before.get("eval_sampled_lo"), before.get("eval_sampled_hi")],
        "ci95_after": [after.get("eval_sampled_lo"), after.get("eval_sampled_hi")],
        "minutes": (time.monotonic() - started) / 60,
        **memory,
    }
    return {**numbers, **finished.result}


def _serve(session: Session, scratch: Path) -> ServedVersion:
    """Publish the session's policy in a scratch directory and have the engine prove it."""
    version = PolicyVersion(0, 0)
    name = make_publisher(session, DirectoryChannel(scratch / "adapters", "once")).publish(version)
    return ServedVersion(version, name)


def _final_policy(run_dir: Path, cfg: RunConfig) -> Path:
    policy = final_policy(run_dir, cfg)
    if not policy.is_dir():
        raise ResumeError(
            f"{run_dir} has no final {policy.name} yet: let the run end, or go on with `tithe resume {run_dir}`"
        )
    return policy


def _short(cfg: RunConfig) -> RunConfig:
    """The run in so few steps that its newest rollouts were sampled by a policy of at least `PARITY_STEPS` steps."""
    age = min(cfg.rl.max_sample_age, PARITY_AGE)
    bounds = {"max_policy_update_lag": min(cfg.rl.max_policy_update_lag, PARITY_AGE), "max_sample_age": age}
    buffer = min(cfg.rl.rollout_buffer_size, cfg.rl.batch_size_per_update * (age + 1))
    steps = PARITY_STEPS + age + 1
    run = cfg.run.model_copy(update={"max_steps": steps, "checkpoint_every": steps, "eval_every": None})
    rl = cfg.rl.model_copy(update={**bounds, "sync_every": 1, "rollout_buffer_size": buffer})
    return cfg.model_copy(update={"run": run, "rl": rl})


def _certificate(session: Session, run_dir: Path) -> dict[str, object]:
    result = certify(session, run_dir, cross_check=True)
    return _required(result)


def _read_certificate(run_dir: Path) -> dict[str, object]:
    path = run_dir / "parity.json"
    return _required(json.loads(path.read_text()) if path.exists() else None)


def _required(certificate: dict[str, object] | None) -> dict[str, object]:
    if certificate is None:
        raise RunError(
            "the pool holds no trained rollout of one version that is still on disk; nothing can be certified"
        )
    return certificate


def _certificate_text(result: dict[str, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in result.items())


def _read_groups(run_dir: Path) -> list[RolloutGroup]:
    with PoolReader(run_dir / "pool.sqlite") as reader:
        return reader.groups()


def _last_row(run_dir: Path) -> dict[str, float]:
    rows = [r for r in read_rows(run_dir / "metrics.jsonl").rows if "loss" in r]
    return {k: v for k, v in rows[-1].items() if isinstance(v, float)} if rows else {}


def _prompt_texts(groups: list[RolloutGroup], cfg: RunConfig) -> list[str]:
    renderer = load_renderer(find_demo_model() if cfg.model.path is None else Path(cfg.model.path))
    return [renderer.decode(g.prompt_ids.tolist()) for g in groups]


def _memory(run_dir: Path) -> dict[str, object]:
    memory = json.loads((run_dir / "run.json").read_text())["memory"]
    return {k: memory[k] for k in ("base_resident_bytes", "base_file_bytes", "peak_pss_bytes")}
