import math

import pytest
import torch

from tithe.errors import AdapterError
from tithe.lora import LoraSpec, init_tensors, module_of, resolve_targets, tensor_names

LINEARS = [
    f"model.layers.{i}.{part}"
    for i in (0, 1)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
] + ["lm_head", "model.embed_tokens"]


def test_names_resolve_in_model_order():
    assert resolve_targets(["gate_proj", "q_proj"], LINEARS) == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.gate_proj",
    )


def test_a_target_is_a_dotted_suffix_and_never_a_part_of_a_name():
    assert resolve_targets(["layers.1.self_attn.q_proj"], LINEARS) == ("model.layers.1.self_attn.q_proj",)
    with pytest.raises(AdapterError, match="proj"):
        resolve_targets(["proj"], LINEARS)


def test_all_linear_leaves_out_head_and_embedding():
    assert resolve_targets("all-linear", LINEARS) == tuple(LINEARS[:-2])
    assert resolve_targets(("all-linear",), LINEARS) == tuple(LINEARS[:-2])


def test_unknown_name_is_an_error_with_near_names():
    with pytest.raises(AdapterError, match=r"'qproj' \(near: q_proj"):
        resolve_targets(["qproj", "up_proj"], LINEARS)


@pytest.mark.parametrize("requested", [[], ["all-linear", "q_proj"]])
def test_empty_or_mixed_requests_are_refused(requested):
    with pytest.raises(AdapterError):
        resolve_targets(requested, LINEARS)


@pytest.mark.parametrize(
    "values",
    [{"r": 0}, {"r": 2.5}, {"r": True}, {"alpha": 0}, {"alpha": math.nan}, {"dropout": 1.0}, {"target_modules": ()}],
)
def test_values_that_make_no_adapter_are_refused(values):
    with pytest.raises(AdapterError):
        LoraSpec(**{"r": 4, "alpha": 8, "target_modules": ("q_proj",), **values})


def test_patterns_follow_peft():
    from peft.utils.other import get_pattern_key

    patterns = {"layers.1.self_attn.q_proj": 2, "^model.layers.0.mlp.up_proj": 3, "gate_proj": 5, "^up_proj": 7}
    spec = LoraSpec(r=8, alpha=16, rank_pattern=patterns)
    for module in LINEARS:
        assert spec.rank(module) == patterns.get(get_pattern_key(patterns.keys(), module), 8)
    assert spec.scale("model.layers.1.self_attn.q_proj") == 8.0
    assert not spec.is_uniform


def test_tensor_names_and_back():
    for module in LINEARS:
        assert [module_of(n) for n in tensor_names(module)] == [module, module]
    assert module_of("base_model.model.model.norm.weight") is None


def test_init_is_pefts_distribution_and_depends_on_the_seed_alone():
    shapes = dict.fromkeys(LINEARS, (12, 400))
    spec = LoraSpec(r=64, alpha=16, target_modules=("q_proj", "up_proj"))
    tensors = init_tensors(spec, shapes, seed=5)
    again = init_tensors(spec, dict(reversed(shapes.items())), seed=5)
    assert len(tensors) == 8
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[n], again[n]) for n in tensors)
    assert not torch.equal(
        tensors[tensor_names(LINEARS[0])[0]], init_tensors(spec, shapes, seed=6)[tensor_names(LINEARS[0])[0]]
    )

    a_all = [t for n, t in tensors.items() if "lora_A" in n]
    assert len({t.sum().item() for t in a_all}) == len(a_all)
    for a in a_all:
        bound = 1 / math.sqrt(400)
        assert a.abs().max() <= bound
        assert a.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert all(not t.any() for n, t in tensors.items() if "lora_B" in n)


def test_init_draws_what_peft_draws_from_the_same_generator_state():
    module = "model.layers.0.self_attn.q_proj"
    ours = init_tensors(LoraSpec(4, 8, target_modules=("q_proj",)), {module: (6, 10)}, seed=3)[tensor_names(module)[0]]
    import peft

    layer = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(10, 6)})
    wrapped = peft.get_peft_model(layer, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    lora = wrapped.base_model.model["q_proj"]
    torch.manual_seed(3)
    lora.reset_lora_parameters("default", init_lora_weights=True)
    assert torch.equal(lora.lora_A["default"].weight.detach(), ours)
