"""Loading: the design's own block, overrides, messages that name the key, round trip."""

import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tithe.config import RunConfig, build_config, choose_run_dir, config_warnings, dump_resolved, load_config
from tithe.config.fields import iter_fields
from tithe.config.yaml_text import parse_yaml
from tithe.errors import ConfigError

DESIGN_BLOCK = """\
model: {base_dtype: bf16, activation_checkpointing: true, load_in_8bit: false}
lora: {r: 32, alpha: 64, dropout: 0.1, target_modules: [q_proj, v_proj, o_proj, gate_proj]}
optimizer: {lr: 2e-5, weight_decay: 0.01, lr_scheduler: cosine, warmup_steps: 50}
rl: {kl_coef: 0.01, clip_range: 0.2, batch_size_per_update: 256, rollout_buffer_size: 4096, max_policy_update_lag: 32, \
reward_shaping: function_validation}
"""


def write(tmp_path, text, name="my run.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def refused(*overrides, path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, list(overrides))
    return caught.value


def test_the_block_of_the_design_loads_as_it_stands(tmp_path):
    cfg = load_config(write(tmp_path, DESIGN_BLOCK))
    assert (cfg.model.base_dtype, cfg.model.activation_checkpointing, cfg.model.load_in_8bit) == ("bf16", True, False)
    assert (cfg.lora.r, cfg.lora.alpha, cfg.lora.dropout) == (32, 64.0, 0.1)
    assert cfg.lora.target_modules == ("q_proj", "v_proj", "o_proj", "gate_proj")
    assert (cfg.optimizer.lr, cfg.optimizer.weight_decay) == (2e-5, 0.01)
    assert (cfg.optimizer.lr_scheduler, cfg.optimizer.warmup_steps) == ("cosine", 50)
    assert (cfg.rl.kl_coef, cfg.rl.clip_range, cfg.rl.clip_range_high) == (0.01, 0.2, 0.2)
    assert (cfg.rl.batch_size_per_update, cfg.rl.rollout_buffer_size) == (256, 4096)
    assert (cfg.rl.max_policy_update_lag, cfg.rl.max_sample_age) == (32, 32)
    assert cfg.rl.reward_shaping == "function_validation"
    assert cfg.model.path is None
    assert cfg.task.source == "sums"
    (warning,) = config_warnings(cfg)
    assert "lora.dropout = 0.1" in warning


def test_equal_configurations_are_equal_hashable_and_never_change():
    cfg = load_config(None)
    assert cfg == RunConfig()
    assert hash(cfg) == hash(RunConfig())
    with pytest.raises(ValueError, match="frozen"):
        cfg.rl.kl_coef = 1.0


def test_defaults_suit_a_laptop_and_warn_of_nothing():
    cfg = load_config(None)
    assert config_warnings(cfg) == []
    assert (cfg.optimizer.lr, cfg.rl.batch_size_per_update, cfg.rl.samples_per_prompt) == (2e-4, 64, 8)


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path):
    assert load_config(write(tmp_path, "# nothing\n", "run.yaml")) == RunConfig()
    assert load_config(write(tmp_path, "rl:\nrun: {name: run}\n")) == RunConfig()


def test_the_run_is_named_after_its_file(tmp_path):
    cfg = load_config(write(tmp_path, DESIGN_BLOCK))
    assert cfg.run.name == "my-run"
    assert cfg.run.dir.endswith("/runs/my-run")
    assert load_config(write(tmp_path, DESIGN_BLOCK), ["run.name=other"]).run.name == "other"


def test_overrides_win_over_the_file_and_later_over_earlier(tmp_path):
    path = write(tmp_path, DESIGN_BLOCK)
    cfg = load_config(path, ["optimizer.lr=1E-4", "optimizer.lr=3e-4", "model.load_in_8bit=true", "lora={r: 8}"])
    assert (cfg.optimizer.lr, cfg.model.load_in_8bit, cfg.lora.r, cfg.lora.dropout) == (3e-4, True, 8, 0.1)
    assert load_config(path, ["model.activation_checkpointing=false"]).model.activation_checkpointing is False
    assert load_config(path, ["rollout.system_prompt=Answer: 7"]).rollout.system_prompt == "Answer: 7"
    assert load_config(path, ["rollout.stop_strings=['\\n', END]"]).rollout.stop_strings == ("\\n", "END")


def test_relative_paths_start_at_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = load_config(None, ["model.path=m.gguf", "task.source=rows.jsonl", "reward.function=grade.py:score"])
    assert cfg.model.path == str(tmp_path / "m.gguf")
    assert cfg.task.source == str(tmp_path / "rows.jsonl")
    assert cfg.reward.function == f"{tmp_path / 'grade.py'}:score"
    assert cfg.run.dir == str(tmp_path / "runs" / "run")
    cfg = load_config(None, ["task.source=made/tasks.py:rows", "task.tools=[made/tools.py:look, calculator]"])
    assert cfg.task.source == f"{tmp_path / 'made' / 'tasks.py'}:rows"
    assert cfg.task.tools == (f"{tmp_path / 'made' / 'tools.py'}:look", "calculator")
    assert load_config(None, ["task.source=reasoning_gym:gcd"]).task.source == "reasoning_gym:gcd"
    cfg = load_config(None, ["task.source=pkg.mod:rows", "reward.function=pkg.mod:score", "model.path=~/m"])
    assert (cfg.task.source, cfg.reward.function) == ("pkg.mod:rows", "pkg.mod:score")
    assert "~" not in str(cfg.model.path)


def test_the_algorithm_names_defaults_and_given_keys_win():
    def objective(*overrides):
        rl = load_config(None, list(overrides)).rl
        return rl.kl_coef, rl.clip_range, rl.clip_range_high, rl.advantage_scale, rl.aggregation

    assert objective() == (0.01, 0.2, 0.2, "std", "token_mean")
    assert objective("rl.algorithm=dapo") == (0.0, 0.2, 0.28, "std", "token_mean")
    assert objective("rl.algorithm=dr_grpo") == (0.0, 0.2, 0.2, "none", "seq_mean_token_sum_norm")
    assert objective("rl.algorithm=dapo", "rl.clip_range=0.3") == (0.0, 0.3, 0.3, "std", "token_mean")
    given_keys = ("rl.kl_coef=0.5", "rl.clip_range_high=0.25", "rl.advantage_scale=none", "rl.aggregation=token_sum")
    assert objective("rl.algorithm=dapo", *given_keys) == (0.5, 0.2, 0.25, "none", "token_sum")
    assert objective("rl.clip_range=null") == (0.01, None, None, "std", "token_mean")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("rl.clip_rnage", "rl.clip_range"),
        ("rl.lr", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("optimiser.lr", "optimizer.lr"),
        ("rl.max_sample_lag", "rl.max_sample_age"),
        ("reward.format_rule", "reward.format_rules"),
        ("optimizer.beta1", "optimizer.betas"),
        ("rl.kl_reference_every", "rl.kl_reference"),
        ("schedule.min_samples", "schedule.adaptive_samples"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path, wrong, meant):
    error = refused(f"{wrong}=1")
    assert error.key == wrong
    assert meant in str(error)
    section, _, leaf = wrong.rpartition(".")
    text = f"{section}: {{{leaf}: 1}}" if section else f"{leaf}: 1"
    assert meant.split(".")[-1] in str(refused(path=write(tmp_path, text))) or section not in meant


def test_an_unknown_key_of_a_file_is_refused(tmp_path):
    error = refused(path=write(tmp_path, "rl: {clip_rnage: 1}"))
    assert (error.key, str(error)) == (
        "rl.clip_rnage",
        "rl.clip_rnage: there is no such key; did you mean the key rl.clip_range?",
    )
    assert "did you mean the section optimizer" in str(refused(path=write(tmp_path, "optimiser: {lr: 1}")))


# Field case F05, and every other number that would break the mathematics later.
@pytest.mark.parametrize(
    "override",
    [
        "rollout.temperature=0",
        "rollout.temperature=-1",
        "rl.samples_per_prompt=1",
        "rl.clip_range=-0.1",
        "rl.clip_range=0",
        "rl.clip_range_high=-0.1",
        "optimizer.lr=-0.01",
        "optimizer.lr=0",
        "optimizer.lr=.nan",
        "optimizer.lr=.inf",
        "optimizer.max_grad_norm=0",
        "optimizer.warmup_steps=-1",
        "rl.batch_size_per_update=0",
        "rl.kl_coef=-0.1",
        "rl.max_policy_update_lag=-1",
        "rl.max_sample_age=-1",
        "rl.sync_every=0",
        "rl.micro_batch_tokens=0",
        "lora.r=0",
        "lora.alpha=0",
        "lora.dropout=1",
        "rollout.top_p=0",
        "rollout.top_k=-1",
        "rollout.max_new_tokens=0",
        "reward.timeout_s=0",
        "reward.workers=0",
        "engine.max_live_versions=1",
        "run.max_steps=0",
        "run.max_minutes=0",
        "run.keep_checkpoints=0",
        "run.seed=-1",
        "task.eval_size=0",
    ],
)
def test_a_number_out_of_range_names_key_value_and_range(override):
    key, _, given_text = override.partition("=")
    error = refused(override)
    assert error.key == key
    assert str(error).startswith(f"{key} = ")
    assert given_text.strip(".-").rstrip("0") in str(error)
    assert any(sign in str(error) for sign in (">", "<"))


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("optimizer.lr='0.00002'", "a number > 0 and <= 1"),
        ("model.load_in_8bit='False'", "true or false"),
        ("model.load_in_8bit=off", "true or false"),
        ("model.load_in_8bit=0", "true or false"),
        ("run.max_steps=1e3", "a whole number >= 1"),
        ("run.max_steps=true", "a whole number >= 1"),
        ("optimizer.lr=true", "a number > 0 and <= 1"),
        ("task.instruction=7", "text"),
        ("rl.algorithm=remax", "one of: grpo, dapo, dr_grpo"),
        ("rl.algorithm=off", "one of: grpo, dapo, dr_grpo"),
        ("lora.target_modules=q_proj", "all-linear, or a list of module names"),
        ("lora.target_modules=[]", "all-linear, or a list of module names"),
        ("lora.target_modules=[q_proj, q_proj]", "all-linear, or a list of module names"),
        ("rollout.stop_strings=['']", "a list of texts"),
        (
            "task.source=sum",
            "sums, products, sums:LARGEST, reasoning_gym:NAME, a .jsonl or .parquet file, a dataset's folder/",
        ),
        ("reward.function=grade.py", "code, tool_use, module:function, or path/file.py:function"),
        ("run.device=tpu", "cpu, cuda, or cuda:N"),
        ("run.name='../x'", "text that matches"),
        ("model.path=''", "a path, or null"),
        ("optimizer.betas=[0.9, 1]", "[beta1, beta2], both >= 0 and < 1"),
        ("task.source=sums:0", "sums:LARGEST"),
        ("rl.kl_reference=moving:0", "moving:BATCHES"),
        ("run.max_minutes=x", "a number > 0, or null"),
        ("lora=3", "it is a section"),
    ],
)
def test_a_value_of_the_wrong_kind_says_what_is_allowed(override, allowed):
    error = refused(override)
    assert error.key == override.partition("=")[0]
    assert allowed in str(error)


def test_format_rules_are_checked_entry_by_entry():
    cfg = load_config(None, ["reward.format_rules=[{pattern: '<think>', weight: 0.1}]"])
    assert cfg.reward.format_rules[0].pattern == "<think>"
    assert "entry 2, weight" in str(refused("reward.format_rules=[{pattern: a, weight: 1}, {pattern: b, weight: x}]"))
    assert "no regular expression" in str(refused("reward.format_rules=[{pattern: '(', weight: 1}]"))
    assert "entry 1, wight: no such key" in str(refused("reward.format_rules=[{pattern: a, wight: 1}]"))


def test_all_problems_are_told_at_once_and_the_first_is_the_key(tmp_path):
    error = refused(path=write(tmp_path, "optimizer: {lr: -1}\nrl: {samples_per_prompt: x, foo: 1}\nlora: 3"))
    assert error.key == "lora"
    lines = str(error).splitlines()
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        "lora",
        "optimizer.lr",
        "rl.samples_per_prompt",
        "rl.foo",
    ]


def test_a_wrong_key_does_not_blame_the_defaults_derived_from_it():
    assert str(refused("rl.max_policy_update_lag=x")).count("\n") == 0
    assert str(refused("rl.algorithm=remax")).count("\n") == 0


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "", "--lr=3"])
def test_an_override_of_the_wrong_shape_is_refused(override):
    assert "override" in str(refused(override)) or "no such key" in str(refused(override))


@pytest.mark.parametrize("text", ["- a\n", "text", "3"])
def test_a_file_without_sections_is_refused(tmp_path, text):
    assert "must hold sections" in str(refused(path=write(tmp_path, text)))


def test_long_values_are_cut_in_messages():
    assert len(str(refused(f"optimizer.lr={'x' * 5000}"))) < 300


def test_every_key_is_documented_and_described():
    keys = dict(iter_fields())
    assert 60 <= len(keys) <= 120  # the budget: what is added next takes the place of something
    assert all(info.description and info.description.strip().endswith(".") for info in keys.values())


FLOATS = st.floats(1e-12, 1, exclude_min=True)
TEXTS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=20)


@given(
    lr=FLOATS,
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    minutes=st.none() | st.floats(1e-3, 1e9),
    lag=st.integers(0, 50),
    system=st.none() | TEXTS | st.sampled_from(["on", "2e-5", "null", "1e3", "a: b", "x\ty\n\n z"]),
    stops=st.lists(
        st.text(st.characters(blacklist_categories=("Cs",)), min_size=1, max_size=5), max_size=3, unique=True
    ),
)
def test_the_resolved_text_reads_back_to_an_equal_configuration(**given_values):
    values: dict[str, typing.Any] = {
        "optimizer": {"lr": given_values["lr"], "betas": given_values["betas"]},
        "run": {"max_minutes": given_values["minutes"]},
        "rl": {"max_policy_update_lag": given_values["lag"]},
        "rollout": {"system_prompt": given_values["system"], "stop_strings": tuple(given_values["stops"])},
    }
    cfg = RunConfig.model_validate(values)
    assert build_config(parse_yaml(dump_resolved(cfg), "config.yaml")) == cfg


def test_a_directory_name_that_the_system_cannot_hold_is_an_error_of_that_key(tmp_path: Path) -> None:
    cfg = load_config(None, [f"run.dir={tmp_path / ('a' * 300)}"])
    with pytest.raises(ConfigError, match=r"run\.dir = '.{77}' cannot be used: the name is longer") as caught:
        choose_run_dir(cfg)
    assert caught.value.key == "run.dir"


def test_a_directory_under_a_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cfg = load_config(None, [f"run.dir={tmp_path / 'file' / 'deep' / 'run'}"])
    with pytest.raises(ConfigError, match=r"run\.dir = .* cannot be used: a part of the path is a file") as caught:
        choose_run_dir(cfg)
    assert caught.value.key == "run.dir"
    assert choose_run_dir(load_config(None, [f"run.dir={tmp_path / 'new' / 'run'}"])).run.dir.endswith("new/run")


@pytest.mark.parametrize("key", ["model.path", "task.source", "reward.function", "rl.kl_reference", "run.dir"])
def test_the_home_of_an_unknown_user_is_an_error_of_that_key(key):
    value = {"task.source": "~nobody-here/rows.jsonl", "reward.function": "~nobody-here/f.py:f"}.get(key)
    error = refused(f"{key}={value or '~nobody-here/x'}")
    assert error.key == key
    assert "begins with a home folder that is not known" in str(error)


def test_one_wrong_size_is_one_problem():
    """The buffer follows the batch, so that its own size is no news."""
    error = refused("rl.batch_size_per_update=3")
    assert (error.key, len(str(error).splitlines())) == ("rl.batch_size_per_update", 1)
    assert refused("rl.batch_size_per_update=16", "rl.rollout_buffer_size=20").key == "rl.rollout_buffer_size"


def test_an_unknown_key_without_a_near_one_is_told_where_all_are_listed():
    assert str(refused("lr_of_everything_else=1")) == (
        "lr_of_everything_else: there is no such key; docs/configuration.md lists them all"
    )
