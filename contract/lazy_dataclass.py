"""Dataclasses that are cheap to define: methods are compiled when they are first used.

The standard library's ``dataclass`` writes and compiles the text of up to six functions per class,
which takes a third of a millisecond; a start of the program defines more than a hundred classes.
Here ``__init__`` is compiled when the first object is made, and no other method needs compiling."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    import reprlib
    from operator import attrgetter

    def dataclass(
        cls=None, /, *, eq=True, frozen=False, kw_only=False, slots=False, weakref_slot=False
    ):
        """Like ``dataclasses.dataclass``, whose parameters it takes."""

        def define(cls):
            if not cls.__doc__:
                # Without a docstring the library writes a signature, which takes as long as all the
                # rest.
                cls.__doc__ = cls.__name__
            heir = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))
            made = dataclasses.dataclass(
                cls,
                # The library compares this flag with that of the base dataclasses.
                frozen=frozen and heir,
                init=False,
                repr=False,
                eq=False,
                kw_only=kw_only,
                slots=slots,
                weakref_slot=weakref_slot,
            )
            made.__dataclass_params__.frozen = frozen
            fields = dataclasses.fields(made)
            methods = {"__init__": _initializer(made, frozen), "__repr__": _representation(fields)}
            if eq:
                methods |= _comparisons(fields, frozen)
            if frozen:
                methods |= _refusals(fields, made)
            if frozen and slots:
                methods |= {"__getstate__": _state, "__setstate__": _restore}
            for name, method in methods.items():
                # A class that defines __eq__ has None for __hash__.
                if made.__dict__.get(name) is None:
                    setattr(made, name, method)
            return made

        return define if cls is None else define(cls)

    def _initializer(cls, frozen):
        def __init__(self, *values, **named):
            # Set it on the defining class: the class of ``self`` may have an __init__ of its own.
            cls.__init__ = compiled = _compiled(cls, frozen)
            compiled(self, *values, **named)

        return __init__

    def _compiled(cls, frozen):
        """Compile the ``__init__`` that the standard library would have compiled."""
        parameters, keywords, lines = [], [], []
        known = {"_set": object.__setattr__, "_MADE": dataclasses.MISSING}
        for field in dataclasses.fields(cls):
            name = value = field.name
            default = ""
            if field.default_factory is not dataclasses.MISSING:
                known[f"_make_{name}"] = field.default_factory
                made = f"_make_{name}()"
                value = f"{made} if {name} is _MADE else {name}" if field.init else made
                default = "=_MADE"
            elif field.default is not dataclasses.MISSING:
                known[f"_default_{name}"] = field.default
                default = f"=_default_{name}"
                value = name if field.init else f"_default_{name}"
            elif not field.init:
                continue
            if field.init:
                (keywords if field.kw_only else parameters).append(f"{name}{default}")
            lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
        if hasattr(cls, "__post_init__"):
            lines.append("self.__post_init__()")
        if keywords:
            keywords.insert(0, "*")
        listed = ", ".join(("self", *parameters, *keywords))
        text = "\n ".join((f"def __init__({listed}):", *(lines or ["pass"])))
        exec(text, known)
        made = known["__init__"]
        made.__qualname__ = f"{cls.__qualname__}.__init__"
        made.__module__ = cls.__module__
        return made

    def _representation(fields):
        names = [field.name for field in fields if field.repr]

        @reprlib.recursive_repr()
        def __repr__(self):
            values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            return f"{self.__class__.__qualname__}({values})"

        return __repr__

    def _comparisons(fields, frozen):
        values = _values_of([field.name for field in fields if field.compare])

        def __eq__(self, other):
            if other.__class__ is self.__class__:
                return values(self) == values(other)
            return NotImplemented

        if not frozen:
            return {"__eq__": __eq__, "__hash__": None}
        hashed = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
        of_hash = _values_of(hashed)

        def __hash__(self):
            return hash(of_hash(self))

        return {"__eq__": __eq__, "__hash__": __hash__}

    def _values_of(names):
        """A function from an object to the tuple of the values of ``names``."""
        if len(names) > 1:
            return attrgetter(*names)
        return lambda self: tuple(getattr(self, name) for name in names)

    def _refusals(fields, cls):
        names = frozenset(field.name for field in fields)

        def __setattr__(self, name, value):
            if type(self) is cls or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
            super(cls, self).__setattr__(name, value)

        def __delattr__(self, name):
            if type(self) is cls or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
            super(cls, self).__delattr__(name)

        return {"__setattr__": __setattr__, "__delattr__": __delattr__}

    def _state(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _restore(self, state):
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)
