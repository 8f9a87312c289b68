"""The frozen base in memory and everything that computes on it: loading, forward, heads, training passes, pages,
the lane."""

from tithe.models.adamw import AdamW, clip
from tithe.models.autotune import Tuning, choose
from tithe.models.decoder import Decoder, ModelAdapter
from tithe.models.expert_adapter import share_outer, split_experts, stack_experts
from tithe.models.expert_parallel import IdlePass, on_ranks, serve
from tithe.models.forward import ForwardPlan, Segment
from tithe.models.head import CHUNK_ROWS, Drawn, Draws, Head, ScoredRows, score_with_gradient
from tithe.models.kv import PAGE, KVPages, PageAllocator
from tithe.models.lane import Lane, Ticker
from tithe.models.layout import PageLayout, page_layout
from tithe.models.loader import load_model
from tithe.models.options import ModelOptions
from tithe.models.orders import Orders, Stop
from tithe.models.passes import Passes
from tithe.models.ranks import ALONE, Agreed, Ranks
from tithe.models.routing import check_replay
from tithe.models.train_adapter import AdapterGradients, TrainAdapter
from tithe.models.training import Capacity, TrainPass, norm_backward
from tithe.models.value_head import new_value_head, score_values

__all__ = [
    "ALONE",
    "CHUNK_ROWS",
    "PAGE",
    "AdamW",
    "AdapterGradients",
    "Agreed",
    "Capacity",
    "Decoder",
    "Drawn",
    "Draws",
    "ForwardPlan",
    "Head",
    "IdlePass",
    "KVPages",
    "Lane",
    "ModelAdapter",
    "ModelOptions",
    "Orders",
    "PageAllocator",
    "PageLayout",
    "Passes",
    "Ranks",
    "ScoredRows",
    "Segment",
    "Stop",
    "Ticker",
    "TrainAdapter",
    "TrainPass",
    "Tuning",
    "check_replay",
    "choose",
    "clip",
    "load_model",
    "new_value_head",
    "norm_backward",
    "on_ranks",
    "page_layout",
    "score_values",
    "score_with_gradient",
    "serve",
    "share_outer",
    "split_experts",
    "stack_experts",
]
