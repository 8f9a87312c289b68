"""Tasks and environments: questions from data or built in, held-out ones kept apart with their twins, prompts encoded
once, the single-turn episode, and conversations with tools. An environment sees a `GenerateFn` and never an engine.
Free of torch."""

from tithe.envs.prompts import EncodedPrompts, encode_prompts
from tithe.envs.rows import instructed
from tithe.envs.single_turn import SingleTurnEnv
from tithe.envs.task import Task, TaskReport, load_task
from tithe.envs.tool_env import ToolEnv, TurnRules
from tithe.envs.tool_library import build_tools
from tithe.envs.tool_prompt import with_tools
from tithe.envs.tools import Tool, tool_from_function

__all__ = [
    "EncodedPrompts",
    "SingleTurnEnv",
    "Task",
    "TaskReport",
    "Tool",
    "ToolEnv",
    "TurnRules",
    "build_tools",
    "encode_prompts",
    "instructed",
    "load_task",
    "tool_from_function",
    "with_tools",
]
