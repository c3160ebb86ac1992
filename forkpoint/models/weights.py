"""Weights by name: read from sharded safetensors, or random."""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from forkpoint.errors import ModelFolderError
from forkpoint.models.cuts import WHOLE, Cut, Part
from forkpoint.models.fields import canonical_name
from forkpoint.models.packings import FLOATS, PackedTensors
from forkpoint.models.quantization import FP8, Form, Kind, WeightFormat, scale_shape
from forkpoint.models.shards import Shards, left_by_training, some
from forkpoint.ops.linear.packed import FLOAT_GROUP, PER_WORD, PackedMatrix, quantise_floats, quantise_packed
from forkpoint.ops.linear.scaled import BLOCK, CODES, Matrix, ScaledMatrix, quantise
from forkpoint.ops.ranks import ALONE, Ranks

SCALE_SUFFIXES = ("_scale_inv", "_scale")  # of the name of a matrix in FP8
CODE_TYPES = ("U8", "I8", "I32", "I64")  # of codes in 4 bits, zero points and shapes
FP8_TYPES = ("F8_E4M3", "F8_E5M2")
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# Number of elements that are checked together. Each check of a device waits for it. On the host the check's fp32 copy
# counts as memory of the load.
_PIECE = 1 << 22
_HOST_PIECE = 1 << 17
# Parts of checkpoints that a text model does not use, keyed by the start of their canonical names.
TOWER_PREFIXES = ("visual.", "vision_tower.", "multi_modal_projector.")
VISION_TOWER = {model + prefix: "the vision tower" for prefix in TOWER_PREFIXES for model in ("model.", "")}
MTP_HEAD = {"mtp.": "the MTP head", "model.mtp.": "the MTP head"}
# Name endings of stored scales of activations, keys and values; forkpoint computes these from the values instead.
ACTIVATION_SCALES = (
    *(".input_scale", ".activation_scale", ".input_global_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".prob_scale"),
)
INV_FREQ = "rotary_emb.inv_freq"  # name ending of rotary frequencies, which are computed from config.json instead
LOGGER = logging.getLogger(__name__)

Span: TypeAlias = tuple[float, float]
LoadingProgress = Callable[[int, int], None]  # called after each tensor with bytes read and bytes in total


@dataclass(kw_only=True, eq=False)
class WeightSource(ABC):
    """A source of tensors by their canonical names (`model.layers.0...`), in the shapes that this rank needs."""

    dtype: torch.dtype
    device: torch.device
    format: WeightFormat | None = None  # of quantised matrices
    ranks: Ranks = ALONE
    as_bytes: bool = False  # store FP8 as bytes, for devices without FP8
    on_host: bool = True  # the device's memory is the host's

    @property
    def codes(self) -> torch.dtype:
        """The dtype in which FP8 is stored on the device."""
        return torch.uint8 if self.as_bytes else CODES

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether `get` can return this tensor."""

    def holds(self, name: str) -> bool:
        """Return whether `get_matrix` can return this matrix."""
        return self.has(name)

    def stores(self, name: str) -> bool:
        """Return whether a file holds this tensor, or its 4-bit form; False for random weights."""
        return self.has(name) and self.shape(name) is not None

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the tensor's stored shape for all ranks together; None for random weights, which take any shape."""

    @abstractmethod
    def integers(self, name: str) -> list[int]:
        """Return the elements of a tensor of integers, which `stores` says is there."""

    def get(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype | None = None,
        span: Span | None = None,
        cut: Cut = WHOLE,
    ) -> Tensor:
        """Return a new tensor of `shape` in `dtype` (default: the model's) on the source's device.

        Random weights are uniform in `span`, or normal without one. `shape` is this rank's, and `cut` selects its part.
        """
        return self._own(name, cut.part(shape, self.ranks), dtype or self.dtype, span)

    def bias(self, name: str, size: int, exists: bool, cut: Cut = WHOLE) -> Tensor | None:
        """Return the vector `name.bias` of `size` elements if it `exists`, otherwise None."""
        if not exists:
            return None
        return self.get(f"{name}.bias", (size,), cut=cut)

    def form(self, name: str) -> Form | None:
        """Return the form in which `get_matrix` returns this matrix; None: not quantised."""
        if self.format is None or not self.format.covers(name):
            return None
        if self.format.packing in FLOATS:
            return Form("float", FLOAT_GROUP)
        return FP8 if self.format.packing is None else Form("integer", self.format.group_size)

    def get_matrix(self, name: str, shape: Sequence[int], cut: Cut = WHOLE) -> Matrix:
        """Return this rank's part, of shape `shape`, of a matrix `[..., N, K]`: quantised as it is stored, or plain."""
        form = self.form(name)
        if form is None or self.format is None:
            return self.get(name, shape, cut=cut)
        part = cut.part(shape, self.ranks)
        if form.kind != "fp8":
            return part.of_packed(self._packed(name, part.whole))
        return part.of_scaled(*self._scaled(name, part), self.dtype)

    def _packed(self, name: str, shape: Sequence[int]) -> PackedMatrix:
        """Return a whole matrix of this shape, quantised to 4 bits."""
        if self.format is not None and self.format.packing in FLOATS:
            return quantise_floats(self._own(name, Part(tuple(shape)), self.dtype, None))
        group = 0 if self.format is None else self.format.group_size
        group = next((size for size in (group, 64, 32, 16, PER_WORD) if size and shape[-1] % size == 0), shape[-1])
        return quantise_packed(self._own(name, Part(tuple(shape)), self.dtype, None), group)

    def _scaled(self, name: str, part: Part) -> tuple[Tensor, Tensor, int, int]:
        """Return the codes of the part of a matrix in FP8, the whole matrix's scales, and the rows and columns of one.

        Here the matrix is quantised as a whole, so that all ranks get the same scales.
        """
        matrix = self._own(name, Part(part.whole), self.dtype, None)
        if self.as_bytes:
            matrix = matrix.cpu()  # the host has FP8 even if the device has not
        found = quantise(matrix)
        codes = found.codes.view(torch.uint8).to(self.device)
        return part.copied(codes).view(self.codes), found.scales.to(self.device), found.rows, found.columns

    @abstractmethod
    def _own(self, name: str, part: Part, dtype: torch.dtype, span: Span | None) -> Tensor:
        """Return this part of a tensor as a new one on the device; `span` as in `get`."""


@dataclass(kw_only=True, eq=False)
class DummyWeights(WeightSource):
    """Random weights for any name and shape.

    They are uniform in `span`, or normal with the standard deviation `shape[-1] ** -0.5`. The bits depend only on the
    seed, the name, the whole shape, dtype and the device.
    """

    seed: int

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None

    def integers(self, name: str) -> list[int]:
        raise LookupError(f"random weights have no stored {name}")

    def _own(self, name: str, part: Part, dtype: torch.dtype, span: Span | None) -> Tensor:
        # torch's CPU generator uses only 32 bits of a seed.
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(f"{self.seed}:{name}".encode()))
        made = torch.empty(part.whole, dtype=dtype, device=self.device)
        if span is not None:
            made.uniform_(*span, generator=generator)
        else:
            made.normal_(0.0, made.shape[-1] ** -0.5, generator=generator)
        return part.copied(made)


@dataclass(kw_only=True, eq=False)
class FileWeights(WeightSource):
    """Tensors of a model folder, read one at a time. Call `close` when done.

    Raises ModelFolderError, naming the tensor and the file, for a missing, broken or unexpected shard, a missing
    tensor, a wrong shape, and values that are not finite.
    """

    folder: Path
    progress: LoadingProgress | None = None
    names: Sequence[tuple[str, str]] = ()  # the family's `weight_names`
    # start of the names of an unused part -> description of the part
    unused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shards = Shards(self.folder)
        self._stored: dict[str, str] = {}  # canonical name -> stored name
        self._skipped: Counter[str] = Counter()  # tensors of each unused part
        for stored in self._shards.file_of:
            self._sort(stored)
        self._unread = set(self._stored)
        sizes = self._shards.sizes() if self.progress is not None else {}
        self._num_bytes = {name: sizes.get(stored, 0) for name, stored in self._stored.items()}
        self._total_bytes, self._read_bytes = sum(self._num_bytes.values()), 0
        self._report()

    def _sort(self, stored: str) -> None:
        name = canonical_name(stored, self.names)
        part = next((f"{part} ({start}*)" for start, part in self.unused.items() if name.startswith(start)), None)
        if name.endswith(INV_FREQ):
            part = f"rotary frequencies (*{INV_FREQ})"
        elif self.format is not None and not self.format.on_load and name.endswith(ACTIVATION_SCALES):
            part = "scales of activations, keys and values"
        if part is not None:
            self._skipped[part] += 1
        elif name in self._stored:
            raise ModelFolderError(
                f"{self.folder} holds {self._stored[name]!r} and {stored!r}, which are names of the same tensor; "
                "delete one of the two"
            )
        else:
            self._stored[name] = stored

    def close(self) -> None:
        self._shards.close()

    def _report(self) -> None:
        if self.progress is not None:
            self.progress(self._read_bytes, self._total_bytes)

    def finish(self) -> None:
        """Log the tensors of unused parts. Raises ModelFolderError for other tensors that were not read."""
        for part, count in self._skipped.items():
            if self.ranks.rank == 0:
                LOGGER.info("weights not used: %d tensors of %s", count, part)
        if self._unread:
            unread = [self._stored[name] for name in self._unread]
            why = left_by_training(unread) or "config.json and the weights belong to different models"
            raise ModelFolderError(
                f"{self.folder} holds {len(unread)} tensors that the model of this config.json does not use: "
                f"{some(unread)}; {why}"
            )

    def has(self, name: str) -> bool:
        return name in self._stored

    def holds(self, name: str) -> bool:
        return self.has(name) or self._tensors(name) is not None

    def stores(self, name: str) -> bool:
        return self.holds(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def named_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and whole shapes of all tensors that the model may read, sorted."""
        return [(name, self.shape(name)) for name in sorted(self._stored)]

    def _own(self, name: str, part: Part, dtype: torch.dtype, span: Span | None) -> Tensor:
        tensors = self._tensors(name)
        if tensors is not None:  # such as an output head, which runs widened
            return part.copied(self._packed(name, part.whole).dense()).to(dtype)
        if len(part.whole) > 1 and self._stored_in_fp8(name):
            return part.copied(ScaledMatrix(*self._scaled(name, Part(part.whole)), dtype).dense())
        if self.stored_type(name) in FP8_TYPES:
            raise ModelFolderError(
                f"tensor {self.where(name)} is stored in FP8, where forkpoint reads bfloat16 or float32; without "
                "quantization_config in config.json, and for norms, FP8 is not read"
            )
        if self.stored_type(name) not in FLOAT_TYPES:
            raise ModelFolderError(
                f"tensor {self.where(name)} is stored in {self.stored_type(name)}, where forkpoint reads one of "
                f"{', '.join(FLOAT_TYPES)}; if it is quantised, config.json has to say how in quantization_config"
            )
        return self._finite(name, part).to(dtype)

    def form(self, name: str) -> Form | None:
        if self.format is None or self.format.on_load:
            return super().form(name)
        tensors = self._tensors(name)
        if tensors is not None:
            order = tensors.order()
            kind: Kind = "float" if tensors.is_float else "integer"
            return Form(kind, tensors.group, None if order is None else order.cpu().numpy().tobytes())
        if not self._stored_in_fp8(name):
            return None
        others = self.format.coarser_scales
        widened = "row" in others and self.format.kind_of_scales(self.shape(self._scale_of(name)), self.shape(name))
        return None if widened == "row" else FP8

    def _stored_in_fp8(self, name: str) -> bool:
        """Return whether the folder holds this matrix in FP8, with scales."""
        has_scales = self.format is not None and self.format.scales is not None and not self.format.on_load
        return has_scales and self.stored_type(name) in FP8_TYPES

    def _scale_of(self, name: str) -> str:
        """Return the name of the scales of a matrix in FP8."""
        return next((name + end for end in SCALE_SUFFIXES if self.has(name + end)), name + SCALE_SUFFIXES[0])

    def _tensors(self, name: str) -> PackedTensors | None:
        """Return the tensors of a matrix in 4 bits, or None if the folder holds it in another form."""
        if self.format is None or self.format.packing is None:
            return None
        return PackedTensors.find(self, name, self.format.packing)

    def _packed(self, name: str, shape: Sequence[int]) -> PackedMatrix:
        tensors = self._tensors(name)
        assert tensors is not None, "only a matrix in 4 bits has this form"
        if tensors.shape != tuple(shape):
            raise ModelFolderError(
                f"tensor {self.where(tensors.main)} holds a matrix of shape {list(tensors.shape)}, if it is in 4 bits; "
                f"config.json asks for {list(shape)}"
            )
        return tensors.read(self.dtype)

    def integers(self, name: str) -> list[int]:
        found: list[int] = self.read(name).flatten().tolist()
        return found

    def read(self, name: str) -> Tensor:
        whole = Part(self.shape(name))
        return self._read(name, whole) if self.stored_type(name) in CODE_TYPES else self._finite(name, whole)

    def _scaled(self, name: str, part: Part) -> tuple[Tensor, Tensor, int, int]:
        if self.format is None or self.format.on_load:
            return super()._scaled(name, part)
        if self.stored_type(name) != "F8_E4M3":
            raise ModelFolderError(
                f"tensor {self.where(name)} is stored in {self.stored_type(name)}; forkpoint reads only e4m3 as FP8"
            )
        codes = self._finite(name, part)
        scale, own = self._scale_of(name), self.format.scales
        assert own is not None, "the folder holds matrices in FP8"
        found = self.shape(scale)
        kind = self.format.kind_of_scales(found, part.whole)
        if kind is None:
            shapes = [list(scale_shape(each, part.whole)) for each in (own, *self.format.coarser_scales)]
            raise ModelFolderError(
                f"the scales {self.where(scale)} have shape {list(found)}; config.json asks for "
                f"{' or '.join(map(str, shapes))}"
            )
        scales = self._read(scale, Part(found)).float().view(scale_shape(kind, part.whole))
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise ModelFolderError(f"the scales {self.where(scale)} are not all positive and finite")
        if kind == "tensor":  # a row is the largest unit that operators know
            kind = own if own != "tensor" else "row"
            scales = scales.expand(scale_shape(kind, part.whole)).contiguous()
        rows, columns = (BLOCK, BLOCK) if kind == "block" else (1, part.whole[-1])
        return codes, scales, rows, columns

    def stored_type(self, name: str) -> str:
        return str(self._slice(name).get_dtype())

    def _slice(self, name: str) -> Any:
        """Return safetensors' slice object, which knows shape and dtype before the data are read."""
        return self._shards.slice(self._find(name))

    def where(self, name: str) -> str:
        stored = self._find(name)
        return f"{stored!r} in {self.folder / self._shards.file_of[stored]}"

    def _read(self, name: str, part: Part) -> Tensor:
        """Copy the part to the device, as stored (FP8 as `codes`), and count and report it as read."""
        stored, found = self._find(name), self.shape(name)
        if found != part.whole:
            hint = ""
            if self._shards.is_from_mlx(stored):
                hint = "; MLX wrote the file; give the model that it was made from"
            raise ModelFolderError(
                f"tensor {self.where(name)} has shape {list(found)}; config.json asks for {list(part.whole)}{hint}"
            )
        try:
            tensor = self._shards.read(stored, part, owned=self.on_host)
        except SafetensorError as error:
            raise ModelFolderError(f"tensor {self.where(name)} cannot be read: {error}; fetch it again") from error
        if tensor.dtype == CODES:
            tensor = tensor.view(self.codes)
        tensor = tensor.to(self.device)  # which checks values fastest
        if name in self._unread:
            self._unread.remove(name)
            self._read_bytes += self._num_bytes.get(name, 0)
            self._report()
        return tensor

    def _finite(self, name: str, part: Part) -> Tensor:
        """Return what `_read` returns, after checking that all values are finite (otherwise ModelFolderError)."""
        tensor = self._read(name, part)
        if not _is_finite(tensor, _HOST_PIECE if self.on_host else _PIECE):
            raise ModelFolderError(
                f"tensor {self.where(name)} holds NaN or infinite values; fetch the file again, "
                "or repair the training run that wrote it"
            )
        return tensor

    def _find(self, name: str) -> str:
        if name not in self._stored:
            why = left_by_training(self._stored.values()) or (
                "config.json and the weights belong to different models, or a shard is missing from the index"
            )
            raise ModelFolderError(f"{self.folder} holds no tensor {name!r}; {why}")
        return self._stored[name]


def _is_finite(tensor: Tensor, size: int) -> bool:
    """Return whether all values are finite. Checks `size` elements together."""
    if tensor.element_size() == 1:  # e4m3, or its bytes: no infinity, and one NaN of either sign
        codes = tensor.view(torch.uint8).flatten()
        return not any(bool((piece & 0x7F == 0x7F).any()) for piece in torch.split(codes, size))
    # One sum for each piece needs no mask. Only a sum that overflows needs a check of every element.
    for piece in torch.split(tensor.flatten(), size):
        if not bool(torch.isfinite(piece.sum(dtype=torch.float32))) and not bool(torch.isfinite(piece).all()):
            return False
    return True
