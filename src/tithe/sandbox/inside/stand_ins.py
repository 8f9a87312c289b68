"""The checker's stand-ins for a program's objects.

A program's object may answer for itself, but never judge a plain value: compared with one it is unequal, and it takes
no part in arithmetic with one. Else `f(x) == 5` would ask the program whether it is right, and tell it the answer.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tithe.sandbox.inside.attempt import Attempt
from tithe.sandbox.inside.remote import Peer, StandIn

_IN_PLACE: Final[dict[type, Callable[[Any, Any], None]]] = {
    list: lambda old, new: old.__setitem__(slice(None), new),
    bytearray: lambda old, new: old.__setitem__(slice(None), new),
    set: lambda old, new: (old.clear(), old.update(new))[0],
    dict: lambda old, new: (old.clear(), old.update(new))[0],
}


class ProgramGone(BaseException):
    """The program's process has ended."""


def ask(peer: Peer, op: str, /, **fields: Any) -> Any:
    """The program's answer; raises what its code raised, in a class of this process. Arguments that it changed are
    changed here."""
    try:
        answer = peer.request(op, **fields)
    except (EOFError, OSError) as error:
        raise ProgramGone("the program's process has ended") from error
    if "raise" in answer:
        error = _exception(peer, answer)
        if isinstance(error, StopIteration) and fields.get("name") != "__next__":
            # As in generators (PEP 479): a map over the program's function would end without a word, and its test pass.
            raise RuntimeError("the program raised StopIteration")
        raise error
    given = {**{str(place): value for place, value in enumerate(fields.get("args", ()))}, **fields.get("kwargs", {})}
    for name, new in answer.get("changed", {}).items():
        old, value = given.get(name), peer.decode(new)
        if type(old) is type(value) and type(old) in _IN_PLACE:
            _IN_PLACE[type(old)](old, value)
    return peer.decode(answer.get("ok"))


def stand_in(peer: Peer, value: Mapping[str, Any]) -> Any:
    """What stands for a reference of the program's: an exception's class, or an `Object`."""
    if "exception" in value:
        return _exception_class(peer, value)
    return Object(peer, value["mine"])


def _exception(peer: Peer, answer: Mapping[str, Any]) -> BaseException:
    kind = peer.decode(answer["class"])
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise ProgramGone("the program's process answered with no answer")
    args = tuple(peer.decode(answer["args"]))
    made = Attempt(kind, *args)
    error = made.value if made.error is None else kind.__new__(kind)
    error.args = args
    return error


def _exception_class(peer: Peer, value: Mapping[str, Any]) -> type[BaseException]:
    bases = [getattr(builtins, str(name), None) for name in value.get("bases", ())]
    kinds = [base for base in bases if isinstance(base, type) and issubclass(base, BaseException)]
    nearest = kinds[0] if kinds else Exception
    if nearest.__name__ == value["exception"]:
        return nearest
    classes: dict[Any, type[BaseException]] = peer.__dict__.setdefault("exception_classes", {})
    number = value.get("mine")
    if number not in classes:
        made: Any = type(str(value["exception"]), (nearest,), {})
        classes[number] = made
    return classes[number]


def _method(name: str) -> Callable[..., Any]:
    def method(self: Object, *args: Any) -> Any:
        return _ask(self, "method", name=name, args=list(args))

    return method


def _between_objects(name: str) -> Callable[[Any, object], Any]:
    def method(self: Object, other: object) -> Any:
        if not isinstance(other, Object):
            return NotImplemented
        return _ask(self, "method", name=name, args=[other])

    return method


def _ask(of: Object, op: str, **fields: Any) -> Any:
    return ask(object.__getattribute__(of, "_peer"), op, of=of, **fields)


class Object(StandIn):
    """A program's function, class or instance."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def number_of(self) -> int:
        """The program's number for it."""
        return object.__getattribute__(self, "_number")

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "attribute", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "assign", name=name, value=value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it in the program's process."""
        return _ask(self, "call", args=list(args), kwargs=kwargs)

    def __iter__(self) -> Iterator[Any]:
        iterator = _ask(self, "method", name="__iter__", args=[])
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    def __contains__(self, value: object) -> bool:
        return any(item == value for item in self)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Object)
            and (self.number_of() == other.number_of() or _ask(self, "method", name="__eq__", args=[other]) is True)
        )

    def __hash__(self) -> int:
        return hash(Object.number_of(self))

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Object) and _ask(self, "is_instance", value=value) is True

    def __bool__(self) -> bool:
        try:
            return _ask(self, "method", name="__bool__", args=[]) is True
        except AttributeError:
            return True

    def __len__(self) -> int:
        try:
            return _ask(self, "method", name="__len__", args=[])
        except AttributeError as error:  # `list` asks everything for its length, and expects a TypeError
            raise TypeError(str(error)) from error

    __next__ = _method("__next__")
    __str__ = _method("__str__")
    __repr__ = _method("__repr__")
    __getitem__ = _method("__getitem__")
    __setitem__ = _method("__setitem__")
    __delitem__ = _method("__delitem__")
    __enter__ = _method("__enter__")
    __neg__ = _method("__neg__")
    __lt__ = _between_objects("__lt__")
    __le__ = _between_objects("__le__")
    __gt__ = _between_objects("__gt__")
    __ge__ = _between_objects("__ge__")
    __add__ = _between_objects("__add__")
    __sub__ = _between_objects("__sub__")
    __mul__ = _between_objects("__mul__")

    def __exit__(self, *_: object) -> None:
        _ask(self, "method", name="__exit__", args=[None, None, None])
