"""The simulated engine beside the real one: the same requests, the same rows in every tick."""

from __future__ import annotations

import pytest
import simpy

from support.decoders import FP32, random_ids, tiny_decoder
from support.learning import Rig, request
from support.threads import one_thread
from tithe.simulator import LaneCosts
from tithe.simulator.engine import Engine, Request


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    with one_thread():
        yield tiny_decoder(tmp_path_factory.mktemp("base") / "m", "llama", FP32, tie_word_embeddings=False)


class Watched(LaneCosts):
    """Keeps what every tick was asked for."""

    def tick_s(self, *, prefill_tokens, sequences, context_tokens):
        seen.append((prefill_tokens, sequences))
        return 1.0


seen: list[tuple[int, int]] = []


class Pair:
    """Both engines under the same requests: (group, samples, prompt tokens, new tokens of each)."""

    def __init__(self, decoder, folder, on_publish, *, slots=6, prefill=16) -> None:
        seen.clear()
        self.rig = Rig(
            decoder, folder, options={"max_running": slots, "prefill_tokens": prefill, "on_publish": on_publish}
        )
        self.env = simpy.Environment()
        self.engine = Engine(Watched(), max_running=slots, prefill_tokens=prefill, on_publish=on_publish)
        self.futures, self.requests, self.ticks = [], [], []

    def publish(self, serial):
        self.name = self.rig.publish_random(serial)
        self.engine.serve(serial)

    def ask(self, group, prompt, lengths, *, binds):
        for sample, new in enumerate(lengths):
            asked = request(
                random_ids(prompt, group),
                adapter=self.name if binds else None,
                group=group,
                sample=sample,
                max_new_tokens=new,
            )
            self.futures.append(self.rig.engine.submit(asked))
            version = self.engine.served if binds else None
            self.requests.append(Request(group, sample, 0, prompt, new, version, self.env.event()))
            self.engine.submit(self.requests[-1])

    def tick(self, n=1):
        """n ticks of both; what the real one computed, drew and finished must be what the simulated one says."""
        for _ in range(n):
            before = self.rig.engine.stats()
            self.rig.tick()
            after = self.rig.engine.stats()
            self.engine.plan()
            drawn = self.engine.tokens
            self.engine.apply(1)
            real = [after[key] - before[key] for key in ("prefill_tok", "generated_tok")]
            rows = seen[-1][0]
            rebuilt = sum(rows for _, rows in self.engine._step.rebuild)
            assert real == [rows - rebuilt, self.engine.tokens - drawn]
            assert [f.done() for f in self.futures] == [r.done.triggered for r in self.requests]
            self.ticks.append(real)

    def finish(self):
        while self.engine.has_work:
            self.tick()
        assert not self.rig.engine.has_work()
        real = [set(future.result().serials[:1].tolist()) for future in self.futures]
        assert real == [{request.first_serial} for request in self.requests]


@pytest.mark.parametrize("on_publish", ["finish", "recompute", "keep"])
def test_ticks_rows_and_endings_are_those_of_the_real_engine(decoder, tmp_path, on_publish):
    binds = on_publish == "finish"
    with one_thread():
        pair = Pair(decoder, tmp_path, on_publish)
        with pair.rig:
            pair.publish(0)
            pair.ask(1, 21, [5, 9, 1], binds=binds)
            pair.ask(2, 7, [4, 12], binds=binds)
            pair.tick(3)
            pair.ask(3, 40, [6, 6, 3], binds=binds)  # more than there are slots
            pair.tick(3 if binds else 2)  # a proof computes on whatever prompt is begun; only `finish` keeps the rest
            pair.publish(1)
            pair.ask(4, 5, [8, 2], binds=binds)
            pair.tick(4)
            pair.publish(2)
            pair.finish()
    assert len(pair.ticks) > 12
    assert sum(drawn for _, drawn in pair.ticks) == 5 + 9 + 1 + 4 + 12 + 6 + 6 + 3 + 8 + 2
