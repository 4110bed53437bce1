"""Comparison of Arrow schemas: which differences matter to a reader of the data."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["may_lack_value", "nullable_schema", "type_text"]


def type_text(type_: pa.DataType) -> str:
    """Returns a type as a text, without differences that do not concern the data.

    These are Arrow's memory layout, the nullability of nested fields, and the names of the entries of lists and maps.
    """
    kinds = pa.types
    if kinds.is_struct(type_):
        return f"struct<{', '.join(f'{field.name}: {type_text(field.type)}' for field in type_)}>"
    if kinds.is_map(type_):
        return f"map<{type_text(type_.key_type)}, {type_text(type_.item_type)}>"
    if kinds.is_list(type_) or kinds.is_large_list(type_):
        return f"list<{type_text(type_.value_type)}>"
    return str(type_).removeprefix("large_")


def may_lack_value(field: pa.Field, required: pa.Field) -> bool:
    """Whether a field may be null, or contain a null, where `required` does not allow it. The types must be alike."""
    if field.nullable and not required.nullable:
        return True
    ours, theirs = field.type, required.type
    if pa.types.is_struct(ours):
        return any(may_lack_value(one, theirs.field(one.name)) for one in ours)
    if pa.types.is_map(ours):
        return may_lack_value(ours.item_field, theirs.item_field)
    if pa.types.is_list(ours) or pa.types.is_large_list(ours):
        return may_lack_value(ours.value_field, theirs.value_field)
    return False


def nullable_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema with nullable fields, nested ones included."""
    return pa.schema(list(map(_nullable, schema)), schema.metadata)


def _nullable(field: pa.Field) -> pa.Field:
    type_ = field.type
    if pa.types.is_struct(type_):
        type_ = pa.struct(list(map(_nullable, type_)))
    elif pa.types.is_map(type_):
        type_ = pa.map_(type_.key_field, _nullable(type_.item_field), type_.keys_sorted)
    elif pa.types.is_list(type_):
        type_ = pa.list_(_nullable(type_.value_field))
    elif pa.types.is_large_list(type_):
        type_ = pa.large_list(_nullable(type_.value_field))
    return field.with_type(type_).with_nullable(True)
