"""Reads matrices in 4 bits, in each packing that is published, into the one layout of `PackedMatrix`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.ops.linear.packed import MIDDLE, PER_WORD, PackedMatrix, halved, pack, unpack

Packing = Literal["gptq", "gptq_v2", "awq", "integers", "floats", "modelopt"]
FLOATS: Final[tuple[Packing, ...]] = ("floats", "modelopt")
TRANSPOSED: Final = ("gptq", "gptq_v2", "awq")  # these store `[K, N]`, in tensors called qweight
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code is at each place of a word


class StoredTensors(Protocol):
    """The tensors of a folder, by their canonical names. All but `has` raise ModelFolderError for an absent one."""

    def has(self, name: str) -> bool:
        """Return whether the folder holds a tensor of this name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's stored shape."""

    def stored_type(self, name: str) -> str:
        """Return safetensors' name of a tensor's dtype, such as "F8_E4M3"."""

    def read(self, name: str) -> Tensor:
        """Read a whole tensor. Raises ModelFolderError, for values that are not finite too."""

    def where(self, name: str) -> str:
        """Return a tensor's name and file, for errors."""


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """The tensors of one matrix `[..., N, K]` in 4 bits.

    `name` is the matrix's name when it is not quantised, `main` the name of the tensor with the codes.
    """

    stored: StoredTensors
    name: str
    packing: Packing
    main: str

    @classmethod
    def find(cls, stored: StoredTensors, name: str, qweight: Packing) -> PackedTensors | None:
        """Return the tensors of a matrix, or None if it is not in 4 bits.

        `qweight` is the packing of the tensors whose names end in "qweight".
        """
        quantised, packed = name.removesuffix("weight") + "qweight", f"{name}_packed"
        if qweight in TRANSPOSED and name.endswith(".weight") and stored.has(quantised):
            return cls(stored, name, qweight, quantised)
        if stored.has(packed):
            return cls(stored, name, "floats" if stored.stored_type(packed) == "U8" else "integers", packed)
        if stored.has(name) and stored.stored_type(name) == "U8" and stored.has(f"{name}_scale_2"):
            return cls(stored, name, "modelopt", name)
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape `[..., N, K]`."""
        *lead, rows, width = self.stored.shape(self.main)
        if self.packing in ("gptq", "gptq_v2"):
            return (*lead, width, rows * PER_WORD)
        if self.packing == "awq":
            return (*lead, width * PER_WORD, rows)
        return (*lead, rows, width * (PER_WORD if self.packing == "integers" else 2))

    @property
    def group(self) -> int:
        """The number of columns that share a scale. Raises ModelFolderError if that is not a multiple of PER_WORD."""
        name, width = self._scale_name, self.shape[-1]
        shape = self.stored.shape(name)
        count = shape[0] if self._transposed else shape[-1]
        if width % count or width // count % PER_WORD:
            raise ModelFolderError(
                f"the scales {self.stored.where(name)} have {count} groups for {width} columns; groups of a "
                f"multiple of {PER_WORD} columns are needed"
            )
        return width // count

    @property
    def is_float(self) -> bool:
        return self.packing in FLOATS

    @property
    def _transposed(self) -> bool:
        return self.packing in TRANSPOSED

    @property
    def _scale_name(self) -> str:
        if self._transposed:
            return self.name.removesuffix("weight") + "scales"
        return f"{self.name}_scale"

    def order(self) -> Tensor | None:
        """Return the columns `[K]` in the order of their groups; None if groups are neighbouring columns.

        Raises ModelFolderError for groups of unequal sizes.
        """
        name = self.name.removesuffix("weight") + ("g_idx" if self._transposed else "weight_g_idx")
        if not self.stored.has(name):
            return None
        index, width, group = self.stored.read(name).long(), self.shape[-1], self.group
        groups = torch.arange(width, device=index.device) // group
        if torch.equal(index, groups) or bool((index < 0).all()):
            return None
        order = index.argsort(stable=True)
        if not torch.equal(index[order], groups):
            raise ModelFolderError(
                f"the groups {self.stored.where(name)} are not all of {group} columns; quantise the model again"
            )
        return order

    def read(self, dtype: torch.dtype) -> PackedMatrix:
        """Read the whole matrix. `dtype` is the one that it widens to. Raises ModelFolderError for a wrong tensor."""
        readers: Mapping[Packing, Callable[[], tuple[Tensor, Tensor | None, Tensor | None]]] = {
            "gptq": self._read_gptq,
            "gptq_v2": self._read_gptq,
            "awq": self._read_awq,
            "integers": self._read_integers,
            "floats": self._read_floats,
            "modelopt": self._read_floats,
        }
        words, zeros, factor = readers[self.packing]()
        scales = self._scales()
        if factor is None:
            scales, factors = halved(scales)
        else:
            factors = factor.expand(*scales.shape[:-1], 1).contiguous()
        if zeros is not None and zeros.shape != scales.shape:
            raise ModelFolderError(
                f"the zero points of {self.stored.where(self.main)} have shape {list(zeros.shape)}, and the scales "
                f"{list(scales.shape)}; they must be equal"
            )
        order = self.order()
        if order is not None:
            words = pack(unpack(words)[..., order])
        return PackedMatrix(words, scales, factors, zeros, self.group, dtype, order)

    def _scales(self) -> Tensor:
        """Return the scales `[..., N, G]`: the bytes of e4m3 numbers for codes that are floats. Raises ModelFolderError
        for wrong ones."""
        scales = self.stored.read(self._scale_name)
        if self._transposed:
            scales = scales.t().contiguous()
        if self.is_float:
            found = self.stored.stored_type(self._scale_name)
            if found != "F8_E4M3":
                raise ModelFolderError(
                    f"the scales {self.stored.where(self._scale_name)} are stored in {found}; 4-bit floats need scales "
                    "in F8_E4M3, so quantise the model again"
                )
            scales = scales.view(torch.uint8)
            if bool((scales >= 128).any()):
                raise ModelFolderError(
                    f"the scales {self.stored.where(self._scale_name)} are not all positive or 0, which 4-bit floats "
                    "need; quantise the model again"
                )
        *lead, num_rows, _ = self.shape
        if scales.shape[:-1] != (*lead, num_rows):
            raise ModelFolderError(
                f"the scales {self.stored.where(self._scale_name)} have shape {list(scales.shape)} for a matrix of "
                f"shape {list(self.shape)}; one for each row and group is needed"
            )
        return scales

    def _read_gptq(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return words, zero points and no factor. Words lie along K, zero points along N, in version 1 minus 1."""
        zeros = unpack(self.stored.read(self._zeros_name)).t() + (self.packing == "gptq")
        return self.stored.read(self.main).t().contiguous(), zeros.contiguous(), None

    def _read_awq(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return words, zero points and no factor. Words lie along N, in the order of AWQ_ORDER."""
        words = pack(_awq_codes(self.stored.read(self.main)).t().contiguous())
        if self.stored.has(self._zeros_name):
            return words, _awq_codes(self.stored.read(self._zeros_name)).t().contiguous(), None
        return words, self._middle_zeros(words), None

    def _read_integers(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return words, zero points and no factor. Words lie along K, and zero points along N."""
        self._check_shape()
        words, name = self.stored.read(self.main), f"{self.name}_zero_point"
        if not self.stored.has(name):
            return words, self._middle_zeros(words), None
        stored = self.stored.read(name)
        if stored.dtype == torch.int32:
            zeros = unpack(stored.transpose(-1, -2)).transpose(-1, -2)[..., : self.shape[-2], :]
        else:
            zeros = (stored.to(torch.int16) + MIDDLE).to(torch.uint8)
        return words, zeros.contiguous(), None

    def _read_floats(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return words, no zero points, and the factor of all scales. A byte has 2 codes.

        Raises ModelFolderError for a factor that is not positive.
        """
        words = self.stored.read(self.main).view(torch.int32)
        name = f"{self.name}_scale_2" if self.packing == "modelopt" else f"{self.name}_global_scale"
        factor = self.stored.read(name).float()
        factor = factor.view(*self.shape[:-2], 1, 1)
        if not bool((factor > 0).all()):
            raise ModelFolderError(f"the scale {self.stored.where(name)} is not positive")
        return words, None, factor if self.packing == "modelopt" else 1 / factor

    def _middle_zeros(self, words: Tensor) -> Tensor:
        """Return the zero points of a matrix that stores none."""
        *lead, width = self.shape
        return torch.full((*lead, width // self.group), MIDDLE, dtype=torch.uint8, device=words.device)

    @property
    def _zeros_name(self) -> str:
        return self.name.removesuffix("weight") + "qzeros"

    def _check_shape(self) -> None:
        name = f"{self.name}_shape"
        if self.stored.has(name) and (found := tuple(self.stored.read(name).tolist())) != self.shape[-len(found) :]:
            raise ModelFolderError(
                f"{self.stored.where(name)} says {list(found)}, and the packed weights are of shape {list(self.shape)}"
            )


def _awq_codes(words: Tensor) -> Tensor:
    """Return codes `[M, N]` of AWQ's words `[M, N / 8]`."""
    codes = unpack(words).view(len(words), -1, PER_WORD)
    return torch.empty_like(codes).index_copy_(-1, torch.tensor(AWQ_ORDER, device=codes.device), codes).flatten(-2)
