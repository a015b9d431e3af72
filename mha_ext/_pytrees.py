"""Mask and bias objects as containers of tensors: what torch.export, torch.vmap and torch.utils._pytree see in them.

This file registers them with torch's pytrees (not with torch.library).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from . import _checks

Self = TypeVar("Self", bound="Container")


class Container:
    """An object whose attributes are tensors (those named in ``tensors``) and constants (all others).

    The tensors are its leaves; the constants belong to its structure, so that an exported program is for these constants.
    Every subclass is registered as it is defined.
    """

    tensors: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # Two classes of one name, say of a test that makes its own, cannot both be read back from a file.
        name = f"{cls.__module__}.{cls.__qualname__}"
        pytree.register_pytree_node(
            cls,
            lambda given: given._parts(),
            lambda parts, constants: cls._of_parts(parts, constants),
            serialized_type_name=None if "<locals>" in name else name,
            to_dumpable_context=list,
            from_dumpable_context=lambda pairs: tuple((key, value) for key, value in pairs),
            flatten_with_keys_fn=lambda given: given._named_parts(),
        )
        if name.startswith("mha_ext."):  # an exported program's example arguments are loaded with weights_only
            torch.serialization.add_safe_globals([cls])

    def __repr__(self) -> str:
        # Without addresses: processes that have the same say the same (ring_attention compares that).
        shown = (f"{name}={_checks.text(x.shape) if isinstance(x, Tensor) else _checks.given(x)}" for name, x in vars(self).items())
        return f"{type(self).__name__}({', '.join(shown)})"

    def to(self: Self, device: Any, non_blocking: bool = False) -> Self:
        """The same with its tensors on a device, as Tensor.to puts them there; itself where they are there already."""
        return self._map(lambda x: x.to(torch.device(device), non_blocking=non_blocking))

    def _map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same with function of each tensor."""
        parts = self._parts_alone()
        mapped = [x._map(function) if isinstance(x, Container) else function(x) for x in parts]
        return self if all(a is b for a, b in zip(mapped, parts)) else self._of_parts(mapped, self._parts()[1])

    def _parts_alone(self) -> list[Any]:
        return [getattr(self, name) for name in self.tensors]

    def _parts(self) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
        """(tensors, or what stands for them; the rest)"""
        constants = tuple((name, value) for name, value in vars(self).items() if name not in self.tensors)
        return self._parts_alone(), constants

    def _named_parts(self) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, Any], ...]]:
        parts, constants = self._parts()
        return [(pytree.GetAttrKey(name), x) for name, x in zip(self.tensors, parts)], constants

    @classmethod
    def _of_parts(cls: type[Self], parts: Any, constants: tuple[tuple[str, Any], ...]) -> Self:
        """Without the constructor's checks: the parts may be anything, say axes for torch.vmap."""
        made = cls.__new__(cls)
        for name, x in (*zip(cls.tensors, parts), *constants):
            setattr(made, name, x)
        return made


class Sequence(Container):
    """A container of containers, which are in its attribute ``parts``."""

    parts: tuple[Any, ...]

    def _parts_alone(self) -> list[Any]:
        return list(self.parts)

    def _parts(self) -> tuple[list[Any], tuple[tuple[str, Any], ...]]:
        return list(self.parts), ()

    def _named_parts(self) -> tuple[list[tuple[Any, Any]], tuple[tuple[str, Any], ...]]:
        return [(pytree.SequenceKey(n), x) for n, x in enumerate(self.parts)], ()

    @classmethod
    def _of_parts(cls: type[Self], parts: Any, constants: tuple[tuple[str, Any], ...]) -> Self:
        made = cls.__new__(cls)
        made.parts = tuple(parts)  # type: ignore[attr-defined]
        return made


def tensors_in(x: Any) -> list[Any]:
    """The tensors of an object, its parts' too; of anything else that itself."""
    return [found for part in x._parts_alone() for found in tensors_in(part)] if isinstance(x, Container) else [x]
