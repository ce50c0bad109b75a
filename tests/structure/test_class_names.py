"""One class name, one class: within a package, and for a device tier within its folder.

And no class is written in a way that some Python the project runs on misunderstands."""

import ast
from collections import Counter
from collections.abc import Iterable

from tests.paths import ROOT
from tests.structure.source_tree import exceptions, product_modules, telling_nodes


def package_of(module: str) -> str:
    """The package in which a class name is unique.

    Tiers implement the same protocols side by side, so each folder of ``accel`` counts by itself.
    """
    parts = module.split(".")
    is_tier = parts[0] == "accel" and (ROOT / "accel" / parts[1]).is_dir()
    return ".".join(parts[: 2 if is_tier else 1])


def repeated_classes(modules: Iterable[tuple[str, ast.Module]]) -> set[str]:
    """Every class name that a package has twice, as "package:name"."""
    names = Counter(
        f"{package_of(module)}:{node.name}"
        for module, source in modules
        for node in source.body
        if isinstance(node, ast.ClassDef)
    )
    return {name for name, count in names.items() if count > 1}


def test_every_class_name_is_unique_in_its_package():
    assert repeated_classes(product_modules().items()) == exceptions("class")


def test_a_repeated_name_is_found():
    """Negative control: two classes of one package, and two of two tiers, of which one counts."""
    modules = [
        ("harness.a", "class Kind: ..."), ("harness.b.c", "class Kind: ..."),
        ("accel.cuda.tier", "class Memory: ..."), ("accel.opencl.tier", "class Memory: ..."),
    ]  # fmt: skip
    parsed = [(name, ast.parse(text)) for name, text in modules]
    assert repeated_classes(parsed) == {"harness:Kind"}


def generic_with_weak_slot(modules: Iterable[tuple[str, ast.Module]]) -> set[str]:
    """Every generic dataclass that asks for ``weakref_slot``, as "module:name".

    Python 3.12.0 to 3.12.3 leave that slot out of a class derived from ``Generic``, so nothing
    can refer to it weakly."""
    return {
        f"{module}:{node.name}"
        for module, source in modules
        for node in telling_nodes(source)
        if isinstance(node, ast.ClassDef)
        and any("Generic" in ast.unparse(base) for base in node.bases)
        and any("weakref_slot" in ast.unparse(line) for line in node.decorator_list)
    }


def test_no_generic_class_asks_for_a_slot_that_some_pythons_forget():
    assert generic_with_weak_slot(product_modules().items()) == set()
    wrong = "@dataclass(slots=True, weakref_slot=True)\nclass Batch(Generic[A]): ..."
    assert generic_with_weak_slot([("accel.a", ast.parse(wrong))]) == {"accel.a:Batch"}
