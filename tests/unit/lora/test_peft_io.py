import copy
import json
import os
import subprocess
import sys
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tithe.errors import AdapterError, UserError
from tithe.lora import LoraSpec, init_tensors, load_adapter, resolve_targets, save_adapter, tensor_names

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def shapes(llama):
    return {n: tuple(m.weight.shape) for n, m in llama.named_modules() if isinstance(m, torch.nn.Linear)}


def trained(spec, shapes, seed=1):
    """An adapter as training leaves it: B is not zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = init_tensors(spec, shapes, seed)
    return {n: torch.randn(t.shape, generator=generator) for n, t in tensors.items()}


def delta(tensors, spec, module):
    a, b = (tensors[n] for n in tensor_names(module))
    return spec.scale(module) * (b @ a)


def rewrite(directory, tensors=None, **config):
    """Change an adapter on disk: other tensors, or settings (`None` removes the key)."""
    path = directory / "adapter_config.json"
    settings = {**json.loads(path.read_text()), **config}
    path.write_text(json.dumps({k: v for k, v in settings.items() if k not in config or v is not None}))
    if tensors is not None:
        save_file(tensors, directory / "adapter_model.safetensors")


SPECS = [
    LoraSpec(r=4, alpha=16, target_modules=("q_proj", "down_proj")),
    LoraSpec(r=4, alpha=6.5, dropout=0.1, target_modules=("all-linear",), use_rslora=True),
    LoraSpec(
        r=4,
        alpha=16,
        target_modules=("q_proj", "v_proj", "up_proj"),
        rank_pattern={"up_proj": 2, "^model.layers.1.self_attn.q_proj": 6},
        alpha_pattern={"layers.0.self_attn.v_proj": 3},
    ),
]


@pytest.mark.parametrize("spec", SPECS)
def test_peft_reads_what_we_write(tmp_path, llama, shapes, spec):
    tensors = trained(spec, shapes)
    save_adapter(tmp_path / "a", tensors, spec)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT warns about missing and unexpected keys
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        model = peft.PeftModel.from_pretrained(copy.deepcopy(llama), tmp_path / "a")
    adapted = resolve_targets(spec.target_modules, shapes)
    for module in shapes:
        layer = model.base_model.model.get_submodule(module)
        assert hasattr(layer, "get_delta_weight") == (module in adapted)
        if module in adapted:
            torch.testing.assert_close(layer.get_delta_weight("default"), delta(tensors, spec, module))


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        ({"target_modules": ["q_proj", "o_proj"]}, {"target_modules": ("o_proj", "q_proj")}),
        ({"target_modules": ["q_proj"], "use_rslora": True}, {"use_rslora": True}),
        ({"target_modules": "all-linear", "lora_dropout": 0.05}, {"dropout": 0.05}),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, {"target_modules": (Q0.replace("0", "1"),)}),
        ({"target_modules": r".*layers\.0\.self_attn\.q_proj"}, {"target_modules": (Q0,)}),
        ({"target_modules": ["q_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 2}}, {}),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"layers.0.self_attn.q_proj": 5}}, {}),
    ],
)
def test_we_read_what_peft_writes(tmp_path, llama, shapes, lora, expected):
    model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(r=4, lora_alpha=16, **lora))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(tmp_path / "a")

    tensors, spec = load_adapter(tmp_path / "a", shapes)
    assert spec.r == 4
    assert {k: getattr(spec, k) for k in expected} == expected
    compared = 0
    for module in shapes:
        layer = model.base_model.model.get_submodule(module)
        if hasattr(layer, "get_delta_weight"):
            torch.testing.assert_close(delta(tensors, spec, module), layer.get_delta_weight("default"))
            compared += 1
    assert 2 * compared == len(tensors) > 0


def test_a_round_trip_keeps_every_bit(tmp_path, shapes):
    for i, spec in enumerate(SPECS):
        tensors = trained(spec, shapes)
        save_adapter(tmp_path / str(i), tensors, spec)
        back, spec_back = load_adapter(tmp_path / str(i), shapes)
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[n], tensors[n]) for n in tensors)
        assert all(spec_back.scale(m) == spec.scale(m) for m in resolve_targets(spec.target_modules, shapes))


@pytest.mark.parametrize(
    ("rslora", "expected"), [(False, [[8.0, 24.0], [-4.0, -12.0]]), (True, [[16.0, 48.0], [-8.0, -24.0]])]
)
def test_scale_is_stored_and_both_readers_agree(tmp_path, rslora, expected):
    """Case D09: r 4, alpha 16."""
    module = "model.layers.0.self_attn.q_proj"
    a, b = torch.zeros(4, 2), torch.zeros(2, 4)
    a[0], b[:, 0] = torch.tensor([1.0, 3.0]), torch.tensor([2.0, -1.0])
    spec = LoraSpec(r=4, alpha=16, target_modules=("q_proj",), use_rslora=rslora)
    save_adapter(tmp_path / "a", dict(zip(tensor_names(module), (a, b), strict=True)), spec)
    tensors, loaded = load_adapter(tmp_path / "a", {module: (2, 2)})
    assert delta(tensors, loaded, module).tolist() == expected

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.ModuleDict(
                {"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"self_attn": torch.nn.ModuleDict()})])}
            )
            self.model["layers"][0]["self_attn"]["q_proj"] = torch.nn.Linear(2, 2, bias=False)

    config = peft.LoraConfig.from_pretrained(tmp_path / "a")
    config.task_type = None
    wrapped = peft.get_peft_model(Tiny(), config)
    peft.set_peft_model_state_dict(wrapped, load_file(tmp_path / "a" / "adapter_model.safetensors"))
    layer = wrapped.base_model.model.get_submodule(module)
    assert layer.get_delta_weight("default").tolist() == expected


@pytest.mark.parametrize("missing", ["r", "lora_alpha"])
def test_rank_and_alpha_are_never_guessed(tmp_path, shapes, missing):
    save_adapter(tmp_path, trained(SPECS[0], shapes), SPECS[0])
    rewrite(tmp_path, **{missing: None})
    with pytest.raises(AdapterError, match=f"{missing} is missing"):
        load_adapter(tmp_path)


def test_a_rank_that_is_not_the_tensors_rank_is_refused(tmp_path, shapes):
    save_adapter(tmp_path, trained(SPECS[0], shapes), SPECS[0])
    rewrite(tmp_path, r=8)
    with pytest.raises(AdapterError, match="is 8 in the configuration, but A has shape"):
        load_adapter(tmp_path)


def test_names_with_one_prefix_too_many_match_nothing(tmp_path, shapes):
    """Case D03."""
    spec = SPECS[0]
    save_adapter(tmp_path, trained(spec, shapes), spec)
    twice = {"base_model.model." + n: t for n, t in load_file(tmp_path / "adapter_model.safetensors").items()}
    rewrite(tmp_path, tensors=twice)
    with pytest.raises(AdapterError, match=r"0 of 4 modules.*base_model\.model\.base_model\.model\.model\.layers"):
        load_adapter(tmp_path, shapes)


def test_one_unknown_module_is_named(tmp_path, shapes):
    """Case D03."""
    spec = LoraSpec(4, 8, target_modules=("q_proj", "w_pack"))
    stranger = "model.layers.0.self_attn.w_pack"
    save_adapter(tmp_path, trained(spec, {**shapes, stranger: (4, 4)}), spec)
    with pytest.raises(AdapterError, match=rf"2 of 3 modules match.*{stranger}"):
        load_adapter(tmp_path, shapes)


def test_a_targeted_module_without_tensors_is_named(tmp_path, shapes):
    spec = LoraSpec(4, 8, target_modules=("q_proj",))
    save_adapter(tmp_path, trained(spec, {Q0: shapes[Q0]}), spec)
    with pytest.raises(AdapterError, match=r"targeted modules without tensors: model\.layers\.1\.self_attn\.q_proj"):
        load_adapter(tmp_path, shapes)


def test_another_models_shapes_are_refused(tmp_path, shapes):
    save_adapter(tmp_path, trained(SPECS[0], shapes), SPECS[0])
    with pytest.raises(AdapterError, match="this model needs"):
        load_adapter(tmp_path, {**shapes, Q0: (16, 32)})


def test_an_empty_or_half_adapter_is_never_loaded(tmp_path, shapes):
    tensors = trained(SPECS[0], shapes)
    save_adapter(tmp_path, tensors, SPECS[0])
    name_b = tensor_names(Q0)[1]
    rewrite(tmp_path, tensors={n: t for n, t in tensors.items() if n != name_b})
    with pytest.raises(AdapterError, match=rf"missing tensors: {name_b}"):
        load_adapter(tmp_path)
    rewrite(tmp_path, tensors={})
    with pytest.raises(AdapterError, match="no adapter tensor"):
        load_adapter(tmp_path)


def test_one_nan_in_the_last_layer_is_refused_both_ways(tmp_path, shapes):
    """Case D23."""
    tensors = trained(SPECS[0], shapes)
    save_adapter(tmp_path / "good", tensors, SPECS[0])
    last = max(tensors)
    broken = {**tensors, last: tensors[last].clone()}
    broken[last].view(-1)[-1] = float("nan")
    with pytest.raises(AdapterError, match=rf"NaN or infinity in {last}"):
        save_adapter(tmp_path / "bad", broken, SPECS[0])
    assert not (tmp_path / "bad").exists()
    rewrite(tmp_path / "good", tensors=broken)
    with pytest.raises(AdapterError, match=rf"NaN or infinity in {last}"):
        load_adapter(tmp_path / "good")


@pytest.mark.parametrize(
    "setting",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"fan_in_fan_out": True},
        {"trainable_token_indices": [3]},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"some_future_feature": 0.5},
        {"target_modules": []},
        {"target_modules": ["q_proj", "k_proj", "down_proj"]},
        {"target_modules": ["q_proj"]},
        {"rank_pattern": {"q_pro.*": 4}},
        {"r": 4.5},
        {"r": True},
        {"lora_alpha": "16"},
        {"lora_alpha": float("nan")},
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, shapes, setting):
    """Case D11 and its kind."""
    save_adapter(tmp_path, trained(SPECS[0], shapes), SPECS[0])
    rewrite(tmp_path, **setting)
    (name,) = setting
    with pytest.raises(AdapterError, match=name):
        load_adapter(tmp_path, shapes)


def test_a_fully_trained_module_among_the_tensors_is_refused(tmp_path, shapes):
    """Case D11: only adapter tensors can be published, so nothing else may be trained."""
    tensors = {**trained(SPECS[0], shapes), "base_model.model.model.norm.weight": torch.ones(16)}
    with pytest.raises(AdapterError, match=r"not LoRA matrices of linears: base_model\.model\.model\.norm\.weight"):
        save_adapter(tmp_path / "a", tensors, SPECS[0])
    assert list(tmp_path.iterdir()) == []


def test_pickles_and_damaged_files_are_refused(tmp_path, shapes):
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        load_adapter(tmp_path)
    save_adapter(tmp_path / "a", trained(SPECS[0], shapes), SPECS[0])
    path = tmp_path / "a" / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(AdapterError, match="not a complete safetensors file"):
        load_adapter(tmp_path / "a")
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle"):
        load_adapter(tmp_path / "a")


def test_bf16_adapters_are_read_exactly(tmp_path, shapes):
    tensors = {n: t.bfloat16() for n, t in trained(SPECS[0], shapes).items()}
    save_adapter(tmp_path, {n: t.float() for n, t in tensors.items()}, SPECS[0])
    rewrite(tmp_path, tensors=tensors)
    back, _ = load_adapter(tmp_path, shapes)
    assert all(t.dtype == torch.float32 and torch.equal(t, tensors[n].float()) for n, t in back.items())


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path, shapes):
    for seed in (1, 2):
        save_adapter(tmp_path / "a", trained(SPECS[0], shapes, seed), SPECS[0])
    back, _ = load_adapter(tmp_path / "a")
    assert all(torch.equal(back[n], t) for n, t in trained(SPECS[0], shapes, 2).items())
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_a_clear_error_and_leaves_the_old_adapter(tmp_path, shapes):
    save_adapter(tmp_path / "a", trained(SPECS[0], shapes), SPECS[0])
    script = (
        "import resource, sys, torch\n"
        "from pathlib import Path\n"
        "from tithe.errors import UserError\n"
        "from tithe.lora import LoraSpec, init_tensors, save_adapter\n"
        "spec = LoraSpec(4, 8, target_modules=('q_proj',))\n"
        "tensors = init_tensors(spec, {'q_proj': (5000, 5000)}, 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))\n"
        "try: save_adapter(Path(sys.argv[1]), tensors, spec)\n"
        "except UserError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert "the file is larger than the system allows" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert len(load_adapter(tmp_path / "a")[0]) == 8


def test_a_path_that_is_a_file_is_a_user_error(tmp_path, shapes):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the adapter"):
        save_adapter(tmp_path / "file" / "a", trained(SPECS[0], shapes), SPECS[0])
