"""Classes of this module do what those of the standard library do."""

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, replace
from typing import Any, ClassVar

import pytest

from contract import lazy_dataclass

Define = Callable[..., Any]
DEFINE = pytest.mark.parametrize(
    "dataclass", [dataclasses.dataclass, lazy_dataclass.dataclass], ids=["library", "deferred"]
)


def point(dataclass: Define, **how: Any) -> Any:
    """A class with fields of every kind."""

    @dataclass(**how)
    class Point:
        COUNT: ClassVar[int] = 3
        x: int
        y: float = 2.5
        names: list[str] = field(default_factory=list)
        quiet: int = field(default=7, repr=False, compare=False)
        made: int = field(init=False, default=9)
        last: int = field(default=1, kw_only=True)

    return Point


@lazy_dataclass.dataclass(frozen=True, slots=True)
class Kept:
    """Of a module, as pickles need it."""

    a: int
    b: tuple[int, ...] = ()


@lazy_dataclass.dataclass(slots=True, eq=False)
class Open:
    """May be changed."""

    a: int


@DEFINE
@pytest.mark.parametrize("how", [{}, {"slots": True}, {"frozen": True, "slots": True}])
def test_fields_and_defaults(dataclass, how):
    """In order, by name, from factories, and without a parameter."""
    kind = point(dataclass, **how)
    one, other = kind(1), kind(1, 2.5, ["a"], quiet=8, last=4)
    assert (one.x, one.y, one.names, one.quiet, one.made, one.last) == (1, 2.5, [], 7, 9, 1)
    assert (other.names, other.quiet, other.last) == (["a"], 8, 4)
    assert kind(1).names is not one.names
    assert asdict(one) == {"x": 1, "y": 2.5, "names": [], "quiet": 7, "made": 9, "last": 1}
    assert kind.__match_args__ == ("x", "y", "names", "quiet")
    assert replace(one, x=5).x == 5
    assert hasattr(one, "__dict__") is not bool(how.get("slots"))


@DEFINE
def test_wrong_arguments_are_refused(dataclass):
    """In the same words, before and after the first object was made."""
    kind = point(dataclass)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"__init__\(\) missing 1 required .*: 'x'"):
            kind()
        with pytest.raises(TypeError, match="unexpected keyword argument 'made'"):
            kind(1, made=3)
        with pytest.raises(TypeError, match=r"positional arguments? but"):
            kind(1, 2.0, [], 7, 9)


@DEFINE
@pytest.mark.parametrize("objects", [0, 1, 100])
def test_objects_are_the_same_however_many_were_made(dataclass, objects):
    """A factory is called once for each object, what comes after the fields once, and wrong
    arguments call neither."""
    calls: list[str] = []

    @dataclass(frozen=True, slots=True)
    class Counted:
        name: str
        number: int = field(default_factory=lambda: calls.append("factory") or 7)
        last: int = field(default=1, kw_only=True)
        made: int = field(init=False, default_factory=lambda: 3)

        def __post_init__(self) -> None:
            calls.append(self.name)

    for _ in range(objects):
        Counted("other", 1)
    calls.clear()
    assert repr(Counted("a")).endswith("Counted(name='a', number=7, last=1, made=3)")
    assert Counted("b", last=2, number=5) == Counted("b", 5, last=2)
    assert calls == ["factory", "a", "b", "b"]
    for wrong in (lambda: Counted(), lambda: Counted("a", name="b"), lambda: Counted("a", more=1)):
        with pytest.raises(TypeError, match=r"__init__\(\)"):
            wrong()
    assert len(calls) == 4


@DEFINE
def test_fields_are_found_and_checked(dataclass):
    """Defaults are attributes of a class without slots; what is no field is refused."""
    kind = point(dataclass)
    assert (kind.y, kind.COUNT, hasattr(kind, "names")) == (2.5, 3, False)
    assert [one.name for one in dataclasses.fields(kind)] == [
        *"xy", "names", "quiet", "made", "last",
    ]  # fmt: skip
    annotated = {"a": "list[int]"}
    for members, words in (
        ({"__annotations__": annotated, "a": []}, "mutable default"),
        ({"__annotations__": annotated, "b": field(default=1)}, "no type annotation"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            dataclass(type("Wrong", (), dict(members)))
    slotted = type("Wrong", (), {"__annotations__": {"a": "int"}, "__slots__": ("b",)})
    with pytest.raises(TypeError, match="already specifies __slots__"):
        dataclass(slots=True)(slotted)


@DEFINE
def test_a_default_is_followed_by_defaults(dataclass):
    """Refused at the definition."""
    wrong = type("Wrong", (), {"__annotations__": {"a": "int", "b": "int"}, "a": 1})
    with pytest.raises(TypeError, match="non-default argument 'b' follows default argument"):
        dataclass(wrong)


@DEFINE
def test_equality_and_words(dataclass):
    """Of one class, by what is compared; a representation that meets itself ends."""
    kind = point(dataclass)
    assert kind(1) == kind(1, quiet=0)
    assert kind(1) != kind(2)
    assert kind(1) != point(dataclass)(1)
    assert repr(kind(1)).endswith(".Point(x=1, y=2.5, names=[], made=9, last=1)")
    loop = kind(1)
    loop.names.append(loop)
    assert "names=[...]" in repr(loop)
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind(1))


@DEFINE
def test_a_single_field_is_compared_as_a_tuple(dataclass):
    """One object that does not equal itself is the same all the same."""

    @dataclass(frozen=True)
    class One:
        value: float

    @dataclass(frozen=True)
    class Nothing:
        pass

    nan = float("nan")
    assert One(nan) == One(nan)
    assert hash(One(3)) == hash((3,))
    assert (Nothing(), hash(Nothing())) == (Nothing(), hash(()))


@DEFINE
def test_frozen(dataclass):
    """Nothing is assigned or deleted; an heir has fields of its own that may be."""

    @dataclass(frozen=True)
    class Frozen:
        a: int
        b: tuple[int, ...] = ()

    class Heir(Frozen):
        pass

    one = Frozen(1)
    for name in ("a", "other"):
        with pytest.raises(FrozenInstanceError, match=f"cannot assign to field '{name}'"):
            setattr(one, name, 2)
        with pytest.raises(FrozenInstanceError, match=f"cannot delete field '{name}'"):
            delattr(one, name)
    assert one == Frozen(1)
    assert hash(one) == hash((1, ()))
    heir = Heir(1)
    heir.more = 3  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        heir.a = 3


@DEFINE
def test_methods_of_the_class_stay(dataclass):
    """What it says of itself is not replaced, and it may check what it was given."""

    @dataclass(frozen=True)
    class Own:
        a: int

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")

        def __repr__(self) -> str:
            return "own"

        def __eq__(self, other: object) -> bool:
            return True

    assert repr(Own(1)) == "own"
    assert Own(1) == Own(2)
    assert hash(Own(1)) == hash((1,))
    with pytest.raises(ValueError, match="negative"):
        Own(-1)


@DEFINE
def test_heirs_have_all_fields(dataclass):
    """In the order of the classes, whichever of them makes an object first."""

    @dataclass(slots=True)
    class Base:
        a: int = 1

    @dataclass(slots=True)
    class Heir(Base):
        b: int = 2

    assert repr(Heir(5)).endswith("Heir(a=5, b=2)")
    assert repr(Base()).endswith("Base(a=1)")
    assert Heir(1) != Base(1)


@pytest.mark.parametrize("heirs", [dataclasses.dataclass, lazy_dataclass.dataclass])
@DEFINE
def test_heirs_are_frozen_as_what_they_inherit_from(dataclass, heirs):
    """Whichever of the two defines either; else the definition is refused."""

    @dataclass(frozen=True)
    class Frozen:
        a: int

    @dataclass
    class Open:
        a: int

    @heirs(frozen=True)
    class Heir(Frozen):
        b: int = 2

    assert (Heir(1).b, hash(Heir(1))) == (2, hash((1, 2)))
    with pytest.raises(FrozenInstanceError):
        Heir(1).b = 3  # type: ignore[misc]
    for base, frozen in ((Frozen, False), (Open, True)):
        with pytest.raises(TypeError, match="cannot inherit"):
            heirs(frozen=frozen)(type("Other", (base,), {"__annotations__": {"b": int}}))


def test_copies_and_pickles():
    """Frozen or not."""
    for one in (Kept(1, (2,)), Open(3)):
        for again in (pickle.loads(pickle.dumps(one)), copy.copy(one), copy.deepcopy(one)):
            assert asdict(again) == asdict(one)
    assert pickle.loads(pickle.dumps(Kept(1))) == Kept(1)


def test_objects_by_identity_and_weak_references():
    """Without ``eq`` two are never the same, and one may be referred to weakly."""

    @lazy_dataclass.dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
    class Handle:
        number: int

    one = Handle(1)
    assert one != Handle(1)
    assert len({one, Handle(1)}) == 2
    assert weakref.ref(one)() is one


def test_what_is_left_out_is_refused():
    """At the definition."""
    for left_out in ("repr", "init", "order", "unsafe_hash"):
        with pytest.raises(TypeError, match=left_out):
            point(lazy_dataclass.dataclass, **{left_out: True})
