"""Two processes that call each other's functions: a program serves its module, a checker holds stand-ins for what is
not a plain value. Nothing of the checker's is reachable from the program but the callables it passes as arguments.

    checker ── {"op": …} ──▶ program      consumes: requests of the other side
            ◀─ {"ok"} or {"raise"} ──     produces: one answer to each; before it, requests of its own (callbacks)
                                          waits for: the answer to its own request, serving the other side meanwhile

A value crosses as in `wire`; anything else as a reference: `mine` to the sender, `yours` to the receiver.
"""

from __future__ import annotations

import builtins
import socket
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

from tithe.sandbox.inside import wire
from tithe.sandbox.inside.attempt import Attempt

_IN_PLACE: Final = (list, dict, set, bytearray)


class Peer:
    """One end of a connection. `operations` are what the other side may ask for, `stand_in` makes what stands for one
    of its objects, `gives` says which of this side's it may have a reference to."""

    def __init__(
        self,
        descriptor: int,
        operations: Mapping[str, Callable[..., Any]],
        stand_in: Callable[..., Any],
        gives: Callable[[Any], bool] = lambda _: True,
    ) -> None:
        self._gives = gives
        self._connection = socket.socket(fileno=descriptor)
        self._operations = operations
        self._stand_in = stand_in
        self._given: list[Any] = []
        self._numbers: dict[int, int] = {}

    def owned(self, number: Any) -> Any:
        """What this side gave away under a number."""
        if not isinstance(number, int) or not 0 <= number < len(self._given):
            raise ValueError(f"no object {number!r:.40}")
        return self._given[number]

    def request(self, op: str, /, **fields: Any) -> Any:
        """Ask the other side and wait; raises what it raised, `EOFError` when it is gone. Values are encoded here."""
        self.send({"op": op, **{name: self.encode(value) for name, value in fields.items()}})
        while True:
            message = wire.receive(self._connection)
            if "op" not in message:
                return message
            self._serve(message)

    def serve(self) -> None:
        """Answer until the other side is gone."""
        while True:
            try:
                message = wire.receive(self._connection)
            except (EOFError, OSError):
                return
            self._serve(message)

    def send(self, message: Mapping[str, Any]) -> None:
        """One message, already encoded."""
        wire.send(self._connection, message)

    def encode(self, value: Any) -> Any:
        """For the other side."""
        return wire.encode(value, self._reference)

    def decode(self, value: Any) -> Any:
        """From the other side."""
        return wire.decode(value, self._resolve)

    def _reference(self, value: Any) -> dict[str, Any]:
        if issubclass(type(value), StandIn):
            return {"yours": type(value).number_of(value)}
        if not self._gives(value):
            raise wire.NotPlainError(f"a {type(value).__name__} cannot be passed to another process")
        known = self._numbers.get(id(value))
        if known is None:
            known = len(self._given)
            self._given.append(value)  # kept alive, so that the id stays its own
            self._numbers[id(value)] = known
        return {"mine": known, **_description(value)}

    def _resolve(self, value: Mapping[str, Any]) -> Any:
        if "yours" in value:
            return self.owned(value["yours"])
        if "mine" in value:
            return self._stand_in(self, value)
        raise ValueError("an unknown kind of value")

    def _serve(self, message: Mapping[str, Any]) -> None:
        attempt = Attempt(self._answer, message)
        if attempt.error is None:
            self.send(attempt.value)
        else:
            error = attempt.error
            plain = Attempt(wire.encode, list(error.args))
            self.send(
                {
                    "raise": _description(type(error)),
                    "class": self.encode(type(error)),
                    "args": plain.value if plain.error is None else [attempt.text()],
                }
            )

    def _answer(self, message: Mapping[str, Any]) -> dict[str, Any]:
        operation = self._operations[message["op"]]
        fields = {name: self.decode(value) for name, value in message.items() if name != "op"}
        before = {name: self.encode(value) for name, value in _changeable(fields).items()}
        answer = self.encode(operation(self, **fields))
        after = {name: self.encode(value) for name, value in _changeable(fields).items()}
        return {"ok": answer, "changed": {name: after[name] for name in before if after[name] != before[name]}}


class StandIn:
    """Base of what stands for an object of the other side."""

    def number_of(self) -> int:
        """The other side's number for it."""
        raise NotImplementedError


def _changeable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a callee can change in place: `args` by number, `kwargs` by name."""
    args = {str(place): value for place, value in enumerate(fields.get("args", ()))}
    return {name: value for name, value in {**args, **fields.get("kwargs", {})}.items() if isinstance(value, _IN_PLACE)}


def _description(value: Any) -> dict[str, Any]:
    """What the other side needs to know to make a stand-in: for an exception's class its name and built-in bases."""
    if isinstance(value, type) and issubclass(value, BaseException):
        bases = [base.__name__ for base in value.__mro__ if base.__module__ == "builtins"]
        return {"exception": value.__name__, "bases": bases}
    return {"class_name": value.__name__ if isinstance(value, type) else type(value).__name__}


# ---------------------------------------------------------------------------------------------- the program's side


def serve(module: types.ModuleType, descriptor: int) -> None:
    """Let the other side use a module until it hangs up."""

    def names(_: Peer) -> dict[str, Any]:
        """What the module defines for others, modules left out."""
        return {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and not isinstance(value, types.ModuleType)
        }

    operations: dict[str, Callable[..., Any]] = {
        "names": names,
        "global": lambda _, name: getattr(module, name),
        "attribute": lambda _, of, name: getattr(of, name),
        "assign": lambda _, of, name, value: setattr(of, name, value),
        "call": lambda _, of, args, kwargs: of(*args, **kwargs),
        "method": lambda _, of, name, args: getattr(of, name)(*args),
        "is_instance": lambda _, of, value: isinstance(value, of),
    }
    Peer(descriptor, operations, Callback).serve()


class Callback(StandIn):
    """A function of the checker's, as the program sees it: it can be called."""

    def __init__(self, peer: Peer, value: Mapping[str, Any]) -> None:
        self._peer, self._number = peer, value["mine"]

    def number_of(self) -> int:
        """The checker's number for it."""
        return self._number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it in the checker's process."""
        answer = self._peer.request("call", of=self, args=list(args), kwargs=kwargs)
        if "raise" not in answer:
            return self._peer.decode(answer["ok"])
        bases = [getattr(builtins, name, None) for name in answer["raise"].get("bases", ())]
        kind = next((base for base in bases if isinstance(base, type)), RuntimeError)
        raise kind(*self._peer.decode(answer["args"]))
