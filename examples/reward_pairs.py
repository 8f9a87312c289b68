r"""Pairs of replies for `tithe reward-model`, the questions of a run that it pays, and what that run was worth.

python examples/reward_pairs.py > pairs.jsonl
tithe reward-model pairs.jsonl --out models/judge --batch 8 --epochs 1 --held-out 0.25 optimizer.lr=3e-4 \
    optimizer.lr_scheduler=linear optimizer.warmup_steps=5 "rollout.system_prompt=Answer with one word."
tithe train examples/reward_model.yaml
python examples/reward_pairs.py runs/liked

A question names a kind of thing; preferred is a word of that kind over a word of another. Every word is preferred as
often as it is rejected, so neither the words by themselves nor their lengths tell anything, all begin with a capital,
and kinds are held out whole: ranking those right takes what the base knows of words.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tithe.envs.rows import Columns, read_objects
from tithe.pool import PoolReader
from tithe.types import PromptItem

KINDS = {
    "a fruit": "apple banana cherry grape lemon lime mango melon orange peach pear pineapple plum strawberry",
    "a vegetable": "broccoli cabbage carrot cauliflower celery cucumber lettuce onion potato pumpkin spinach tomato",
    "a farm animal": "chicken cow donkey duck goat goose hen horse pig rooster sheep turkey",
    "a wild animal": "bear deer elephant fox giraffe kangaroo leopard lion monkey rabbit tiger wolf zebra",
    "an insect": "ant bee beetle butterfly cricket dragonfly fly grasshopper ladybug mosquito moth wasp",
    "a fish": "carp cod eel herring salmon sardine shark trout tuna",
    "a bird": "crow eagle falcon hawk owl parrot pelican penguin pigeon raven robin sparrow swan",
    "a tree": "ash birch cedar elm fir maple oak palm pine spruce willow",
    "a flower": "daffodil daisy dandelion lily marigold orchid peony rose sunflower tulip violet",
    "a color": "black blue brown gray green pink purple red white yellow",
    "a shape": "circle cube hexagon oval pentagon pyramid rectangle sphere square triangle",
    "a metal": "aluminum brass bronze copper gold iron lead nickel silver steel tin titanium zinc",
    "a planet": "earth jupiter mars neptune saturn uranus venus",
    "a gem": "amethyst diamond emerald jade opal pearl ruby sapphire topaz",
    "a country": "Brazil Canada China Egypt France Germany India Italy Japan Kenya Mexico Spain Sweden",
    "a city": "Amsterdam Berlin Chicago London Madrid Moscow Paris Rome Seattle Sydney Tokyo Toronto Vienna",
    "a language": "Arabic Chinese Dutch English French German Greek Hindi Italian Japanese Korean Russian Spanish",
    "a month": "January February March April May June July August September October November December",
    "a day of the week": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "a season": "autumn fall spring summer winter",
    "a number": "one two three four five six seven eight nine ten eleven twelve",
    "a relative": "aunt brother cousin daughter father grandmother mother nephew niece sister son uncle",
    "a part of the body": "arm ear elbow eye finger foot hand head knee leg mouth neck nose shoulder toe",
    "a piece of clothing": "coat dress glove hat jacket pants scarf shirt shoe skirt sock sweater",
    "a tool": "axe chisel drill hammer pliers saw screwdriver shovel wrench",
    "a vehicle": "bicycle boat bus car helicopter motorcycle plane ship train truck van",
    "a musical instrument": "cello clarinet drum flute guitar harp piano saxophone trombone trumpet violin",
    "a sport": "baseball basketball boxing football golf hockey rugby skiing soccer swimming tennis volleyball",
    "a drink": "beer coffee cider juice lemonade milk soda tea water wine",
    "a piece of furniture": "armchair bed bookcase bench cabinet chair couch desk sofa stool table wardrobe",
    "a profession": "baker carpenter chef dentist doctor engineer farmer lawyer nurse plumber teacher",
    "a room of a house": "attic basement bathroom bedroom garage hallway kitchen pantry",
    "a kind of weather": "cloudy fog hail rain snow storm sunny thunder wind",
    "a spice": "basil cinnamon cloves cumin ginger nutmeg oregano paprika pepper saffron thyme turmeric",
}
"""What is asked for, and words that answer. No word answers twice."""

SHOWN = {"a toy": "Ball", "a dessert": "Cake", "a building": "Church"}
"""Kinds that every question begins with, each with a word."""

ROUNDS = 1


def main() -> None:
    """The pairs, one JSON object a line on standard output, the same ones every time; of a run's directory, how many
    replies of each batch name what was asked for."""
    if len(sys.argv) > 1:
        for batch, share in sorted(named_by_batch(Path(sys.argv[1])).items()):
            print(f"batch {batch:>3}: {share:.1%} of the replies are a word of the kind that was asked for")
        return
    for pair in pairs():
        print(json.dumps(pair))


def question(kind: str) -> list[dict[str, str]]:
    """A chat that asks for a thing of a kind, and shows first that one word is wanted."""
    said = [(f"Name {shown}.", word) for shown, word in SHOWN.items()]
    asked = [[{"role": "user", "content": ask}, {"role": "assistant", "content": word}] for ask, word in said]
    return [*chain.from_iterable(asked), {"role": "user", "content": f"Name {kind}."}]


def pairs() -> Iterator[dict[str, Any]]:
    """In each round every word is preferred once and rejected once, by a word of another kind."""
    draw = random.Random(0)
    chosen = [(kind, word) for kind, words in KINDS.items() for word in words.split()]
    for _ in range(ROUNDS):
        rejected = draw.sample(chosen, len(chosen))
        while same := [at for at, (kind, _) in enumerate(chosen) if kind == rejected[at][0]]:
            for at in same:
                other = draw.randrange(len(chosen))
                rejected[at], rejected[other] = rejected[other], rejected[at]
        for (kind, word), (_, wrong) in zip(chosen, rejected, strict=True):
            yield {"prompt": question(kind), "chosen": word.capitalize(), "rejected": wrong.capitalize()}


def questions() -> list[dict[str, Any]]:
    """The rows of the run: `task.source: examples/reward_pairs.py:questions`."""
    return [{"prompt": question(kind), "answer": words} for kind, words in KINDS.items()]


def one_word(item: PromptItem, text: str) -> float:
    """The run's rule, without which the policy finds out that the judge, which has seen single words alone, likes every
    sentence that repeats the kind."""
    del item
    return float(re.fullmatch(r"\s*[A-Za-z]+\W*", text) is not None)


def named_by_batch(run_dir: Path) -> dict[int, float]:
    """Batch → share of its replies that are one of the words, whatever their case and punctuation."""
    items = read_objects(questions(), Columns(), "questions").items
    words = {item.id: (item.answer or "").lower().split() for item in items}
    found: defaultdict[int, list[bool]] = defaultdict(list)
    with PoolReader(run_dir / "pool.sqlite") as pool:
        rows = pool.query("SELECT batch_serial, prompt_id, text FROM rollouts WHERE state = 'trained'")
    for row in rows:
        found[row["batch_serial"]].append(re.sub(r"\W+", " ", row["text"].lower()).strip() in words[row["prompt_id"]])
    return {batch: sum(right) / len(right) for batch, right in found.items()}


if __name__ == "__main__":
    main()
