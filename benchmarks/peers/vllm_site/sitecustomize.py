"""Start-up hook for vLLM's processes (on PYTHONPATH, so that the workers it spawns run it too).

The CPU build of torch cannot load torchvision's compiled operators, and torchvision's import then fails on two
schemas that are missing. They are declared here, just before torchvision is first imported.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class DeclareTorchvisionSchemas(MetaPathFinder):
    """A finder that finds nothing. It declares the schemas just before torchvision registers its meta kernels."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision._meta_registrations":
            import torch

            api: Any = torch.library
            self.library = api.Library("torchvision", "FRAGMENT")  # schemas live as long as this does
            for schema in SCHEMAS:
                self.library.define(schema)
        return None


sys.meta_path.insert(0, DeclareTorchvisionSchemas())
