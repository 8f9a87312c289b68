"""Tasks and environments: questions from data or built in, held-out ones kept apart with their twins, prompts encoded
once, and the single-turn episode. An environment sees a `GenerateFn` and never an engine. Free of torch."""

from tithe.envs.prompts import EncodedPrompts, encode_prompts
from tithe.envs.single_turn import SingleTurnEnv
from tithe.envs.task import Task, TaskReport, load_task

__all__ = ["EncodedPrompts", "SingleTurnEnv", "Task", "TaskReport", "encode_prompts", "load_task"]
