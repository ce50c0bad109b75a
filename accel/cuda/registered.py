"""The tuned kernels there are, see ``accel.cuda.tuned``: rules in the order they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel.cuda.attention import attention_rule
from accel.cuda.head_rows import head_rows_rule
from accel.cuda.matrices import matrix_rule
from accel.cuda.products import product_rule
from accel.cuda.tuned import ArrangedLayout, LayoutRule, Rule
from accel.cuda.units import UNITS, embed_rule, unit_layout
from accel.packets.layouts import WeightLayout

RULES: tuple[Rule, ...] = (embed_rule, head_rows_rule, attention_rule, matrix_rule, product_rule)
LAYOUTS: Mapping[WeightLayout, ArrangedLayout] = MappingProxyType({WeightLayout.UNITS: UNITS})
LAYOUT_RULES: tuple[LayoutRule, ...] = (unit_layout,)
