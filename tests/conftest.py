"""Triton kernels run under its interpreter where there is no GPU; that must be said before Triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
