"""Dataclasses that are cheap to define: methods are compiled once a class makes many objects.

The standard library's ``dataclass`` writes and compiles up to six functions per class, which takes
a third of a millisecond; a start of the program defines more than a hundred classes, most of which
make few objects. Here only ``__init__`` is compiled, once many objects were made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    import functools
    import re
    import reprlib
    from collections import deque
    from itertools import repeat
    from operator import attrgetter

    FEW_OBJECTS = 24
    """Of a class: compiling its ``__init__`` takes longer than to look at its fields so often."""
    NO_FIELD = re.compile("ClassVar|InitVar|KW_ONLY").search
    """Annotations that are no fields, or change what follows."""

    def dataclass(
        cls=None, /, *, eq=True, frozen=False, kw_only=False, slots=False, weakref_slot=False
    ):
        """Like ``dataclasses.dataclass``, whose parameters it takes."""

        def define(cls):
            plain = _plain_fields(cls, kw_only)
            if plain is None:
                cls = _by_library(cls, frozen, kw_only, slots, weakref_slot)
            fields = dataclasses.fields(cls) if plain is None else tuple(plain.values())
            _check_defaults(fields)
            home = []
            methods = {"__init__": _initializer(home, frozen), "__repr__": _representation}
            if eq:
                methods |= _comparisons(fields, frozen)
            if frozen:
                methods |= _refusals(fields, home)
            if frozen and slots:
                methods |= {"__getstate__": _state, "__setstate__": _restore}
            # A class that defines __eq__ has None for __hash__.
            own = cls.__dict__
            members = {name: m for name, m in methods.items() if own.get(name) is None}
            if plain is not None:
                members |= _library_members(cls, plain, frozen)
            if plain is not None and slots:
                cls = _with_slots(cls, members, weakref_slot)
            else:
                for name, member in members.items():
                    if member is dataclasses.MISSING:
                        delattr(cls, name)
                    else:
                        setattr(cls, name, member)
            home.append(cls)
            return cls

        return define if cls is None else define(cls)

    def _by_library(cls, frozen, kw_only, slots, weakref_slot):
        """Any class as a dataclass without methods."""
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
        return made

    def _plain_fields(cls, kw_only):
        """The fields by name; None for a class of which the library must find or check them."""
        own = cls.__dict__
        annotations = own.get("__annotations__")
        if not annotations or cls.__bases__ != (object,) or type(cls) is not type:
            return None
        kinds = [*map(type, annotations.values())]
        if kinds.count(str) < len(kinds) or NO_FIELD(" ".join(annotations.values())):
            return None
        fields = {}
        for name in annotations:
            given = own.get(name, dataclasses.MISSING)
            if not isinstance(given, dataclasses.Field):
                given = dataclasses.field(default=given)
            if given.default.__class__.__hash__ is None:
                return None
            fields[name] = given
        given = [name for name, v in own.items() if isinstance(v, dataclasses.Field)]
        if "__slots__" in own or not fields.keys() >= set(given):
            return None
        (example,) = dataclasses.fields(_example(False))
        for name, found in fields.items():
            found.name, found.type = name, annotations[name]
            found._field_type = example._field_type
            if found.kw_only is dataclasses.MISSING:
                found.kw_only = kw_only
        return fields

    def _check_defaults(fields):
        """Raise TypeError for a field without a default after one with a default."""
        some = False
        for field in fields:
            if field.init and not field.kw_only:
                none = field.default is field.default_factory  # Both are MISSING.
                if none and some:
                    raise TypeError(f"non-default argument {field.name!r} follows default argument")
                some = some or not none

    def _library_members(cls, fields, frozen):
        """What the library gives a class with these fields besides methods."""
        positional = tuple(f.name for f in fields.values() if f.init and not f.kw_only)
        members = {
            "__doc__": cls.__doc__ or cls.__name__,
            "__dataclass_fields__": fields,
            "__dataclass_params__": _example(frozen).__dataclass_params__,
            "__match_args__": cls.__dict__.get("__match_args__", positional),
        }
        for name, value in cls.__dict__.items():
            if isinstance(value, dataclasses.Field):
                members[name] = value.default
        return members

    def _with_slots(cls, members, weakref_slot):
        """The class once more, with ``members`` and a slot for each field."""
        fields = members["__dataclass_fields__"]
        members = {**cls.__dict__, **members}
        for name in (*fields, "__dict__", "__weakref__"):
            members.pop(name, None)
        members["__slots__"] = (*fields, *(("__weakref__",) if weakref_slot else ()))
        members["__qualname__"] = cls.__qualname__
        return type(cls.__name__, (), members)

    @functools.cache
    def _example(frozen):
        """A class that the library made."""

        class Example:
            name: str

        return _by_library(Example, frozen, False, False, False)

    def _initializer(home, frozen):
        """``__init__`` of the class that ``home`` will contain."""
        objects = 0

        def __init__(self, *values, **named):
            nonlocal objects
            objects += 1
            if objects > FEW_OBJECTS or not _filled(home[0], self, values, named, frozen):
                # Set it on the defining class: that of ``self`` may have an __init__ of its own.
                home[0].__init__ = compiled = _compiled(home[0], frozen)
                compiled(self, *values, **named)

        return __init__

    def _filled(cls, self, values, named, frozen):
        """Do what ``__init__`` does; False, with nothing done, where its arguments are wrong."""
        given = len(values)
        used = taken = 0
        made = []
        for field in dataclasses.fields(cls):
            name = field.name
            if field.init and not field.kw_only and used < given:
                if name in named:
                    return False
                made.append((name, values[used], None))
                used += 1
            elif field.init and name in named:
                made.append((name, named[name], None))
                taken += 1
            elif field.default is not dataclasses.MISSING:
                made.append((name, field.default, None))
            elif field.default_factory is not dataclasses.MISSING:
                made.append((name, None, field.default_factory))
            elif field.init:
                return False
        if used < given or taken < len(named):
            return False
        put = object.__setattr__ if frozen else setattr
        for name, value, make in made:
            put(self, name, value if make is None else make())
        if hasattr(self, "__post_init__"):
            self.__post_init__()
        return True

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

    @reprlib.recursive_repr()
    def _representation(self):
        names = [field.name for field in dataclasses.fields(self) if field.repr]
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({values})"

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

    def _refusals(fields, home):
        names = frozenset(field.name for field in fields)

        def __setattr__(self, name, value):
            if type(self) is home[0] or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
            super(home[0], self).__setattr__(name, value)

        def __delattr__(self, name):
            if type(self) is home[0] or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
            super(home[0], self).__delattr__(name)

        return {"__setattr__": __setattr__, "__delattr__": __delattr__}

    @functools.cache
    def _names_and_values(cls):
        """The names of a class's fields, and a function from an object to their values."""
        names = [field.name for field in dataclasses.fields(cls)]
        return names, _values_of(names)

    def _state(self):
        return _names_and_values(type(self))[1](self)

    def _restore(self, state):
        # No loop of its own: an engine in another process gets many requests at once.
        deque(map(object.__setattr__, repeat(self), _names_and_values(type(self))[0], state), 0)
